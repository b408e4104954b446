"""Every rejection against its definition, one token and one response at a time in float64."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tailrl.config.arm import Correction
from tailrl.config.rejection import SIGNED, Rejection
from tailrl.objective.corrections import Weights, correct
from tailrl.objective.rejections import REDUCTIONS, STATISTICS
from tailrl.runtime.errors import StudyError

LENGTHS = (5, 1, 3, 8, 2, 6, 1, 4)
rng = np.random.default_rng(3)
INFER = [np.log(rng.uniform(0.05, 0.9, n)).tolist() for n in LENGTHS]
OLD = [[min(-0.01, q + d) for q, d in zip(row, rng.normal(0, 0.3, len(row)), strict=True)] for row in INFER]
NEW = [[min(-0.005, p + d) for p, d in zip(row, rng.normal(0, 0.2, len(row)), strict=True)] for row in OLD]
ADVANTAGE = [0.7, -0.3, 0.0, -1.2, 0.4, -0.1, 1.0, -0.6]


def statistic(of: str, logp: float, logq: float) -> float:
    p, q = math.exp(logp), math.exp(logq)
    if of == "tv":
        return p - q
    if of == "kl":
        kl = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p))
        return kl if p > q else -kl
    if of == "abs_tv":
        return abs(p - q)
    if of in ("abs_kl", "kl_both"):
        forth, back = (a * math.log(a / b) + (1 - a) * math.log((1 - a) / (1 - b)) for a, b in ((q, p), (p, q)))
        return forth if of == "abs_kl" else max(forth, back)
    r = p / q
    return {"k1": -math.log(r), "k2": math.log(r) ** 2 / 2, "k3": r - 1 - math.log(r)}[of]


def drops(rule: Rejection, value: float, advantage: float) -> bool:
    above = rule.above is not None and value > rule.above
    below = rule.below is not None and value < rule.below
    if rule.when == "negative":
        return advantage < 0 and (above or below)
    if rule.when == "outward":
        return above if advantage > 0 else below
    return above or below


def expected(rule: Rejection) -> list[list[bool]]:
    """Which tokens are dropped, by themselves or with their response."""
    pairs = {"r_corr": (OLD, INFER), "r_ppo": (NEW, OLD), "r_rollout": (NEW, INFER)}[rule.ratio]
    found = []
    for row_p, row_q, advantage in zip(*pairs, ADVANTAGE, strict=True):
        values = [statistic(rule.of, p, q) for p, q in zip(row_p, row_q, strict=True)]
        if rule.by == "token":
            found.append([drops(rule, value, advantage) for value in values])
        else:
            whole = {"sum": math.fsum, "mean": np.mean, "max": max}[rule.by](values)  # type: ignore[operator]
            found.append([drops(rule, float(whole), advantage)] * len(values))
    return found


def corrected(correction: Correction, **other: Any) -> Weights:
    sampler, old, new = (torch.tensor(list(itertools.chain(*rows)), dtype=torch.float64) for rows in (INFER, OLD, NEW))
    sequence = torch.tensor([n for n, length in enumerate(LENGTHS) for _ in range(length)])
    given = {"logp_sampler_T": sampler, "advantage_T": torch.tensor(ADVANTAGE, dtype=torch.float64)[sequence]} | other
    outside = torch.zeros_like(sequence, dtype=torch.bool)
    return correct(old - sampler, outside, sequence, len(LENGTHS), correction, new - old, **given)


LIMITS = {"k1": 0.15, "k2": 0.02, "k3": 0.02, "tv": 0.04, "kl": 0.01}
LIMITS |= {"abs_tv": 0.06, "abs_kl": 0.02, "kl_both": 0.02}
RULES = [
    Rejection(of=of, by=by, above=scale * LIMITS[of], ratio=ratio, when=when)  # type: ignore[arg-type]
    for of, by, ratio, when, scale in itertools.product(
        STATISTICS, ("token", *REDUCTIONS), ("r_corr", "r_ppo", "r_rollout"), ("always", "negative"), (1,)
    )
]
RULES += [Rejection(of=of, by=by, above=0.1, below=-0.05) for of in SIGNED for by in ("token", "sum", "mean")]  # type: ignore[arg-type]
RULES += [
    Rejection(of=of, by="token", above=LIMITS[of], below=-LIMITS[of] / 2, ratio=ratio, when="outward")  # type: ignore[arg-type]
    for of in ("tv", "kl")
    for ratio in ("r_corr", "r_rollout")
]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(map(str, rule.model_dump().values())))
def test_every_rejection_is_the_definition(rule: Rejection) -> None:
    wanted = list(itertools.chain(*expected(rule)))
    found = corrected(Correction(reject=(rule,)))
    assert (found.weight_T == 0).tolist() == wanted and set(found.weight_T.tolist()) <= {0.0, 1.0}
    if rule.by == "token":
        assert found.masked_T.tolist() == wanted and not found.rejected_N.any()
    else:
        assert found.rejected_N.tolist() == [row[0] for row in expected(rule)] and not found.masked_T.any()
    assert not found.truncated_T.any() and not found.vetoed_N.any()


def test_the_rules_here_drop_some_and_keep_some() -> None:
    mixed = [any(itertools.chain(*expected(rule))) and not all(itertools.chain(*expected(rule))) for rule in RULES]
    assert sum(mixed) > 0.9 * len(RULES)


SEGMENTS = [(3, 2), (1,), (1, 2), (4, 4), (2,), (1, 5), (1,), (2, 2)]
"""Tokens of each segment of each response."""


@pytest.mark.parametrize("of", ["k1", "tv"])
def test_a_rejection_by_segment_drops_whole_segments(of: str) -> None:
    """ROLL's filters: the mean over a run of a turn's tokens, each segment by itself."""
    rule = Rejection(of=of, by="segment", above=LIMITS[of], below=-LIMITS[of] / 2)
    wanted: list[bool] = []
    for row_p, row_q, lengths in zip(OLD, INFER, SEGMENTS, strict=True):
        values = [statistic(of, p, q) for p, q in zip(row_p, row_q, strict=True)]
        for length in lengths:
            own, values = values[:length], values[length:]
            wanted += [drops(rule, float(np.mean(own)), 1.0)] * length
    sizes = [length for lengths in SEGMENTS for length in lengths]
    segment = torch.tensor([n for n, length in enumerate(sizes) for _ in range(length)])
    found = corrected(Correction(reject=(rule,)), segment_T=segment)
    assert (found.weight_T == 0).tolist() == wanted == found.masked_T.tolist() and not found.rejected_N.any()
    by_response = corrected(Correction(reject=(rule.model_copy(update={"by": "mean"}),)))
    assert 0 < sum(wanted) < len(wanted) and not torch.equal(found.weight_T, by_response.weight_T)
    whole = corrected(Correction(reject=(rule,)))  # a response is one segment where none are given
    assert torch.equal(whole.weight_T, by_response.weight_T)


@pytest.mark.parametrize("limit", [1e-4, 5e-3, 0.02, 1.0])
def test_m2po_drops_the_largest_until_the_mean_is_small_enough(limit: float) -> None:
    """Arrives one token at a time, as arXiv 2510.01161 words it; the last token stays."""
    values = [statistic("k2", p, q) for p, q in zip(itertools.chain(*OLD), itertools.chain(*INFER), strict=True)]
    kept = set(range(len(values)))
    while len(kept) > 1 and math.fsum(values[i] for i in kept) / len(kept) > limit:
        kept.remove(max(kept, key=values.__getitem__))
    found = corrected(Correction(reject=(Rejection(of="k2", by="batch", above=limit),)))
    assert {int(i) for i in found.weight_T.nonzero()} == kept
    assert found.masked_T.tolist() == [i not in kept for i in range(len(values))]
    assert (limit == 1.0) == (len(kept) == len(values)) and (limit > 1e-4 or len(kept) < 4)


def test_kpop_judges_both_directions() -> None:
    """A probability that falls from a half to a thousandth is far in one direction, and near in the other."""
    ratio, logq = (torch.tensor([math.log(x)], dtype=torch.float64) for x in (0.001 / 0.5, 0.5))
    forth = 0.5 * math.log(0.5 / 0.001) + 0.5 * math.log(0.5 / 0.999)
    back = 0.001 * math.log(0.001 / 0.5) + 0.999 * math.log(0.999 / 0.5)
    assert STATISTICS["abs_kl"](ratio, logq).item() == pytest.approx(forth, rel=1e-12)
    assert STATISTICS["kl_both"](ratio, logq).item() == pytest.approx(max(forth, back), rel=1e-12)
    reverse = STATISTICS["kl_both"](-ratio, logq + ratio)  # the roles of p and q change, and not the value
    assert reverse.item() == pytest.approx(max(forth, back), rel=1e-12)
    assert abs(forth - back) > 1


def test_trust_region_masking_is_two_rules_that_each_must_be_met() -> None:
    """TRM, arXiv 2512.23075: max_t k2 ≤ ε₁ and mean_t k3 ≤ ε₂."""
    first, second = Rejection(of="k2", by="max", above=0.03), Rejection(of="k3", by="mean", above=0.025)
    wanted = [a[0] or b[0] for a, b in zip(expected(first), expected(second), strict=True)]
    assert 0 < sum(wanted) < len(wanted)
    assert all([a[0] for a in expected(rule)] != wanted for rule in (first, second))
    assert corrected(Correction(reject=(first, second))).rejected_N.tolist() == wanted


def test_a_rejection_multiplies_a_weight() -> None:
    rule = Rejection(of="tv", by="token", above=0.04, below=-0.04, ratio="r_rollout", when="outward")
    dppo, plain = (
        corrected(Correction(token="tis", token_threshold=20.0, reject=(rule,))),
        corrected(Correction(token="is")),
    )
    kept = ~torch.tensor(list(itertools.chain(*expected(rule))))
    assert torch.equal(dppo.weight_T, plain.weight_T * kept) and 0 < kept.sum() < len(kept)


def test_limits_themselves_are_kept_and_empty_responses_too() -> None:
    at = Rejection(of="k1", by="mean", above=0.5, below=-0.5)
    delta, sequence = torch.tensor([0.5, -0.5, 0.5000001, -0.5000001]), torch.tensor([0, 1, 2, 3])
    inside = torch.zeros(4, dtype=torch.bool)
    assert correct(delta, inside, sequence, 5, Correction(reject=(at,))).used_N.tolist() == [1, 1, 0, 0, 1]
    positive = Rejection(of="k1", by="sum", above=2.0, below=1.0)
    assert correct(delta, inside, sequence, 5, Correction(reject=(positive,))).used_N.tolist() == [0, 0, 0, 0, 1]


def test_a_certain_token_has_a_binary_divergence() -> None:
    """Of q = 1 and p = 1 neither 0 log 0 nor rounding above 1 makes it nan."""
    kl = STATISTICS["kl"]
    logq, ratio = torch.tensor([0.0, 0.0, -1.0, 1e-3]), torch.tensor([0.0, -0.5, 1.0, 0.0])
    found = kl(ratio, logq)
    assert found[0] == 0 and found[1].item() == pytest.approx(-0.5) and found[2] == math.inf and found[3] == 0


def test_what_a_rejection_needs_is_named() -> None:
    tv = Correction(reject=(Rejection(of="tv", by="token", above=0.1),))
    with pytest.raises(StudyError, match=r"^correction\.reject: of: tv needs the sampler's log-probs$"):
        corrected(tv, logp_sampler_T=None)
    negative = Correction(reject=(Rejection(of="k1", by="mean", above=0.1, when="negative"),))
    with pytest.raises(StudyError, match=r"^correction\.reject: when: negative needs the advantages$"):
        corrected(negative, advantage_T=None)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"of": "k1", "by": "mean"}, "a rejection needs above or below"),
        ({"of": "k3", "by": "mean", "below": 0.1}, "of: k3 is never below 0: leave out below"),
        ({"of": "k2", "by": "mean", "above": 0.0}, "of: k2 is never below 0: above must exceed 0"),
        ({"of": "k1", "by": "max", "below": -0.1}, "by: max has no lower limit"),
        ({"of": "k1", "by": "sum", "above": 0.1, "below": 0.1}, "below must be less than above"),
        ({"of": "k1", "by": "token", "above": 0.1, "when": "outward"}, "when: outward is for of: tv or kl, by: token"),
        ({"of": "tv", "by": "mean", "above": 0.1, "when": "outward"}, "when: outward is for of: tv or kl, by: token"),
        ({"of": "k2", "by": "batch", "above": 0.1, "when": "negative"}, "by: batch needs above alone"),
        ({"of": "k1", "by": "batch", "above": 0.1}, "of: k1 has either sign, so that by: batch has no largest values"),
    ],
)
def test_a_rule_that_says_nothing_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        Rejection.model_validate(settings)
