"""A study's arms in words, from the settings of their runs."""

from collections.abc import Iterator, Mapping
from typing import Any

from tailrl.artifacts.results import Results
from tailrl.config.arm import ArmBlocks
from tailrl.config.jobs import Run
from tailrl.config.words import describe, describe_remedy

_OF_ARM = {"study", "arm", *ArmBlocks.model_fields}
"""The names of a run, and the blocks of its settings that `describe` covers."""


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat.update(flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return flat


def describe_arms(results: Results) -> dict[str, str]:
    """Each arm in words; other settings are listed if the arms differ in them."""
    runs = {arm: results.settings(arm) for arm in results.arms}
    flat = {arm: flatten(run.model_dump(mode="json", exclude=_OF_ARM)) for arm, run in runs.items()}
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    differing = [key for key in keys if len({str(settings.get(key)) for settings in flat.values()}) > 1]
    # verl's own lines are long, and say of the machine more than of the arm.
    differing = [key for key in differing if key not in ("training.backend", "training.verl_overrides")]
    return {
        arm: "; ".join([*describe(run), *_trainer(run), *(f"{key} = {flat[arm].get(key)}" for key in differing)])
        for arm, run in runs.items()
    }


def _trainer(run: Run) -> list[str]:
    """What trains the arm, where it is not our own loop."""
    return [] if run.training.backend == "tailrl" else [f"trained by {run.training.backend}"]


def arm_rows(results: Results) -> Iterator[dict[str, str]]:
    """Each arm, its remedy against the mismatch, and its description, as rows of a table."""
    for arm, words in describe_arms(results).items():
        yield {"arm": arm, "remedy": describe_remedy(results.settings(arm)), "what": words}
