"""The kind of an arm, such as naive or DVP: from the settings that its runs recorded, never from its name."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from tailrl.analysis.describe import DEFAULTS, describe_disturbance, describe_sampler, flatten
from tailrl.artifacts.results import Results

Keys = tuple[str, ...]
Role = Callable[[Mapping[str, Any]], bool]
"""Whether an arm with these settings (dotted keys) is of a kind."""

_SHARED = ("estimator", "clip", "sampler", "disturbance", "training", "policy", "task")
"""Two arms that agree in these blocks of settings differ only in vocabulary and correction."""

_REJECTS = ("reject_k1", "reject_k3")
"""Rejection of sequences by their mean K1 or K3 of the mismatch."""

_LATER = tuple(
    f"correction.{name}"
    for name in ("token_lower", "sequence_lower", "reject", "normalise", "centering", "log_ratio_limit")
)
"""Settings that make another remedy of a named weight."""

_SIDE = "disturbance.side"
"""What is set apart where an arm is paired with its matched control."""

_ENGINE = tuple(
    key
    for key in DEFAULTS
    if key.startswith("sampler.")
    and key.split(".")[1] not in ("quantization", "group_size", "kv_cache_dtype", "verify")
)
"""Settings of a sampler in which a quantised engine and its twin may differ."""

CAUSES = ("staleness", "weights", "bias", "noise", "floor")


def settings_of(results: Results, arm: str) -> dict[str, Any]:
    """The settings of an arm's runs by dotted key; a key that an older run did not record has its default."""
    return DEFAULTS | flatten(results.runs[arm][0].record.settings)


def is_naive(settings: Mapping[str, Any]) -> bool:
    """All tokens, no weight, no veto, no ratio against the sampler's probabilities."""
    return settings["vocabulary.rule"] == "full" and not has_veto(settings) and _unweighted(settings)


def is_dvp(settings: Mapping[str, Any]) -> bool:
    """The min-p set at a fixed ρ on both sides, and no weight; a veto is allowed."""
    return _pruned(settings) and _unweighted(settings)


def is_dvp_mis(settings: Mapping[str, Any]) -> bool:
    """The min-p set at a fixed ρ on both sides, and MIS as the only weight; a veto is allowed."""
    weights = settings["correction.token"], settings["correction.sequence"]
    return _pruned(settings) and weights == ("none", "mis") and is_plain(settings) and _no_sampler_ratio(settings)


def is_mis(settings: Mapping[str, Any]) -> bool:
    """MIS on all tokens as the only weight; a veto is allowed."""
    return _corrected(settings, "none", ("mis",))


def is_adaptive(settings: Mapping[str, Any]) -> bool:
    """A threshold that follows the entropy, a budget or the prompt's difficulty, on both sides, and no weight."""
    moves = settings["vocabulary.rule"] == "entropy" or settings["vocabulary.adapt"] != "none"
    return moves and settings["vocabulary.side"] == "both" and _unweighted(settings)


def is_pruned(settings: Mapping[str, Any]) -> bool:
    """Any safe set on both sides."""
    return bool(settings["vocabulary.rule"] != "full" and settings["vocabulary.side"] == "both")


def has_veto(settings: Mapping[str, Any]) -> bool:
    """A veto, with or without a weight."""
    return settings["correction.veto"] is not None or settings["correction.veto_above"] is not None


def rejects_by(name: str, ratio: str = "r_corr") -> Role:
    """Rejection by this mean of a ratio, reject_k1 or reject_k3, on all tokens, and nothing else."""
    return lambda settings: _corrected(settings, "none", (name,), ratio) and not has_veto(settings)


def clips_by(ratio: str) -> Role:
    """PPO's clip of this convention on all tokens, without weight or veto."""

    def clips(settings: Mapping[str, Any]) -> bool:
        loss = settings.get("clip.ratio"), settings.get("clip.loss", "ppo")
        if settings.get("clip.log_ratio_limit") is not None or settings.get("clip.dual") is not None:
            return False
        weights = settings["correction.token"], settings["correction.sequence"], settings["vocabulary.rule"]
        return (loss, weights) == ((ratio, "ppo"), ("none", "none", "full")) and is_plain(settings)

    return lambda settings: clips(settings) and not has_veto(settings)


def is_scored_first(settings: Mapping[str, Any]) -> bool:
    """Whether a step's recorded mismatch (r_corr) is surely measured before the first update on its responses.

    All runs measure it so since 2026-11-27. A run's settings do not say when it ran, so these arms do not count.
    """
    return settings.get("training.minibatches", 1) == 1 or settings.get("clip.ratio") in ("recompute", "decoupled")


def is_disturbed(settings: Mapping[str, Any]) -> bool:
    """Whether any cause of the disturbance is on, on either side."""
    return any(settings[f"disturbance.{cause}"] for cause in CAUSES)


def is_matched(settings: Mapping[str, Any]) -> bool:
    """Whether the trainer has the same disturbance, or the number formats of a quantised engine (matched control)."""
    return bool(settings["disturbance.side"] == "both") or _is_twin(settings)


def has_exact_engine(settings: Mapping[str, Any]) -> bool:
    """The exact engine without disturbance, in the trainer's own numbers: zero mismatch."""
    return bool(settings["sampler.engine"] == "exact") and not is_disturbed(settings) and not _few_bits(settings)


def _few_bits(settings: Mapping[str, Any]) -> bool:
    return settings["sampler.quantization"] is not None or settings["sampler.kv_cache_dtype"] != "auto"


def _is_twin(settings: Mapping[str, Any]) -> bool:
    """The trainer computes as a quantised engine does, and samples: no mismatch, but another policy is trained."""
    return bool(settings["sampler.engine"] == "exact") and _few_bits(settings) and not is_disturbed(settings)


def has_no_mismatch(settings: Mapping[str, Any]) -> bool:
    """Zero mismatch of the policy that all arms train: the exact engine, or one whose tokens the trainer verifies.

    For claims. `ties` also compares a verified arm with the exact engine, which it should match to the bit. A quantised
    engine's twin is no control for other engines: it is a matched control.
    """
    return has_exact_engine(settings) or bool(settings["sampler.verify"] and not is_matched(settings))


def has_own_mismatch(settings: Mapping[str, Any]) -> bool:
    """An engine other than the exact one, without disturbance or verification: the mismatch is the engine's own."""
    return not is_disturbed(settings) and not has_no_mismatch(settings) and not is_matched(settings)


def is_mismatched(settings: Mapping[str, Any]) -> bool:
    """The engine's own mismatch or a disturbed sampler; a matched control or a verified arm is neither."""
    return not has_no_mismatch(settings) and not is_matched(settings)


KINDS: dict[str, Role] = {
    "naive": is_naive,
    "remedy": lambda settings: not is_naive(settings),
    "dvp": is_dvp,
    "dvp_mis": is_dvp_mis,
    "mis": is_mis,
    # On all tokens, without other weights; a veto is allowed.
    "truncated": lambda settings: _corrected(settings, "tis", ("none",)),
    "rejecting": lambda settings: _corrected(settings, "none", _REJECTS),
    "truncated_and_rejecting": lambda settings: _corrected(settings, "tis", _REJECTS),
    "rejects_k1": rejects_by("reject_k1"),
    "rejects_k3": rejects_by("reject_k3"),
    "rejects_k3_of_r_ppo": rejects_by("reject_k3", "r_ppo"),
    "adaptive": is_adaptive,
    # The threshold of arXiv 2512.23087.
    "papers_rho": lambda settings: bool(settings["vocabulary.rho"] == "e-13"),
    "pruned": is_pruned,
    "veto": has_veto,
    "recompute": clips_by("recompute"),
    "bypass": clips_by("bypass"),
    "scored_first": is_scored_first,
    "matched": is_matched,
    "exact_engine": has_exact_engine,
    "no_mismatch": has_no_mismatch,
    "own_mismatch": has_own_mismatch,
    "mismatched": is_mismatched,
}
"""The kinds by their names in the catalogue of claims."""


def kind(names: Iterable[str]) -> Role:
    """All of the named kinds at once."""
    roles = [KINDS[name] for name in names]
    return lambda settings: all(role(settings) for role in roles)


def arms_as(results: Results, role: Role) -> list[str]:
    """The arms of a kind, in the order of the study, without arms whose record has an unknown setting."""
    return [arm for arm, own in _all_settings(results).items() if role(own)]


def pairs(results: Results, first: Role, second: Role, *, apart: Keys = ()) -> Iterator[tuple[str, str]]:
    """Pairs of arms of two kinds that differ only in vocabulary, correction and `apart` (keys or whole blocks)."""
    yield from _alike(_all_settings(results), first, second, _SHARED, apart)


def ties(results: Results) -> list[tuple[str, str, str]]:
    """The references of each arm, as (arm, reference, why), in the order of the study.

    References are the naive arm under the same mismatch, the arm's matched control (its twin, where the engine is
    quantised), and the arm with zero mismatch. They depend on settings alone, never on results.
    """
    whole = (*_SHARED, "vocabulary", "correction", "reference_kl")
    kinds: list[tuple[str, Role, Role, Keys, Keys]] = [
        ("naive", lambda own: not is_naive(own), is_naive, _SHARED, ()),
        ("matched control", lambda own: not is_matched(own), is_matched, whole, (_SIDE,)),
        ("no mismatch", lambda own: not has_exact_engine(own), has_exact_engine, whole, ("sampler", "disturbance")),
    ]
    settings = _all_settings(results)
    found = [
        (arm, reference, why)
        for why, own, other, blocks, apart in kinds
        for arm, reference in _alike(settings, own, other, blocks, apart)
    ]
    return sorted(found, key=lambda pair: results.arms.index(pair[0]))


def references(results: Results) -> list[tuple[str, str, str]]:
    """`ties`, and for an arm without any tie the study's first arm."""
    found = ties(results)
    tied, first = {arm for one, other, _ in found for arm in (one, other)}, results.arms[0]
    found += [(arm, first, "first arm") for arm in results.arms if arm not in tied | {first}]
    return sorted(found, key=lambda pair: results.arms.index(pair[0]))


def dose(settings: Mapping[str, Any]) -> str:
    """The engine and its mismatch in words."""
    left = dict(settings)
    return ", ".join([describe_sampler(left), *(describe_disturbance(left) or ["undisturbed"])])


def policy_name(settings: Mapping[str, Any]) -> str:
    """The policy in words."""
    if settings.get("policy.source") == "scratch":
        size = [settings.get(f"policy.{name}") for name in ("layers", "hidden_size", "vocabulary_size")]
        experts = settings.get("policy.experts")
        mixture = f" with {experts} experts" if experts else ""
        return "from scratch, {} layers of {}{mixture}, V = {}".format(*size, mixture=mixture)
    return str(settings.get("policy.path", "not recorded"))


def _known(settings: Mapping[str, Any]) -> bool:
    """Whether all of an arm's settings have today's names: a weight under an older name would seem absent."""
    blocks = {key.split(".")[0] for key in DEFAULTS}
    return all(
        key in DEFAULTS or key.startswith(("clip.", "reference_kl.")) for key in settings if key.split(".")[0] in blocks
    )


def _all_settings(results: Results) -> dict[str, dict[str, Any]]:
    """The settings of every arm without unknown settings."""
    settings = {arm: settings_of(results, arm) for arm in results.arms}
    return {arm: own for arm, own in settings.items() if _known(own)}


def _alike(
    settings: Mapping[str, Mapping[str, Any]], first: Role, second: Role, blocks: Keys, apart: Keys
) -> Iterator[tuple[str, str]]:
    """Pairs of arms of two kinds that agree in some blocks, except for keys or whole blocks set apart."""
    parts = {arm: _part(own, blocks, apart) for arm, own in settings.items()}
    others = [arm for arm, own in settings.items() if second(own)]
    for one, own in settings.items():
        if first(own):
            yield from ((one, other) for other in others if parts[one] == parts[other])


def _part(settings: Mapping[str, Any], blocks: Keys, apart: Keys) -> dict[str, Any]:
    wanted = set(blocks).difference(apart)
    # The matched control of a quantised engine is the exact engine with its number formats.
    engine = _ENGINE if _SIDE in apart and _few_bits(settings) else ()
    left_out = {*apart, *engine}
    return {key: value for key, value in settings.items() if key.split(".")[0] in wanted and key not in left_out}


def _pruned(settings: Mapping[str, Any]) -> bool:
    rule = settings["vocabulary.rule"], settings["vocabulary.side"], settings["vocabulary.adapt"]
    return rule == ("min_p", "both", "none")


def _corrected(settings: Mapping[str, Any], token: str, sequence: tuple[str, ...], ratio: str = "r_corr") -> bool:
    weights = settings["correction.token"], settings["correction.rejects"]
    weighted = weights == (token, ratio) and settings["correction.sequence"] in sequence
    return weighted and settings["vocabulary.rule"] == "full" and is_plain(settings) and _no_sampler_ratio(settings)


def _unweighted(settings: Mapping[str, Any]) -> bool:
    weights = settings["correction.token"], settings["correction.sequence"]
    return weights == ("none", "none") and is_plain(settings) and _no_sampler_ratio(settings)


def is_plain(settings: Mapping[str, Any]) -> bool:
    """Whether the arm has none of what came after the first studies: rejections, bounds, centering, a reference."""
    later = all(settings[key] == DEFAULTS[key] for key in _LATER)
    return later and settings.get("reference_kl.coefficient") is None


def _no_sampler_ratio(settings: Mapping[str, Any]) -> bool:
    """Whether no clipped ratio corrects for the sampler, as bypass and decoupled do."""
    return settings.get("clip.ratio") in (None, "recompute")
