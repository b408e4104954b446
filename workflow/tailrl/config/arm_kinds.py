"""The kind of an arm, such as naive or DVP: from its settings, never from its name."""

from collections.abc import Callable, Iterable

from tailrl.config.arm import ArmBlocks, Ppo
from tailrl.config.jobs import Run
from tailrl.config.vocabulary import ByRho, Entropy, MinP

Role = Callable[[Run], bool]
"""Whether an arm, by the settings of its runs, is of a kind."""

CAUSES = ("staleness", "weights", "bias", "noise", "floor")
"""The causes of a disturbance."""

_REJECTS = ("reject_k1", "reject_k3")
"""Rejection of sequences by their mean K1 or K3 of the mismatch."""


def is_naive(arm: ArmBlocks) -> bool:
    """All tokens, no weight, no veto, no ratio against the sampler's probabilities."""
    return not arm.vocabulary.prunes and not arm.correction.vetoes and _unweighted(arm)


def is_mis(arm: ArmBlocks) -> bool:
    """MIS on all tokens as the only weight; a veto is allowed."""
    return _corrected(arm, "none", ("mis",))


def is_pruned(arm: ArmBlocks) -> bool:
    """Any safe set on both sides."""
    return arm.vocabulary.prunes and arm.vocabulary.side == "both"


def rejects_by(name: str, ratio: str = "r_corr") -> Role:
    """Rejection by this mean of a ratio, reject_k1 or reject_k3, on all tokens, and nothing else."""
    return lambda arm: _corrected(arm, "none", (name,), ratio) and not arm.correction.vetoes


def clips_by(ratio: str) -> Role:
    """PPO's clip of this convention on all tokens, without weight or veto."""

    def clips(arm: ArmBlocks) -> bool:
        clip = arm.clip
        if not isinstance(clip, Ppo) or clip.ratio != ratio or clip.limit is not None or clip.dual is not None:
            return False
        weights = arm.correction.token, arm.correction.sequence
        return weights == ("none", "none") and not arm.vocabulary.prunes and is_plain(arm) and not arm.correction.vetoes

    return clips


def is_scored_first(run: Run) -> bool:
    """Whether a step's recorded mismatch (r_corr) is surely measured before the first update on its responses.

    All runs measure it so since 2026-11-27. A run's settings do not say when it ran, so these arms do not count.
    """
    return run.training.minibatches == 1 or (run.clip is not None and run.clip.ratio in ("recompute", "decoupled"))


def is_disturbed(arm: ArmBlocks) -> bool:
    """Whether any cause of the disturbance is on, on either side."""
    return any(getattr(arm.disturbance, cause) for cause in CAUSES)


def is_matched(arm: ArmBlocks) -> bool:
    """Whether the trainer has the same disturbance, or the number formats of a quantised engine (matched control)."""
    return arm.disturbance.side == "both" or (arm.sampler.quantizes_trainer and not is_disturbed(arm))


def has_exact_engine(arm: ArmBlocks) -> bool:
    """The exact engine without disturbance, in the trainer's own numbers: zero mismatch."""
    return arm.sampler.TRAINERS_BITS and not is_disturbed(arm) and not arm.sampler.quantized


def has_no_mismatch(arm: ArmBlocks) -> bool:
    """Zero mismatch of the policy that all arms train: the exact engine, or one whose tokens the trainer verifies.

    For claims. `ties` also compares a verified arm with the exact engine, which it should match to the bit. A quantised
    engine's twin is no control for other engines: it is a matched control.
    """
    return has_exact_engine(arm) or (arm.sampler.verify and not is_matched(arm))


def is_mismatched(arm: ArmBlocks) -> bool:
    """The engine's own mismatch or a disturbed sampler; a matched control or a verified arm is neither."""
    return not has_no_mismatch(arm) and not is_matched(arm)


KINDS: dict[str, Role] = {
    "naive": is_naive,
    "remedy": lambda arm: not is_naive(arm),
    # The min-p set at a fixed ρ on both sides, without a weight, and with MIS as the only one; a veto is allowed.
    "dvp": lambda arm: _min_p_on_both_sides(arm) and _unweighted(arm),
    "dvp_mis": lambda arm: (
        _min_p_on_both_sides(arm)
        and (arm.correction.token, arm.correction.sequence) == ("none", "mis")
        and is_plain(arm)
        and _no_sampler_ratio(arm)
    ),
    "mis": is_mis,
    # On all tokens, without other weights; a veto is allowed.
    "truncated": lambda arm: _corrected(arm, "tis", ("none",)),
    "rejecting": lambda arm: _corrected(arm, "none", _REJECTS),
    "truncated_and_rejecting": lambda arm: _corrected(arm, "tis", _REJECTS),
    "rejects_k1": rejects_by("reject_k1"),
    "rejects_k3": rejects_by("reject_k3"),
    "rejects_k3_of_r_ppo": rejects_by("reject_k3", "r_ppo"),
    # A threshold that follows the entropy, a budget or the prompt's difficulty, on both sides, and no weight.
    "adaptive": lambda arm: (
        (isinstance(arm.vocabulary, Entropy) or arm.vocabulary.adapts)
        and arm.vocabulary.side == "both"
        and _unweighted(arm)
    ),
    # Of arXiv 2512.23087.
    "papers_rho": lambda arm: isinstance(arm.vocabulary, ByRho) and arm.vocabulary.rho == "e-13",
    "pruned": is_pruned,
    "veto": lambda arm: arm.correction.vetoes,
    "recompute": clips_by("recompute"),
    "bypass": clips_by("bypass"),
    "scored_first": is_scored_first,
    "matched": is_matched,
    "exact_engine": has_exact_engine,
    "no_mismatch": has_no_mismatch,
    # An engine other than the exact one, without disturbance or verification.
    "own_mismatch": lambda arm: is_mismatched(arm) and not is_disturbed(arm),
    "mismatched": is_mismatched,
}
"""The kinds by their names in the catalogue of claims."""


def kind(names: Iterable[str]) -> Role:
    """All of the named kinds at once."""
    roles = [KINDS[name] for name in names]
    return lambda run: all(role(run) for role in roles)


def is_plain(arm: ArmBlocks) -> bool:
    """Whether the arm has none of what came after the first studies: rejections, bounds, centering, a reference."""
    correction = arm.correction
    bounded = correction.token_lower is not None or correction.sequence_lower is not None
    limited = correction.log_ratio_limit is not None
    later = bounded or limited or correction.reject or correction.normalise or correction.centering != "none"
    as_engine = arm.sampler.few_bit_trainer and not arm.sampler.quantizes_trainer  # a remedy, and no twin
    later = later or correction.log_ratio_penalty is not None or as_engine
    return not later and arm.reference_kl is None


def _min_p_on_both_sides(arm: ArmBlocks) -> bool:
    return isinstance(arm.vocabulary, MinP) and arm.vocabulary.side == "both" and not arm.vocabulary.adapts


def _corrected(arm: ArmBlocks, token: str, sequence: tuple[str, ...], ratio: str = "r_corr") -> bool:
    correction = arm.correction
    weighted = (correction.token, correction.rejects) == (token, ratio) and correction.sequence in sequence
    return weighted and not arm.vocabulary.prunes and is_plain(arm) and _no_sampler_ratio(arm)


def _unweighted(arm: ArmBlocks) -> bool:
    weights = arm.correction.token, arm.correction.sequence
    return weights == ("none", "none") and is_plain(arm) and _no_sampler_ratio(arm)


def _no_sampler_ratio(arm: ArmBlocks) -> bool:
    """Whether no clipped ratio corrects for the sampler, as bypass and decoupled do."""
    return arm.clip is None or arm.clip.ratio == "recompute"
