"""Ratios that no float holds: every loss and weight at log-ratios up to ±1000, against 80-bit arithmetic.

There e^1000 is a finite number. Where a term that counts is beyond float32, the loss must be refused, never NaN.
"""

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from tailrl.config.arm import Arm, Clip, Correction
from tailrl.config.reference_kl import ReferenceKL
from tailrl.config.rejection import Rejection
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.batch import batch_loss
from tailrl.objective.corrections import normaliser
from tailrl.objective.loss import Surrogate, check_loss, ratio_loss, surrogate
from tailrl.objective.ratio_losses import RATIO_LOSSES, VESPO_BOUNDS
from tailrl.objective.reference_kl import kl_loss
from tailrl.objective.rejections import rejections
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.objective.sequences import times
from tailrl.runtime.errors import NumericalError

EXTREMES = [0.0, -0.0, 1.0, -1.0, 90.0, -90.0, 120.0, -120.0, 1000.0, -1000.0]
LARGEST = np.finfo(np.float32).max
LOW, HIGH = 0.2, 0.3
SECOND = 0.125  # log-ratio of a response's other token
Long = np.longdouble


def term_and_slope(name: str, ratios: list[float], place: int, advantage: float, logp: float) -> tuple[Long, Long]:
    """A token's term and its derivative by the token's log-prob, from the papers' formulas."""
    a, r = Long(advantage), np.exp(Long(ratios[place]))
    if name == "gspo":
        r = np.exp(np.mean(np.array(ratios, Long)))
    bounded = min(max(r, Long(1 - LOW)), Long(1 + HIGH))
    if name in ("ppo", "gspo"):
        return (bounded * a, Long(0)) if bounded * a < r * a else (r * a, r * a)
    if name == "free":
        return r * a, r * a
    if name == "cispo":
        return bounded * a * logp, bounded * a
    if name == "sapo":
        tau = Long(1.0 if advantage > 0 else 1.05)
        below = np.exp(-tau * (r - 1))  # the gate is 1 / (1 + below)
        return 4 / tau / (1 + below) * a, 4 * below / (1 + below) ** 2 * r * a
    k, decay = (Long(2), Long(3)) if advantage >= 0 else (Long(3), Long(2))
    w = np.exp(min(max(np.sum(np.array(ratios, Long)), Long(VESPO_BOUNDS[0])), Long(VESPO_BOUNDS[1])))
    weight = w**k * np.exp(decay * (1 - w))
    return weight * a * logp, weight * a


@pytest.mark.parametrize("weight", [0.7, 0.0], ids=["kept", "rejected"])
@pytest.mark.parametrize("advantage", [1.5, 0.0, -1.5])
@pytest.mark.parametrize("name", RATIO_LOSSES)
def test_a_loss_and_its_gradient_at_any_ratio(name: str, advantage: float, weight: float) -> None:
    """Exactly 0 where the response is rejected, the advantage is 0 or the clip acts; refused where it is infinite."""
    infinite = 0
    for ratio in EXTREMES:
        ratios = [ratio, SECOND]
        values = [min(0.0, x) - 1 for x in ratios]
        logp = torch.tensor(values, requires_grad=True)
        old = torch.tensor([value - x for value, x in zip(values, ratios, strict=True)])
        of_tokens = (torch.full((2,), advantage), torch.full((2,), weight), torch.zeros(2, dtype=torch.int64))
        loss, _ = ratio_loss(name, logp, old, *of_tokens, 1, (LOW, HIGH), 3)
        pairs = [term_and_slope(name, ratios, place, advantage, values[place]) for place in range(2)]
        wanted = -sum(Long(weight) * term for term, _ in pairs) / 3
        if abs(wanted) > LARGEST:
            infinite += 1
            assert loss.isinf() and np.sign(loss.item()) == np.sign(wanted)
            with pytest.raises(NumericalError, match=r"the loss is -?inf"):
                check_loss(loss)
            continue
        (gradient,) = torch.autograd.grad(loss, logp)
        slopes = [float(-Long(weight) * slope / 3) for _, slope in pairs]
        assert loss.item() == pytest.approx(float(wanted), rel=1e-4, abs=1e-37)
        assert gradient.tolist() == pytest.approx(slopes, rel=1e-4, abs=1e-37), ratio
        assert [g == 0 for g in gradient.tolist()] == [abs(s) < 1e-45 for s in slopes]
    unbounded = {"ppo": advantage < 0, "gspo": advantage < 0, "free": advantage != 0}
    # At 90 a mean over two tokens is within float32.
    assert (infinite > 0) == (unbounded.get(name, False) and weight > 0)


@pytest.mark.parametrize("advantage", [1.5, -1.5])
@pytest.mark.parametrize(("name", "limit"), [("ppo", 20.0), ("free", 20.0), ("gspo", 10.0), ("sapo", 20.0)])
def test_a_limit_stops_the_gradient_beyond_it(name: str, limit: float, advantage: float) -> None:
    """As `torch.clamp` on the log-ratio does in verl and SkyRL; gspo has one from above alone."""
    for ratio in (limit - 1, limit + 1, 1000.0, -1000.0, 1 - limit, -1 - limit):
        logp = torch.tensor([min(0.0, ratio) - 1], dtype=torch.float64, requires_grad=True)
        tokens = (logp.detach() - ratio, torch.full_like(logp, advantage), torch.ones(1), torch.zeros(1).long())
        loss, _ = ratio_loss(name, logp, *tokens, 1, (LOW, HIGH), 1, limit)
        (gradient,) = torch.autograd.grad(loss, logp)
        bounded = min(max(ratio, -limit), limit) if name != "gspo" else min(ratio, limit)
        term, slope = term_and_slope(name, [bounded], 0, advantage, -1.0)
        assert loss.item() == pytest.approx(-float(term), rel=1e-9)
        assert gradient.item() == pytest.approx(-float(slope) if bounded == ratio else 0.0, rel=1e-9, abs=1e-300)


def test_a_zero_wins_over_an_infinity_and_nothing_else() -> None:
    left = torch.tensor([0.0, torch.inf, 0.0, 2.0, torch.inf, torch.nan, torch.nan, 0.0])
    right = torch.tensor([torch.inf, 0.0, 3.0, torch.inf, torch.inf, 0.0, 2.0, 0.0])
    assert str(times(left, right).tolist()) == "[0.0, 0.0, 0.0, inf, inf, nan, nan, 0.0]"


# --- whole losses: what is dropped has no part, whatever its ratio ---------------------------------------

FAR = [120.0, 0.0, 0.1]
NEAR = [0.0, 0.0, 0.0005]


def loss_of(rows: list[list[float]], correction: Correction, clip: Clip | None, advantage: float = 1.0) -> Surrogate:
    """The loss of responses with these Δ, as one of two; its log-probs hold the gradient."""
    delta_T = torch.tensor([delta for row in rows for delta in row])
    logp_T = (delta_T.clamp(max=0) - 1).requires_grad_()
    nothing_T = torch.zeros_like(delta_T)
    logprobs = TokenLogprobs(logp_T, logp_T.detach(), nothing_T, nothing_T.long(), nothing_T, nothing_T.bool())
    sequence_T = torch.tensor([n for n, row in enumerate(rows) for _ in row])
    sampler_T, advantage_T = logp_T.detach() - delta_T, torch.full_like(delta_T, advantage)
    return surrogate(logprobs, sampler_T, advantage_T, sequence_T, len(rows), 2, correction, clip)


DROPPING: list[dict[str, Any]] = [
    {"token": "is", "veto_above": 1000.0},
    {"preset": "nemo-rl/seq-mask-tis"},
    {"preset": "openrlhf/seq-mask-tis"},
    {"token": "is", "sequence": "reject_k1"},
    {"token": "is", "sequence": "mis", "veto_above": 1000.0},
    {"sequence": "is", "veto_above": 1000.0},
    {"sequence": "is", "reject": [{"of": "k3", "by": "max", "above": 1.0}]},
    {"token": "is", "reject": [{"of": "k1", "by": "sum", "below": -1.0}]},
    {"veto_above": 1000.0},
]


@pytest.mark.parametrize("clip", [None, *(Clip(ratio="bypass", loss=name) for name in RATIO_LOSSES)])  # type: ignore[arg-type]
@pytest.mark.parametrize("settings", DROPPING, ids=str)
def test_a_dropped_response_has_no_part_in_the_loss(settings: dict[str, Any], clip: Clip | None) -> None:
    correction = Correction.model_validate(settings)
    for advantage in (1.0, -1.0):
        both, alone = (loss_of(rows, correction, clip, advantage) for rows in ([FAR, NEAR], [NEAR]))
        assert both.loss.item() == pytest.approx(alone.loss.item(), rel=1e-6) != 0
        assert both.weights.weight_T[:3].tolist() == [0.0] * 3 and both.weights.used_N[0] == 0


@pytest.mark.parametrize("ratio", ["recompute", "decoupled"])
def test_a_decoupled_ratio_of_a_dropped_token_has_no_part_either(ratio: str) -> None:
    clip = Clip.model_validate({"ratio": ratio})
    for correction in (Correction(veto_above=1000.0), Correction(reject=(Rejection(of="k3", by="token", above=1.0),))):
        assert loss_of([FAR, NEAR], correction, clip).loss.isfinite()
    # An advantage of 0 multiplies an infinite weight to 0 as well.
    assert loss_of([FAR], Correction(), clip, advantage=0.0).loss == 0


@pytest.mark.parametrize(
    ("settings", "clip", "words"),
    [
        ({"token": "is"}, None, "correction.token: is: a token's weight is beyond float32; tis bounds it"),
        ({"sequence": "is"}, None, "a response's weight exp"),
        ({}, Clip(ratio="decoupled"), "the loss is -inf: the log-probs are finite, but a ratio or an advantage is not"),
        ({}, Clip(ratio="bypass", loss="free"), "the loss is -inf: "),
    ],
)
def test_an_infinite_weight_of_a_kept_token_is_refused(settings: dict[str, Any], clip: Clip | None, words: str) -> None:
    with pytest.raises(NumericalError) as caught:
        loss_of([FAR, NEAR], Correction.model_validate(settings), clip)
    assert words in str(caught.value)
    assert isinstance(loss_of([NEAR, NEAR], Correction.model_validate(settings), clip).loss.item(), float)


def test_the_padded_loss_is_refused_alike() -> None:
    logits = torch.zeros(1, 1, 3, requires_grad=True)
    given: Any = (
        torch.zeros(1, 1, dtype=torch.int64),
        torch.ones(1, 1),
        torch.tensor([[-200.0]]),
        torch.tensor([-1.0]),
    )
    with pytest.raises(NumericalError, match="the loss is inf"):
        batch_loss(logits, *given, Vocabulary(), None, Clip(ratio="bypass"))
    loss, _ = batch_loss(logits, *given, Vocabulary(), Correction(veto_above=1000.0), Clip(ratio="bypass"))
    assert loss == 0 and torch.autograd.grad(loss, logits)[0].eq(0).all()


def test_a_mean_weight_that_is_infinite_divides_nothing() -> None:
    correction = Correction(token="is", normalise=True, veto_above=1000.0)
    with pytest.raises(NumericalError, match=r"correction\.normalise: the mean weight is inf"):
        normaliser(correction, loss_of([FAR, NEAR], correction, None).weights.ratio_X)


@pytest.mark.parametrize("settings", [{}, {"sequence": "geometric"}, {"sequence": "mis"}, {"veto": 0.5}])
def test_a_log_prob_before_the_update_that_is_none_is_refused(settings: dict[str, Any]) -> None:
    logp_T, none_T = torch.tensor([-1.0, -1.0]), torch.zeros(2)
    logprobs = TokenLogprobs(logp_T, logp_T, none_T, none_T.long(), none_T, none_T.bool())
    old_T, correction = torch.tensor([torch.nan, -1.0]), Correction.model_validate(settings)
    with pytest.raises(NumericalError, match="before the first update is NaN"):
        surrogate(logprobs, logp_T, none_T + 1, none_T.long(), 1, 1, correction, None, old_T)


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_a_log_prob_of_the_sampler_that_is_none_is_refused(value: float) -> None:
    logp_T, none_T = torch.tensor([-1.0, -1.0]), torch.zeros(2)
    logprobs = TokenLogprobs(logp_T, logp_T, none_T, none_T.long(), none_T, none_T.bool())
    for correction in (Correction(), Correction(veto_above=10.0), Correction(token="mask")):
        with pytest.raises(NumericalError, match="a log-prob of the sampler is not finite"):
            surrogate(logprobs, torch.tensor([value, -1.0]), none_T + 1, none_T.long(), 1, 1, correction, None)


# --- rejections and the reference ----------------------------------------------------------------------------


@pytest.mark.parametrize("of", ["tv", "kl"])
def test_a_probability_that_grows_from_almost_none_is_far(of: str) -> None:
    """p − q of q = e^−120 and p = 1 is 1, although q × (r − 1) is 0 × ∞ in float32."""
    rule = Rejection.model_validate({"of": of, "by": "token", "above": 0.2, "below": -0.2, "when": "outward"})
    for ratio, logq in ((120.0, -120.0), (1000.0, -1000.0), (90.0, -90.5), (-120.0, 0.0), (-1000.0, -0.1)):
        tokens = (torch.tensor([ratio, 0.0]), torch.zeros(2), torch.zeros(2, dtype=torch.int64), 1)
        advantage = torch.full((2,), 1.0 if ratio > 0 else -1.0)
        falls_T, _ = rejections(rule, *tokens, torch.tensor([logq, -1.0]), advantage)
        assert falls_T.tolist() == [True, False], ratio


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_kl_to_the_reference_is_right_or_refused(estimator: str) -> None:
    for ratio in EXTREMES:
        logp = torch.tensor([-1.0 - max(0.0, ratio)], requires_grad=True)
        settings = ReferenceKL.model_validate({"estimator": estimator, "coefficient": 1.0})
        loss = kl_loss(settings, logp, logp.detach() + ratio, torch.tensor([False]), 1)
        r, x = np.exp(Long(ratio)), Long(ratio)
        value, slope = {"k1": (-x, Long(1)), "k2": (x * x / 2, -x), "k3": (r - x - 1, 1 - r)}[estimator]
        if abs(value) > LARGEST:
            with pytest.raises(NumericalError):
                check_loss(loss)
            continue
        (gradient,) = torch.autograd.grad(loss, logp)
        assert [loss.item(), gradient.item()] == pytest.approx([float(value), float(slope)], rel=1e-5)
        outside = kl_loss(settings, logp, logp.detach() + ratio, torch.tensor([True]), 1)
        assert outside == 0 and torch.autograd.grad(outside, logp)[0] == 0


def test_the_limits_of_presets_act_on_what_their_framework_clamps() -> None:
    """verl: a token's Δ, a response's Δ_y and the log-ratios of k1 to k3; a weight of e^−20 is not e^−120."""
    for settings in ({"token": "tis"}, {"sequence": "tis"}):
        limited = Correction.model_validate({**settings, "log_ratio_limit": 20.0})
        weights = loss_of([[-120.0]], limited, None).weights
        assert weights.weight_T.item() == pytest.approx(np.exp(-20.0))
        assert loss_of([[-120.0]], Correction.model_validate(settings), None).weights.weight_T.item() == 0
    rule = {"of": "k1", "by": "sum", "above": 0.7, "below": -0.7}
    for limit, dropped in ((None, True), (20.0, False)):
        correction = Correction.model_validate({"reject": [rule], "log_ratio_limit": limit})
        assert loss_of([[30.0, -25.0]], correction, None).weights.rejected_N.item() == dropped
    for loss, ratio in itertools.product(("ppo", "free", "gspo", "sapo"), ("bypass", "decoupled")):
        clip = Clip.model_validate({"loss": loss, "ratio": ratio, "log_ratio_limit": 10.0})
        assert Arm(clip=clip).clip == clip
