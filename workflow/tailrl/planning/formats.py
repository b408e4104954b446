"""Number formats that vLLM lacks on this machine's CPU: a study runs there without the arms in them, and says so."""

from collections.abc import Collection, Mapping
from typing import TypeVar

from tailrl.config.cpu_formats import lacking
from tailrl.config.sampler import SamplerSettings
from tailrl.config.study import Study
from tailrl.runtime.errors import ConfigurationError

Kept = TypeVar("Kept")


def without_lacking(study: Study, flags: Collection[str]) -> tuple[Study, str]:
    """The study without the arms, ablations and compared engines that a CPU with these flags cannot run.

    Returns:
        The study, whose description then ends with the sentence, and the sentence; empty where nothing is left out.

    Raises:
        StudyError: no arm or no compared engine is left, or the evaluation itself cannot run.
    """

    def why(*samplers: SamplerSettings) -> str:
        """The first reason why one of them cannot sample here; empty if all can."""
        return next((words for sampler in samplers for words in lacking(sampler, flags).values()), "")

    if words := why(study.evaluation.sampler):
        raise ConfigurationError(f"evaluation.sampler: {words}")
    arms = {name: words for name, arm in study.arms.items() if (words := why(arm.sampler))}
    ablations = {}
    for name, ablation in study.ablations.items():
        varied = [*study.ablation_arms(name).values(), *(study.arms[base] for base in ablation.bases)]
        if words := why(*(arm.sampler for arm in varied)):
            ablations[name] = words
    compared = study.distributions.engines
    engines = {name: words for name, engine in compared.items() if (words := why(engine.sampler))}
    left = {"arms": arms, "ablations": ablations, "compared engines": engines}
    named = [f"{kind} {', '.join(found)}" for kind, found in left.items() if found]
    if not named:
        return study, ""
    reasons = dict.fromkeys(words for found in left.values() for words in found.values())
    sentence = f"left out, since {'; '.join(reasons)}: {', '.join(named)}"
    if len(arms) == len(study.arms) or len(engines) == len(compared):
        raise ConfigurationError(f"{study.name}: nothing is left of it here: {sentence}")
    changes = {
        "description": f"{study.description} {sentence[0].upper()}{sentence[1:]}.".strip(),
        "arms": _without(study.arms, arms),
        "ablations": _without(study.ablations, ablations),
        "distributions": study.distributions.model_copy(update={"engines": _without(compared, engines)}),
    }
    return study.model_copy(update=changes), sentence


def _without(named: Mapping[str, Kept], left_out: Collection[str]) -> dict[str, Kept]:
    return {name: one for name, one in named.items() if name not in left_out}
