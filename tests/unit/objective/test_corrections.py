"""Every weight against its definition, written out one token and one sequence at a time in float64."""

import itertools
import math

import numpy as np
import pytest
import torch

from tailrl.config.arm import Correction
from tailrl.objective.corrections import Weights, correct, normaliser
from tailrl.objective.sequences import sequence_any, sequence_mean, sequence_sum
from tailrl.runtime.errors import NumericalError, StudyError

NONE = Correction()
MIS = Correction(sequence="mis", sequence_threshold=2.0)
SEQUENCE = ("none", "is", "tis", "mis", "geometric", "reject_k1", "reject_k3")
TOKEN = ("none", "is", "tis", "mask")
EVERY = [Correction(token=token, sequence=sequence) for token in TOKEN for sequence in SEQUENCE]  # type: ignore[arg-type]
LOWER = [
    Correction(token="tis", token_lower=0.9),
    Correction(token="mask", token_threshold=5.0, token_lower=0.8),
    Correction(sequence="tis", sequence_lower=0.9),
    Correction(sequence="mis", sequence_lower=0.9),
    Correction(sequence="geometric", sequence_lower=0.99),
]
EVERY += LOWER
WEIGHTED = [correction for correction in EVERY if correction.weighted]


def name(correction: Correction) -> str:
    lower = [str(bound) for bound in (correction.token_lower, correction.sequence_lower) if bound]
    return "-".join([correction.token, correction.sequence, *lower])


def weigh(
    deltas: list[list[float]],
    correction: Correction,
    outside: list[list[bool]] | None = None,
    dtype: torch.dtype = torch.float64,
) -> Weights:
    sequence = [n for n, row in enumerate(deltas) for _ in row]
    outside = outside or [[False] * len(row) for row in deltas]
    delta_T = torch.tensor(list(itertools.chain(*deltas)), dtype=dtype)
    return correct(
        delta_T,
        torch.tensor(list(itertools.chain(*outside)), dtype=torch.bool),
        torch.tensor(sequence, dtype=torch.int64),
        len(deltas),
        correction,
        torch.zeros_like(delta_T),
    )


def exp(value: float) -> float:
    """e^value, in 80 bits where 64 do not hold it."""
    return math.exp(value) if value < 700 else np.exp(np.longdouble(value))  # type: ignore[no-any-return]


def token_weight(delta: float, correction: Correction) -> float:
    ratio, most = exp(delta), correction.token_threshold
    lower = correction.token_lower
    if correction.token == "is":
        return ratio
    if correction.token == "tis":
        return max(lower or 0.0, min(ratio, most))
    if correction.token == "mask":
        return ratio if (lower or 1 / most) <= ratio <= most else 0.0
    return 1.0


def sequence_weight(deltas: list[float], correction: Correction) -> float:
    """The weight of a sequence of at least one token."""
    ratio, most = math.prod(exp(delta) for delta in deltas), correction.limit
    if correction.sequence == "is":
        return ratio
    lower = correction.sequence_lower
    if correction.sequence == "tis":
        return max(lower or 0.0, min(ratio, most))
    if correction.sequence == "mis":
        return ratio if (lower or 0.0) <= ratio <= most else 0.0
    if correction.sequence == "geometric":
        return float((lower or 1 / most) <= ratio ** (1 / len(deltas)) <= most)
    if correction.sequence == "reject_k1":
        return float(abs(np.mean([-delta for delta in deltas])) <= most)
    if correction.sequence == "reject_k3":
        return float(np.mean([exp(delta) - delta - 1 for delta in deltas]) <= most)
    return 1.0


def random_deltas(scale: float, seed: int = 0) -> list[list[float]]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, scale, n).tolist() for n in (5, 1, 3, 8, 2, 6, 1, 4, 12, 7, 30, 9)]


def test_sums_and_means_are_over_sequences() -> None:
    values, sequence = torch.tensor([1.0, 2.0, 4.0, 8.0]), torch.tensor([2, 0, 2, 0])
    assert sequence_sum(values, sequence, 4).tolist() == [10.0, 0.0, 5.0, 0.0]
    assert sequence_mean(values, sequence, 4).tolist() == [5.0, 0.0, 2.5, 0.0]
    assert sequence_any(values > 7, sequence, 4).tolist() == [True, False, False, False]


# --- every weight ------------------------------------------------------------------------------------


@pytest.mark.parametrize("correction", EVERY, ids=name)
def test_which_corrections_weigh_by_the_ratio(correction: Correction) -> None:
    """These divide by the sampler's probability, and only one of them may be used at a time."""
    assert correction.ratio == (0 < weigh([[0.0005]], correction).weight_T.item() != 1)
    assert correction.sequence_ratio == (
        0 < weigh([[0.0005]], correction.model_copy(update={"token": "none"})).used_N.item() != 1
    )


@pytest.mark.parametrize("scale", [1e-3, 0.045, 0.5])
@pytest.mark.parametrize("correction", EVERY, ids=name)
def test_every_weight_is_the_definition(correction: Correction, scale: float) -> None:
    """The token's weight times its sequence's; at three sizes of mismatch, so that some are kept, some rejected."""
    deltas = random_deltas(scale)
    found = weigh(deltas, correction)
    tokens = [[token_weight(delta, correction) for delta in row] for row in deltas]
    sequences = [sequence_weight(row, correction) for row in deltas]
    expected = [w * of_sequence for row, of_sequence in zip(tokens, sequences, strict=True) for w in row]
    np.testing.assert_allclose(found.weight_T, expected, rtol=1e-12)
    np.testing.assert_allclose(found.raw_N, [math.exp(math.fsum(row)) for row in deltas], rtol=1e-12)
    used = [np.mean(row) * of_sequence for row, of_sequence in zip(tokens, sequences, strict=True)]
    np.testing.assert_allclose(found.used_N, used, rtol=1e-12)
    assert found.rejected_N.tolist() == [w == 0 for w in sequences]
    assert found.masked_T.tolist() == [w == 0 for row in tokens for w in row]
    assert not found.vetoed_N.any()
    plain = [[math.exp(delta) if correction.token != "none" else 1.0 for delta in row] for row in deltas]
    cut_T = [w not in (0.0, r) for row, free in zip(tokens, plain, strict=True) for w, r in zip(row, free, strict=True)]
    whole = [w not in (0.0, math.prod(map(math.exp, row))) for w, row in zip(sequences, deltas, strict=True)]
    cut_N = [cut and correction.sequence == "tis" for cut in whole]
    lengths = [len(row) for row in deltas]
    spread = [cut for cut, length in zip(cut_N, lengths, strict=True) for _ in range(length)]
    expected_T = [a or b for a, b in zip(cut_T, spread, strict=True)]
    # A weight that is exactly the ratio may be one unit in the last place off.
    assert found.truncated_T.tolist() == expected_T or correction.sequence == "is"


@pytest.mark.parametrize(
    ("correction", "scale"),
    [
        (Correction(token="mask"), 0.5),
        (Correction(sequence="mis"), 0.5),
        (Correction(sequence="geometric"), 1e-3),
        (Correction(sequence="reject_k1"), 1e-3),
        (Correction(sequence="reject_k3"), 0.045),
    ],
)
def test_each_scale_rejects_some_and_keeps_some(correction: Correction, scale: float) -> None:
    weights = weigh(random_deltas(scale), correction).weight_T
    assert (weights == 0).any() and (weights > 0).any()


def test_no_correction_weighs_one_but_reports_the_ratio() -> None:
    found = weigh([[0.1, -0.3], [3.0]], NONE)
    assert found.weight_T.tolist() == [1.0, 1.0, 1.0] and found.used_N.tolist() == [1.0, 1.0]
    assert found.raw_N.tolist() == pytest.approx([math.exp(-0.2), math.exp(3.0)])
    assert not found.rejected_N.any() and not found.vetoed_N.any() and not found.masked_T.any()


def test_mis_weighs_by_the_ratio_and_rejects_above_the_threshold() -> None:
    found = weigh([[0.2, 0.3], [0.5, 0.3], [-4.0], [200.0]], MIS, dtype=torch.float32)
    assert found.used_N.tolist() == pytest.approx([math.exp(0.5), 0.0, math.exp(-4.0), 0.0])
    assert found.rejected_N.tolist() == [False, True, False, True]


# --- thresholds --------------------------------------------------------------------------------------


def test_a_weight_at_the_threshold_is_kept() -> None:
    at_one = Correction(sequence="mis", sequence_threshold=1.0)
    found = weigh([[0.0, 0.0], [1e-6]], at_one, dtype=torch.float32)
    assert found.used_N.tolist() == [1.0, 0.0]
    assert found.rejected_N.tolist() == [False, True]


def test_a_truncated_weight_is_the_threshold_itself() -> None:
    assert weigh([[5.0, 5.0], [400.0]], Correction(sequence="tis", sequence_threshold=3.0)).used_N.tolist() == [3, 3]
    assert weigh([[5.0, 500.0, -1.0]], Correction(token="tis", token_threshold=3.0)).weight_T.tolist() == [
        3.0,
        3.0,
        pytest.approx(math.exp(-1)),
    ]


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_two_sided_thresholds_keep_their_ends(sign: float) -> None:
    """In float32, as in training: the very number is inside, the next one out is not."""
    log_two = torch.tensor(2.0).log()
    inside = sign * log_two.item()
    beyond = sign * torch.nextafter(log_two, torch.tensor(9.0)).item()
    mask = weigh([[inside, beyond]], Correction(token="mask"), dtype=torch.float32)
    assert mask.masked_T.tolist() == [False, True]
    geometric = Correction(sequence="geometric", sequence_threshold=2.0)
    assert weigh([[inside], [beyond]], geometric, dtype=torch.float32).used_N.tolist() == [1.0, 0.0]
    k1 = Correction(sequence="reject_k1", sequence_threshold=0.5)
    found = weigh([[sign * 0.5], [sign * (0.5 + 1e-6)], [sign, 0.0], [sign, -sign]], k1, dtype=torch.float32)
    assert found.used_N.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_k3_cannot_cancel_between_tokens() -> None:
    found = weigh([[0.5, -0.5], [0.01, -0.01]], Correction(sequence="reject_k3"))
    assert found.used_N.tolist() == [0.0, 1.0]
    assert weigh([[0.5, -0.5]], Correction(sequence="reject_k1")).used_N.tolist() == [1.0]


def test_thresholds_that_are_not_given() -> None:
    """Two, but for rejection (arXiv 2605.14220) and for the geometric mean."""
    limits = {sequence: Correction(sequence=sequence).limit for sequence in SEQUENCE}  # type: ignore[arg-type]
    assert limits == {
        "none": 2.0,
        "is": math.inf,
        "tis": 2.0,
        "mis": 2.0,
        "geometric": 1.001,
        "reject_k1": 1e-3,
        "reject_k3": 1e-3,
    }
    assert Correction(sequence="reject_k1", sequence_threshold=0.2).limit == 0.2


# --- too large and too small for float32 ---------------------------------------------------------------


@pytest.mark.parametrize("sequence", ["is", "tis", "mis"])
def test_a_weight_too_small_for_float32_is_not_a_rejection(sequence: str) -> None:
    found = weigh([[-60.0, -60.0], [0.1]], Correction.model_validate({"sequence": sequence}), dtype=torch.float32)
    assert found.used_N[0] == 0 and not found.rejected_N.any()


def test_a_token_weight_too_small_for_float32_is_not_masked() -> None:
    assert not weigh([[-120.0, 0.1]], Correction(token="tis"), dtype=torch.float32).masked_T.any()
    assert weigh([[-120.0, 0.1]], Correction(token="mask"), dtype=torch.float32).masked_T.tolist() == [True, False]


def test_a_weight_too_large_for_float32_is_one_sentence() -> None:
    deltas = [[0.5], [60.0, 40.0]]
    with pytest.raises(StudyError) as caught:
        weigh(deltas, Correction(sequence="is"), dtype=torch.float32)
    assert str(caught.value) == (
        "correction.sequence: is: a response's weight exp(Δ_y) at Δ_y = 100 nats is beyond float32; "
        "tis bounds such weights, mis and a veto drop them"
    )
    assert weigh(deltas, Correction(sequence="is")).used_N.isfinite().all()
    for sequence in ("tis", "mis", "geometric", "reject_k1", "reject_k3", "none"):
        assert weigh(deltas, Correction(sequence=sequence), dtype=torch.float32).used_N.isfinite().all()  # type: ignore[arg-type]
    # A sequence that is dropped for another reason has no weight that could overflow.
    vetoed = weigh([[0.5], [120.0, -20.0]], Correction(sequence="is", veto=1e-4), dtype=torch.float32)
    outside = weigh(deltas, Correction(sequence="is"), [[False], [False, True]], dtype=torch.float32)
    assert vetoed.used_N[1] == outside.used_N[1] == 0


@pytest.mark.parametrize("fate", ["kept", "vetoed", "outside"])
@pytest.mark.parametrize("correction", EVERY, ids=name)
def test_a_weight_at_any_ratio_is_the_definition_or_refused(correction: Correction, fate: str) -> None:
    """In float32, of a response with one token up to e^±1000 off; 0 where the response is dropped, and never NaN."""
    refused = 0
    for delta in (0.0, -0.0, 1.0, -1.0, 90.0, -90.0, 120.0, -120.0, 1000.0, -1000.0):
        row = [delta, 0.0, 0.1, -20.0 if fate == "vetoed" else 0.0]
        own = correction.model_copy(update={"veto": 1e-4}) if fate == "vetoed" else correction
        outside = [[False, False, False, fate == "outside"], [False]]
        whole = sequence_weight(row, own) if fate == "kept" or not (own.weighted or own.vetoes) else 0.0
        # A product in 80 bits may hold 0 times a number beyond float32, which is 0 too.
        wanted = [token_weight(x, own) * whole for x in row]
        if max(wanted) > np.finfo(np.float32).max:
            refused += 1
            with pytest.raises(NumericalError, match="beyond float32"):
                weigh([row, [0.0]], own, outside, torch.float32)
            continue
        found = weigh([row, [0.0]], own, outside, torch.float32)
        np.testing.assert_allclose(found.weight_T[:4], np.array(wanted, float), rtol=2e-5, atol=1e-37)
        assert found.used_N[0].item() == pytest.approx(float(np.mean(wanted)), rel=2e-5, abs=1e-37)
        assert found.used_N[1] == 1
    unbounded = "is" in (correction.token, correction.sequence) and correction.sequence in ("none", "is", "tis")
    assert (refused > 0) == (fate == "kept" and unbounded)


def test_a_delta_of_nan_is_not_blamed_on_the_weight() -> None:
    assert weigh([[math.nan]], Correction(sequence="is"), dtype=torch.float32).used_N.isnan().all()


# --- veto, outside, nothing at all -------------------------------------------------------------------


@pytest.mark.parametrize("sequence", ["none", "mis"])
def test_the_veto_looks_at_single_tokens(sequence: str) -> None:
    veto = Correction.model_validate({"sequence": sequence, "sequence_threshold": None, "veto": 1e-4})
    limit = torch.tensor(1e-4).log()
    below = torch.nextafter(limit, torch.tensor(-math.inf)).item()
    # The product of the third is as small, but no token's ratio is.
    found = weigh([[limit.item(), 9.0], [below, 9.0], [-5.0, -5.0, -5.0]], veto, dtype=torch.float32)
    assert found.vetoed_N.tolist() == [False, True, False]
    assert found.used_N[1] == 0 and found.weight_T[2:4].tolist() == [0.0, 0.0]
    assert found.used_N[2].item() == pytest.approx(1.0 if sequence == "none" else math.exp(-15.0))


@pytest.mark.parametrize("correction", EVERY, ids=name)
def test_a_token_outside_the_set_has_ratio_zero(correction: Correction) -> None:
    """Under any weight its whole sequence is gone, whatever else is in it; without one, nothing happens."""
    for veto in (None, 1e-4):
        found = weigh([[1e-4, 500.0], [1e-4]], correction.model_copy(update={"veto": veto}), [[False, True], [False]])
        assert found.raw_N[0] == 0
        weight = 0.0 if correction.weighted or veto else 1.0
        assert found.weight_T[:2].tolist() == [weight, weight] and found.used_N[0] == weight
        assert found.vetoed_N.tolist() == [veto is not None, False]
        assert not found.rejected_N[0]
        assert found.used_N[1] > 0


@pytest.mark.parametrize("veto", [None, 1e-4])
@pytest.mark.parametrize("correction", EVERY, ids=name)
def test_an_empty_sequence_weighs_one(correction: Correction, veto: float | None) -> None:
    found = weigh([[], [0.5], []], correction.model_copy(update={"veto": veto}))
    assert found.used_N.tolist()[::2] == found.raw_N.tolist()[::2] == [1.0, 1.0]
    assert len(found.weight_T) == 1


@pytest.mark.parametrize("rule", ["reject_k1", "reject_k3"])
def test_rejection_by_r_ppo_judges_how_far_the_policy_moved(rule: str) -> None:
    """It is the same rule on another ratio: the mismatch rejects nothing, and is what the raw weights are of."""
    corr = Correction.model_validate({"sequence": rule, "sequence_threshold": 0.01})
    ppo = corr.model_copy(update={"rejects": "r_ppo"})
    delta, moved = torch.tensor([0.5, 0.5, 0.0, 0.0]), torch.tensor([0.0, 0.0, 0.5, 0.5])
    inside, sequence = torch.zeros(4, dtype=torch.bool), torch.tensor([0, 0, 1, 1])
    found = correct(delta, inside, sequence, 2, ppo, moved)
    same = correct(moved, inside, sequence, 2, corr, delta)
    assert found.rejected_N.tolist() == same.rejected_N.tolist() == [False, True]
    assert correct(delta, inside, sequence, 2, corr, moved).rejected_N.tolist() == [True, False]
    assert found.raw_N.tolist() == pytest.approx([math.e, 1.0])
    assert found.weight_T.tolist() == [1.0, 1.0, 0.0, 0.0]
    first = correct(delta, inside, sequence, 2, ppo, torch.zeros(4))
    assert not first.rejected_N.any(), "before the first update it has not moved"
    outside = torch.tensor([False, False, True, True])
    assert not correct(delta, outside, sequence, 2, ppo, moved).rejected_N.any(), "a token outside says nothing of it"


@pytest.mark.parametrize("correction", WEIGHTED, ids=name)
def test_weights_carry_no_gradient(correction: Correction) -> None:
    delta = torch.tensor([0.1, 0.2], requires_grad=True)
    found = correct(delta, torch.zeros(2, dtype=torch.bool), torch.tensor([0, 1]), 2, correction, delta)
    assert not any(getattr(found, field).requires_grad for field in Weights.__slots__)


# --- vetoes on both sides, and a mean weight of 1 -------------------------------------------------------


def test_a_veto_above_discards_what_one_below_keeps() -> None:
    """As SkyRL's `compute_outlier_token_mask` (a9564572e): any token's ratio outside the bounds, ends included."""
    limit = torch.tensor(100.0).log()
    beyond = torch.nextafter(limit, torch.tensor(9.0)).item()
    deltas = [[limit.item(), -12.0], [beyond, 0.0], [0.1, -0.1]]
    above = weigh(deltas, Correction(veto_above=100.0), dtype=torch.float32)
    assert above.vetoed_N.tolist() == [False, True, False] and above.used_N.tolist() == [1.0, 0.0, 1.0]
    both = weigh(deltas, Correction(veto=1e-4, veto_above=100.0), dtype=torch.float32)
    assert both.vetoed_N.tolist() == [True, True, False]


@pytest.mark.parametrize(
    "correction",
    [
        Correction(token="tis", normalise=True),
        Correction(token="mask", token_lower=0.8, normalise=True, veto=0.5),
        Correction(sequence="tis", normalise=True),
        Correction(sequence="mis", normalise=True),
    ],
    ids=name,
)
def test_the_normaliser_is_the_mean_weight_of_tokens_or_of_responses(correction: Correction) -> None:
    """Over parts of a batch as over all of it; a veto does not change it."""
    deltas = random_deltas(0.5)
    parts = [weigh(deltas[:5], correction), weigh(deltas[5:], correction)]
    found = normaliser(correction, torch.cat([part.ratio_X for part in parts]))
    if correction.token != "none":
        values = [token_weight(delta, correction) for row in deltas for delta in row]
    else:
        values = [sequence_weight(row, correction) for row in deltas]
    assert found == pytest.approx(np.mean(values), rel=1e-12)
    assert normaliser(correction.model_copy(update={"normalise": False}), parts[0].ratio_X) == 1.0
    assert normaliser(correction, torch.zeros(3)) == 1.0


def test_a_token_outside_the_set_has_weight_zero_in_the_mean() -> None:
    for correction in (Correction(token="is", normalise=True), Correction(sequence="is", normalise=True)):
        found = weigh([[0.5], [0.0]], correction, [[True], [False]])
        assert normaliser(correction, found.ratio_X) == 0.5
