"""Every setting of an objective acts, or is refused: for each kind, each other field is changed and its effect seen.

The effect is on the loss, its gradient, the weights and what is logged of them. A field of a
correction that `READS` leaves out for a kind is tried past the refusal: nothing may change, or the refusal would be
wrong.
"""

import itertools
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tailrl.config.arm import REMEDIES, Clip, Correction
from tailrl.config.base import IMPORTED, Settings
from tailrl.config.rejection import Rejection
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.adaptive_rho import Thresholds
from tailrl.objective.centering import expected_score
from tailrl.objective.corrections import SEQUENCE_WEIGHTS, TOKEN_WEIGHTS, normaliser
from tailrl.objective.loss import surrogate
from tailrl.objective.ratio_losses import RATIO_LOSSES
from tailrl.objective.rejections import REDUCTIONS, STATISTICS
from tailrl.objective.safe_set import RULES, safe_set, token_logprobs

T, V, N = 240, 8, 80


def outcome(correction: Correction, clip: Clip | None) -> list[Tensor]:
    """Loss, gradient, weights and flags of random responses, whose ratios reach far, in the second update on them."""
    generator = torch.Generator().manual_seed(5)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(T, generator=generator, dtype=torch.float64)

    logits = torch.randn(T, V, generator=generator, dtype=torch.float64).requires_grad_()
    sampler_TV = logits.detach() + 0.8 * torch.randn(T, V, generator=generator, dtype=torch.float64)
    tokens, sequence = torch.randint(V, (T,), generator=generator), torch.arange(T) // (T // N)
    scored = token_logprobs(logits, tokens, "full")
    infer = sampler_TV.log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    old = (infer + noise(0.6)).clamp(max=0)
    # Some tokens and responses are far off, to either side.
    old[::9], old[4::9] = -3.0, (old[4::9] + 2).clamp(max=0)
    advantage = noise(1.0)[:N][sequence]
    expected = None
    if correction.centering != "none":
        expected = expected_score(logits.log_softmax(-1), sampler_TV.log_softmax(-1), correction)
    given = (scored, infer, advantage, sequence, N, N, correction, clip, old, expected)
    found = surrogate(*given, age_T=torch.full((T,), 3))
    loss = found.loss / normaliser(correction, found.weights.ratio_X)
    flags = (found.weights.rejected_N, found.weights.masked_T, found.weights.vetoed_N, found.clipped_T)
    return [loss.detach(), torch.autograd.grad(loss, logits)[0], found.weights.weight_T, *flags]


def acts(one: Settings, other: Settings) -> bool:
    """Whether two corrections or two clips differ in their outcome."""
    both = []
    for settings in (one, other):
        correction = settings if isinstance(settings, Correction) else Correction()
        both.append(outcome(correction, settings if isinstance(settings, Clip) else None))
    return not all(torch.equal(a, b) for a, b in zip(*both, strict=True))


OTHERS: dict[str, tuple[Any, ...]] = {
    "token_threshold": (1.3,),
    "token_lower": (0.8,),
    "sequence_threshold": (1.2, 0.3),
    "sequence_lower": (0.6,),
    "rejects": ("r_ppo",),
    "reject": (({"of": "k3", "by": "token", "above": 0.05},),),
    "veto": (0.6,),
    "veto_above": (1.6,),
    "normalise": (True,),
    "log_ratio_limit": (0.3,),
    "log_ratio_penalty": (0.1,),
    "proximal": ("loglinear",),
    "centering_k": (2,),
    "low": (0.05, 0.5),
    "high": (0.01, 0.6),
    "dual": (1.05,),
}
"""Other values of each field that names no kind, of which one acts where any does."""
KINDS = {"token", "sequence", "loss", "centering"}

WIDE: dict[str, dict[str, Any]] = {
    "geometric": {"sequence_threshold": 2.0},
    "reject_k1": {"sequence_threshold": 0.5},
    "reject_k3": {"sequence_threshold": 0.5},
}
"""Thresholds that keep some of the responses, where the defaults keep none."""

CORRECTIONS: list[dict[str, Any]] = [
    {"token": token, "sequence": sequence, **WIDE.get(sequence, {})}
    for token, sequence in itertools.product(("none", *TOKEN_WEIGHTS), ("none", *SEQUENCE_WEIGHTS, *REMEDIES))
]
CORRECTIONS += [{"centering": "top_k", "centering_k": 3, "token": token} for token in ("none", *TOKEN_WEIGHTS)]
CORRECTIONS += [{"reject": [{"of": of, "by": "mean", "above": 0.5}]} for of in STATISTICS]
CLIPS: list[dict[str, Any]] = [
    {"loss": loss, "ratio": ratio}
    for loss, ratio in itertools.product(RATIO_LOSSES, ("recompute", "bypass", "decoupled"))
    if (loss, ratio) != ("vespo", "decoupled")
]
"""Each kind of weight and of loss."""


@pytest.mark.parametrize("base", [*CORRECTIONS, *CLIPS], ids=str)
def test_every_other_setting_acts_or_is_refused(base: dict[str, Any]) -> None:
    block = Clip if "ratio" in base else Correction
    plain = block.model_validate(base)
    fields = set(block.model_fields).union(*(kind.model_fields for kind in Clip.kinds().values() if block is Clip))
    for field in fields - KINDS - {"preset", "ratio"}:
        effects, refusals = [], []
        for value in OTHERS[field]:
            try:
                effects.append(acts(plain, block.model_validate({**base, field: value})))
            except ValidationError as error:
                refusals.append(str(error))
        assert any(effects) or refusals, f"{field} has no effect beside {base}, and is accepted"
        # These two are refused where a weight has no such form.
        if (
            block is Correction
            and f"does not use {field}" in str(refusals)
            and field not in ("rejects", "sequence_lower")
        ):
            forced = plain.model_copy(update={field: OTHERS[field][0]})
            assert not acts(plain, forced), f"{field} is refused beside {base}, and has an effect"


def test_every_field_is_tried() -> None:
    """A new setting must be added above."""
    fields = set(Correction.model_fields).union(*(kind.model_fields for kind in Clip.kinds().values()))
    assert fields - KINDS - {"preset", "ratio"} == OTHERS.keys()
    for field, kinds in Correction.READS.items():
        schema = Correction.model_json_schema()["properties"][field]
        choices = schema.get("enum") or [*schema["anyOf"][0]["enum"], IMPORTED]
        assert list(kinds) == choices, "each kind says what it reads"


@pytest.mark.parametrize("of", STATISTICS)
@pytest.mark.parametrize("by", ["token", "segment", *REDUCTIONS])
def test_every_part_of_a_rejection_acts_or_is_refused(of: str, by: str) -> None:
    base = {"of": of, "by": by, "above": 0.3}
    plain = Correction(reject=(Rejection.model_validate(base),))
    for change in ({"above": 0.02}, {"below": -0.02}, {"ratio": "r_ppo"}, {"ratio": "r_rollout"}, {"when": "negative"}):
        try:
            changed = Correction.model_validate({"reject": [{**base, **change}]})
        except ValidationError:
            assert "below" in change
            continue
        assert acts(plain, changed), change


# --- the safe set --------------------------------------------------------------------------------------------

RULE_NUMBERS: dict[str, dict[str, Any]] = {
    "full": {},
    "min_p": {"rho": "e-1"},
    "entropy": {"rho": "e-1"},
    "top_k": {"k": 4},
    "top_p": {"p": 0.7},
}
ADAPTS: dict[str, dict[str, Any]] = {
    "none": {},
    "budget": {"adapt": "budget", "budget": 0.1},
    "difficulty": {"adapt": "difficulty", "rho_easy": "e-0.5"},
}
OTHER_NUMBERS: dict[str, Any] = {"rho": "e-2", "k": 2, "p": 0.4, "budget": 0.3, "rho_easy": "e-0.1"}


def sets(vocabulary: Vocabulary) -> list[Tensor]:
    """What each side keeps, and the trainer's log-probs of what is sampled, before and after a threshold adapts."""
    logits = 1.5 * torch.randn(40, V, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    infer = logits + 0.5 * torch.randn(40, V, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    thresholds, found = Thresholds(vocabulary, V), []
    for _ in range(2):
        threshold = thresholds.of(0)
        drawn = safe_set(infer, vocabulary.sampler_rule, threshold)
        own = safe_set(logits, vocabulary.trainer_rule, threshold)
        tokens = torch.where(drawn, infer, torch.inf).argmin(-1)  # the least that is drawn: outside, where any is
        safe = drawn if vocabulary.side == "replay" else own
        scored = token_logprobs(logits, tokens, "full", None, vocabulary.outside == "paper_fill", safe)
        found += [drawn, safe, scored.logp_T]
        thresholds.observe([0], [0.7], 0.2)
    return found


@pytest.mark.parametrize("adapt", ADAPTS)
@pytest.mark.parametrize("side", ["both", "sampler", "trainer", "replay"])
@pytest.mark.parametrize("rule", RULES)
def test_every_setting_of_a_safe_set_acts_or_is_refused(rule: str, side: str, adapt: str) -> None:
    base = {"rule": rule, "side": side, **RULE_NUMBERS[rule], **ADAPTS[adapt]}
    try:
        plain = Vocabulary.model_validate(base)
    except ValidationError:
        assert rule == "full" or adapt != "none"
        return
    changes = [{"outside": "paper_fill"}, *({name: value} for name, value in OTHER_NUMBERS.items())]
    for change in changes:
        try:
            changed = Vocabulary.model_validate({**base, **change})
        except ValidationError:
            continue
        assert any(not torch.equal(a, b) for a, b in zip(sets(plain), sets(changed), strict=True)), change
