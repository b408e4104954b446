"""Number formats that vLLM lacks on this machine's CPU: a study runs there without the arms in them, and says so."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from tailrl.config.arm import Arm
from tailrl.config.sampler import SamplerSettings
from tailrl.config.study import Study
from tailrl.runtime.errors import ConfigurationError

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
INSTRUCTIONS: dict[str | None, tuple[str, tuple[set[str], ...]]] = {
    **dict.fromkeys(("fp8_e4m3", "fp8_e5m2"), ("an fp8 cache needs AVX-512 or AMX", (AVX512, {"amx_tile"}))),
    "int4": ("int4 weights need AVX-512", (AVX512,)),
    "int8": ("int8 weights need VNNI", ({"avx512_vnni"}, {"avx_vnni"})),
}
"""Flags of a CPU, of which a format needs all of one set; `rollout.vllm.quantization` says why."""

Kept = TypeVar("Kept")


def lacking(sampler: SamplerSettings, flags: Collection[str]) -> str:
    """Why vLLM cannot sample so on a CPU with these flags; empty if it can, or if the flags are not known (none)."""
    formats = sampler.formats
    if formats is None or formats.TRAINERS_BITS:
        return ""
    if formats.quantization == "fp8":
        return "fp8 weights need a GPU"
    for name in (formats.kv_cache_dtype, formats.quantization):
        words, sets = INSTRUCTIONS.get(name, ("", (set(),)))
        if flags and not any(needed <= set(flags) for needed in sets):
            return f"on a CPU {words}, which this one has not"
    return ""


def without_lacking(study: Study, flags: Collection[str]) -> tuple[Study, str]:
    """The study without the arms, ablations and compared engines that a CPU with these flags cannot run.

    Returns:
        The study, whose description then ends with the sentence, and the sentence; empty where nothing is left out.

    Raises:
        StudyError: no arm or no compared engine is left, or the evaluation itself cannot run.
    """
    if words := lacking(study.evaluation.sampler, flags):
        raise ConfigurationError(f"evaluation.sampler: {words}")
    arms = {name: words for name, arm in study.arms.items() if (words := lacking(arm.sampler, flags))}
    ablations = {
        name: words
        for name in study.ablations
        if (words := next(filter(None, (lacking(arm.sampler, flags) for arm in _arms_of(study, name))), ""))
    }
    engines = {
        name: words for name, engine in study.distributions.engines.items() if (words := lacking(engine.sampler, flags))
    }
    left = {"arms": arms, "ablations": ablations, "compared engines": engines}
    named = [f"{kind} {', '.join(found)}" for kind, found in left.items() if found]
    if not named:
        return study, ""
    why = "; ".join(dict.fromkeys(filter(None, (words for found in left.values() for words in found.values()))))
    sentence = f"left out, since {why}: {', '.join(named)}"
    if len(arms) == len(study.arms) or len(engines) == len(study.distributions.engines):
        raise ConfigurationError(f"{study.name}: nothing is left of it here: {sentence}")
    compared = study.distributions.model_copy(update={"engines": _without(study.distributions.engines, engines)})
    changes = {
        "description": f"{study.description} {sentence[0].upper()}{sentence[1:]}.".strip(),
        "arms": _without(study.arms, arms),
        "ablations": _without(study.ablations, ablations),
        "distributions": compared,
    }
    return study.model_copy(update=changes), sentence


def _arms_of(study: Study, ablation: str) -> list[Arm]:
    """The ablation's arms, and those whose settings it varies."""
    return [*study.ablation_arms(ablation).values(), *(study.arms[base] for base in study.ablations[ablation].bases)]


def _without(named: Mapping[str, Kept], left_out: Collection[str]) -> dict[str, Kept]:
    return {name: one for name, one in named.items() if name not in left_out}
