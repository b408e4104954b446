"""How the claims on trained arms are measured: one function for each kind of endpoint.

An entry of the catalogue names its function (`measure`). The function yields findings, one for each set of arms to
which the claim applies: that the endpoint lies above the claim's limit or control. Arms are found by their settings
(`arm_kinds.KINDS`), never by their names.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from tailrl.analysis import arm_pairs
from tailrl.analysis.survival import collapses, deepest_loss, tells_collapse
from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import Claim
from tailrl.claims.finding import Finding, ends, fact, interval, measured, nothing
from tailrl.claims.numbers import EXACT_LOGARITHMS, LOGARITHMS, first_and_last, mean, numbers, powers, scores
from tailrl.config.arm_kinds import kind
from tailrl.stats.intervals import share_difference
from tailrl.stats.survival import log_rank
from tailrl.stats.tests import Difference, all_hold, arm_difference, difference_from, one_sided
from tailrl.tracking import metrics as keys

HARDER = "problems become harder as the reward rises: a collapse cannot be told from it"


def arms_of(claim: Claim, results: Results) -> list[str]:
    """The arms that the claim is about."""
    return arm_pairs.arms_as(results, kind(claim.arms))


def pairs_of(claim: Claim, results: Results) -> Iterator[tuple[str, str]]:
    """The arms that the claim is about, each with its control."""
    return arm_pairs.pairs(results, kind(claim.arms), kind(claim.against), apart=claim.apart)


def level(claim: Claim, results: Results) -> Iterator[Finding]:
    """One number per run, as a mean over an arm's runs: above a limit."""
    log = claim.number in LOGARITHMS
    for arm in arms_of(claim, results):
        value_S = numbers(results, arm, claim.number)
        exact = EXACT_LOGARITHMS if log else (0.0,)
        found = difference_from(value_S, 0.0, exact)
        effect = powers(found) if log else ends(found)
        beside = f"{mean(numbers(results, arm, claim.beside)):.3g}" if claim.beside else ""
        tested = one_sided(difference_from(value_S, math.log10(claim.limit) if log else claim.limit, exact))
        yield measured((arm,), found, effect, claim.seen.format(interval(*effect), beside), *tested)


def ratio(claim: Claim, results: Results) -> Iterator[Finding]:
    """The ratio of two arms' geometric means over runs of a number: above 1."""
    for arms in pairs_of(claim, results):
        known = [value_S[~np.isnan(value_S)] for value_S in (numbers(results, arm, claim.number) for arm in arms)]
        if not all(value_S.size for value_S in known):
            yield nothing(arms)
            continue
        found = arm_difference(*known)
        words = claim.seen.format(arms[0], interval(*powers(found)), arms[1])
        yield measured(arms, found, powers(found), words, *one_sided(found))


def score(claim: Claim, results: Results) -> Iterator[Finding]:
    """avg@k of one arm minus that of another, over seeds (Welch): above 0."""
    for arms in pairs_of(claim, results):
        first_S, second_S = (scores(results, arm) for arm in arms)
        found = arm_difference(first_S, second_S)
        points = interval(*[100 * end for end in ends(found)], form="+.1f")
        words = f"avg@k of {arms[0]} less that of {arms[1]} is {points} points"
        if claim.reported is not None and not math.isnan(found.low):
            words += _beside_reported(claim.reported, found, float(np.mean(second_S)))
        yield measured(arms, found, ends(found), words, *one_sided(found))


def _beside_reported(reported: float, found: Difference, control: float) -> str:
    """Whether the interval contains the paper's effect, as points and relative to the control."""
    sizes = {"as points": reported, "as relative": reported * control}
    said = [f"{'inside' if found.low <= size <= found.high else 'outside'} {how}" for how, size in sizes.items()]
    return f"; of this interval the paper's {100 * reported:g} % is {', '.join(said)}"


def alike(claim: Claim, results: Results) -> Iterator[Finding]:
    """The same difference of scores as in `score`: smaller than the limit in either direction."""
    for found in score(claim, results):
        first_S, second_S = (scores(results, arm) for arm in found.arms)
        low, high = (one_sided(arm_difference(first_S + shift, second_S)) for shift in (claim.limit, -claim.limit))
        p_for, p_against = all_hold(low, high[::-1])
        yield replace(found, p_for=p_for, p_against=p_against)


def above_each(claim: Claim, results: Results) -> Iterator[Finding]:
    """The differences of `score` from an arm of each kind in `against`: all above 0."""
    kinds = [list(score(claim.model_copy(update={"against": (kind,)}), results)) for kind in claim.against]
    for arm in dict.fromkeys(found.arms[0] for found in kinds[0]):
        alone = [[found for found in kind if found.arms[0] == arm] for kind in kinds]
        if all(alone):
            parts = [found for kind in alone for found in kind]
            least = min(parts, key=lambda part: part.effect)
            p_for, p_against = all_hold(*((part.p_for, part.p_against) for part in parts))
            yield replace(
                least,
                arms=(arm, *(part.arms[1] for part in parts)),
                seeds=min(part.seeds for part in parts),
                words="; ".join(part.words for part in parts),
                p_for=p_for,
                p_against=p_against,
            )


def survival(claim: Claim, results: Results) -> Iterator[Finding]:
    """One arm's runs collapse sooner than another's: log-rank test by permutation of runs."""
    for arms in pairs_of(claim, results):
        first, second = (collapses(results.runs[arm]) for arm in arms)
        counts = [(sum(step is not None for step in steps), len(steps)) for steps, _ in (first, second)]
        if not all(n for _, n in counts):
            harder = any(not tells_collapse(run.metrics) for arm in arms for run in results.runs[arm])
            yield nothing(arms, HARDER) if harder else nothing(arms)
            continue
        share = share_difference(*counts)
        words = "; ".join(f"{k} of {n} runs of {arm} collapsed" for arm, (k, n) in zip(arms, counts, strict=True))
        found = Finding(arms, share.n, *ends(share), words, events=sum(k for k, _ in counts))
        if not found.events:
            lost = 100 * deepest_loss([run for arm in arms for run in results.runs[arm]])
            deepest = f"; the deepest loss is {lost:.0f} % of a run's best reward" if not math.isnan(lost) else ""
            yield replace(found, words=f"no run collapsed{deepest}")
        else:
            yield replace(found, p_for=log_rank(first, second), p_against=log_rank(second, first))


def explosion(claim: Claim, results: Results) -> Iterator[Finding]:
    """The unmasked k3 grows in one arm's runs by more than a factor (the limit), in another arm's by less."""
    limit = math.log10(claim.limit)
    for arms in pairs_of(claim, results):
        grown = [numbers(results, arm, "k3_growth") for arm in arms]
        ratios = [difference_from(logs_S, 0.0) for logs_S in grown]
        exploded = [int((logs_S >= limit).sum()) for logs_S in grown]
        fewest = min(ratios, key=lambda ratio: ratio.n)
        if not any(exploded):
            largest = 10 ** float(np.fmax.reduce(np.concatenate(grown)))
            words = f"k3 explodes in no run; where it grows most, it ends at {largest:.3g} times its start"
            yield replace(measured(arms, fewest, powers(ratios[0]), words), events=0)
            continue
        words = "; ".join(
            f"{arm}: k3 ends at {interval(*powers(ratio))} times its start, explodes in {count} of {ratio.n} runs"
            for arm, ratio, count in zip(arms, ratios, exploded, strict=True)
        )
        one, other = (one_sided(difference_from(logs_S, limit)) for logs_S in grown)
        yield measured(arms, fewest, powers(ratios[0]), words, *all_hold(one, other[::-1]))


def falling_while_flat(claim: Claim, results: Results) -> Iterator[Finding]:
    """An arm's reward falls from the first tenth of steps to the last, while k3 grows by less than the limit."""
    for arm in arms_of(claim, results):
        change_S = [last - first for first, last in (first_and_last(run, keys.REWARD) for run in results.runs[arm])]
        grown_S = numbers(results, arm, "k3_growth")
        reward, times = difference_from(change_S, 0.0), difference_from(grown_S, 0.0)
        fewest = min(reward, times, key=lambda part: part.n)
        if not fewest.n:
            yield nothing((arm,))
            continue
        steep, flat = one_sided(difference_from(grown_S, math.log10(claim.limit)))
        up, down = one_sided(reward)
        k3 = f"k3 ends at {interval(*powers(times))} times its start"
        words = f"the reward changes by {interval(*ends(reward), form='+.3f')}, {k3}"
        found = Finding((arm,), fewest.n, *ends(reward), words, events=sum(change < 0 for change in change_S))
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


Measure = Callable[[Claim, Results], Iterator[Finding]]

MEASURES: dict[str, Measure] = {
    function.__name__: function
    for function in (level, ratio, score, alike, above_each, survival, explosion, falling_while_flat, zeros, veto)
}
"""The kinds of endpoints by their names in the catalogue."""
