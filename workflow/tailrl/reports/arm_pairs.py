"""Which arms of a study are compared: those whose runs' recorded settings differ in one thing alone."""

from collections.abc import Iterator, Mapping
from typing import Any

from tailrl.artifacts.results import Results
from tailrl.claims.catalogue import Claim
from tailrl.config.arm_kinds import Role, has_exact_engine, is_matched, is_naive, kind
from tailrl.config.jobs import Run

Keys = tuple[str, ...]

_SHARED = ("estimator", "clip", "sampler", "disturbance", "training", "policy", "task")
"""Two arms that agree in these blocks of settings differ only in vocabulary and correction."""

_SIDE = "disturbance.side"
"""What is set apart where an arm is paired with its matched control."""

_FORMATS = ("quantization", "group_size", "kv_cache_dtype", "verify")
"""Settings of a sampler in which a quantised engine and its twin agree."""


def arms_of(claim: Claim, results: Results) -> list[str]:
    """The arms that the claim is about, in the order of the study."""
    role = kind(claim.arms)
    return [arm for arm in results.arms if role(results.settings(arm))]


def pairs_of(claim: Claim, results: Results) -> Iterator[tuple[str, str]]:
    """The arms that the claim is about, each with its control.

    The two differ only in vocabulary, correction and `claim.apart` (keys or whole blocks).
    """
    yield from _alike(_all_settings(results), kind(claim.arms), kind(claim.against), _SHARED, claim.apart)


def ties(results: Results) -> list[tuple[str, str, str]]:
    """The references of each arm, as (arm, reference, why), in the order of the study.

    References are the naive arm under the same mismatch, the arm's matched control (its twin, where the engine is
    quantised), and the arm with zero mismatch. They depend on settings alone, never on results.
    """
    whole = (*_SHARED, "vocabulary", "correction", "reference_kl")
    kinds: list[tuple[str, Role, Role, Keys, Keys]] = [
        ("naive", lambda run: not is_naive(run), is_naive, _SHARED, ()),
        ("matched control", lambda run: not is_matched(run), is_matched, whole, (_SIDE,)),
        ("no mismatch", lambda run: not has_exact_engine(run), has_exact_engine, whole, ("sampler", "disturbance")),
    ]
    settings = _all_settings(results)
    found = [
        (arm, reference, why)
        for why, role, other, blocks, apart in kinds
        for arm, reference in _alike(settings, role, other, blocks, apart)
    ]
    return sorted(found, key=lambda pair: results.arms.index(pair[0]))


def references(results: Results) -> list[tuple[str, str, str]]:
    """`ties`, and for an arm without any tie the study's first arm."""
    found = ties(results)
    tied, first = {arm for one, other, _ in found for arm in (one, other)}, results.arms[0]
    found += [(arm, first, "first arm") for arm in results.arms if arm not in tied | {first}]
    return sorted(found, key=lambda pair: results.arms.index(pair[0]))


def _all_settings(results: Results) -> dict[str, Run]:
    return {arm: results.settings(arm) for arm in results.arms}


def _alike(
    settings: Mapping[str, Run], first: Role, second: Role, blocks: Keys, apart: Keys
) -> Iterator[tuple[str, str]]:
    """Pairs of arms of two kinds that agree in some blocks, except for keys or whole blocks set apart."""
    parts = {arm: _part(run, blocks, apart) for arm, run in settings.items()}
    others = [arm for arm, run in settings.items() if second(run)]
    for arm, run in settings.items():
        if first(run):
            yield from ((arm, other) for other in others if parts[arm] == parts[other])


def _part(run: Run, blocks: Keys, apart: Keys) -> dict[str, Any]:
    part = run.model_dump(include=set(blocks).difference(apart))
    # The matched control of a quantised engine is the exact engine with its number formats.
    if _SIDE in apart and run.sampler.quantized:
        part["sampler"] = {name: part["sampler"][name] for name in _FORMATS}
    for key in apart:
        block, _, name = key.partition(".")
        if name and part.get(block):
            part[block].pop(name, None)
    return part
