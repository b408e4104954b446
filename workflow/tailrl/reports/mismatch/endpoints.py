"""How claims on the mismatch are measured: by a number of each run, its growth, and steps with k3 of 0 or a veto."""

import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import Claim
from tailrl.claims.finding import Finding, fact, measured, nothing
from tailrl.page_parts.number_text import with_interval
from tailrl.reports.arm_pairs import arms_of, pairs_of
from tailrl.reports.mismatch.run_numbers import EXACT_LOGARITHMS, LOGARITHMS, first_and_last, numbers, powers
from tailrl.stats.intervals import known_mean
from tailrl.stats.tests import all_hold, arm_difference, difference_from, one_sided
from tailrl.tracking import metrics as keys


def level(claim: Claim, results: Results) -> Iterator[Finding]:
    """One number per run, as a mean over an arm's runs: above a limit."""
    log = claim.number in LOGARITHMS
    for arm in arms_of(claim, results):
        value_S = numbers(results, arm, claim.number)
        exact = EXACT_LOGARITHMS if log else (0.0,)
        found = difference_from(value_S, 0.0, exact)
        effect = powers(found) if log else found
        beside = f"{known_mean(numbers(results, arm, claim.beside)):.3g}" if claim.beside else ""
        tested = one_sided(difference_from(value_S, math.log10(claim.limit) if log else claim.limit, exact))
        yield measured((arm,), effect, claim.seen.format(with_interval(effect), beside), *tested)


def ratio(claim: Claim, results: Results) -> Iterator[Finding]:
    """The ratio of two arms' geometric means over runs of a number: above 1."""
    for arms in pairs_of(claim, results):
        known = [value_S[~np.isnan(value_S)] for value_S in (numbers(results, arm, claim.number) for arm in arms)]
        if not all(value_S.size for value_S in known):
            yield nothing(arms)
            continue
        found = arm_difference(*known)
        times = powers(found)
        words = claim.seen.format(arms[0], with_interval(times), arms[1])
        yield measured(arms, times, words, *one_sided(found))


def explosion(claim: Claim, results: Results) -> Iterator[Finding]:
    """The unmasked k3 grows in one arm's runs by more than a factor (the limit), in another arm's by less."""
    limit = math.log10(claim.limit)
    for arms in pairs_of(claim, results):
        grown = [numbers(results, arm, "k3_growth") for arm in arms]
        ratios = [difference_from(logs_S, 0.0) for logs_S in grown]
        exploded = [int((logs_S >= limit).sum()) for logs_S in grown]
        effect = replace(powers(ratios[0]), n=min(ratio.n for ratio in ratios))
        if not any(exploded):
            largest = 10 ** float(np.fmax.reduce(np.concatenate(grown)))
            words = f"k3 explodes in no run; where it grows most, it ends at {largest:.3g} times its start"
            yield replace(measured(arms, effect, words), events=0)
            continue
        words = "; ".join(
            f"{arm}: k3 ends at {with_interval(powers(ratio))} times its start, explodes in {count} of {ratio.n} runs"
            for arm, ratio, count in zip(arms, ratios, exploded, strict=True)
        )
        one, other = (one_sided(difference_from(logs_S, limit)) for logs_S in grown)
        yield measured(arms, effect, words, *all_hold(one, other[::-1]))


def falling_while_flat(claim: Claim, results: Results) -> Iterator[Finding]:
    """An arm's reward falls from the first tenth of steps to the last, while k3 grows by less than the limit."""
    for arm in arms_of(claim, results):
        change_S = [last - first for first, last in (first_and_last(run, keys.REWARD) for run in results.runs[arm])]
        grown_S = numbers(results, arm, "k3_growth")
        reward, times = difference_from(change_S, 0.0), difference_from(grown_S, 0.0)
        effect = replace(reward, n=min(reward.n, times.n))
        if not effect.n:
            yield nothing((arm,))
            continue
        steep, flat = one_sided(difference_from(grown_S, math.log10(claim.limit)))
        up, down = one_sided(reward)
        k3 = f"k3 ends at {with_interval(powers(times))} times its start"
        words = f"the reward changes by {with_interval(reward, '{:+.3f}'.format)}, {k3}"
        found = replace(measured((arm,), effect, words), events=sum(change < 0 for change in change_S))
        if found.events:
            p_for, p_against = all_hold((down, up), (flat, steep))
            yield replace(found, p_for=p_for, p_against=p_against)
        else:
            yield replace(found, words=f"no run's reward falls; {words}")


def zeros(claim: Claim, results: Results) -> Iterator[Finding]:
    """k3, masked or not, is 0 at every step of every run, but for skipped updates, which record none."""
    for arm in arms_of(claim, results):
        updated = [(run, run.metric(keys.SKIPPED) != 1) for run in results.runs[arm]]
        both = keys.K3_MASKED, keys.K3_UNMASKED
        k3 = np.concatenate([run.metric(key)[updated_N] for run, updated_N in updated for key in both])
        largest, zero = float(np.fmax.reduce(np.abs(k3), initial=math.nan)), int((k3 == 0).sum())
        known = not math.isnan(largest)
        words = f"{zero} of {k3.size} recorded values are 0" + (f", the largest is {largest:.2g} nats" if known else "")
        found = fact((arm,), len(results.runs[arm]), largest, words, zero == k3.size)
        yield found if known else replace(found, holds=None)


def veto(claim: Claim, results: Results) -> Iterator[Finding]:
    """A veto discards a sequence in every step with a token outside the trainer's set."""
    for arm in arms_of(claim, results):
        outside, vetoed = (
            np.concatenate([run.metric(key) for run in results.runs[arm]]) for key in (keys.OUTSIDE_COUNT, keys.VETOED)
        )
        met = (outside > 0) & ~np.isnan(vetoed)
        steps, caught = int(met.sum()), int((met & (vetoed > 0)).sum())
        words = f"in {caught} of the {steps} steps with such a token"
        words = words if steps else "no sampled token lay outside the trainer's set"
        share = caught / steps if steps else math.nan
        yield fact((arm,), len(results.runs[arm]), share, words, caught == steps if steps else None)


ENDPOINTS = (level, ratio, explosion, falling_while_flat, zeros, veto)
"""A claim's entry in the catalogue names its function."""
