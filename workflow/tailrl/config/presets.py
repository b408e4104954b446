"""Corrections of other frameworks under their own names; `data/presets.yaml` has them, with version and source.

That file is no source file of a job: jobs are given the expanded settings.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from tailrl.config.base import Settings


class Preset(Settings):
    """A framework's mode or default, as settings of an arm."""

    correction: dict[str, Any] = Field(default_factory=dict, description="the weights and rejections")
    clip: dict[str, Any] | None = Field(None, description="the clipped ratio; null: none of its own")
    reference_kl: dict[str, Any] | None = Field(None, description="the KL to the base policy; null: none")
    source: str = Field(description="the file and line that was read")
    version: str = Field("", description="where it was read, if not at the framework's version")
    note: str = Field("", description="whose it is, or what it leaves out")


class Framework(Settings):
    """A framework at the version that was read, and its presets."""

    version: str = Field(description="the version that was read")
    modes: dict[str, Preset] = Field(description="its presets by their names there")


@cache
def frameworks() -> dict[str, Framework]:
    """The frameworks by name."""
    data = yaml.safe_load((Path(__file__).parent / "data" / "presets.yaml").read_text(encoding="utf-8"))
    return {name: Framework.model_validate(framework) for name, framework in data.items()}


def version_of(name: str) -> str:
    """The version at which a preset was read: the mode's own, or else its framework's."""
    return presets()[name].version or frameworks()[name.partition("/")[0]].version


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its name, such as verl/decoupled_token_is."""
    return {f"{name}/{mode}": preset for name, own in frameworks().items() for mode, preset in own.modes.items()}


def expanded(correction: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A correction's settings with those of its preset below them, and the preset's other blocks by their names.

    The name of an unknown preset stays.
    """
    preset = presets().get(str(correction.get("preset")))
    if preset is None:
        return dict(correction), {}
    others = {name: block for name in ("clip", "reference_kl") if (block := getattr(preset, name)) is not None}
    return {**preset.correction, **{key: value for key, value in correction.items() if key != "preset"}}, others
