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
    vocabulary: dict[str, Any] | None = Field(
        None, description="the safe set; of an arm with its own rule `side` alone counts; null: none"
    )
    source: str = Field(description="the file that was read")
    note: str = Field("", description="whose it is, or what it leaves out")
    refused: str = Field("", description="why a study cannot have it; empty: it can")
    unexecuted: str = Field("", description="why the framework's own code was not executed; empty: it was")


class Framework(Settings):
    """A framework at the version that was read, and its presets."""

    version: str = Field(description="the version that was read")
    modes: dict[str, Preset] = Field(description="its presets by their names there")


@cache
def frameworks() -> dict[str, Framework]:
    """The frameworks by name."""
    data = yaml.safe_load((Path(__file__).parent / "data" / "presets.yaml").read_text(encoding="utf-8"))
    return {name: Framework.model_validate(framework) for name, framework in data.items()}


@cache
def presets() -> dict[str, Preset]:
    """Every preset by its name, such as verl/decoupled_token_is."""
    return {f"{name}/{mode}": preset for name, own in frameworks().items() for mode, preset in own.modes.items()}


def expanded(correction: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A correction's settings with those of its preset below them, and the preset's other blocks by their names.

    The name of an unknown preset stays.

    Raises:
        ValueError: if the framework has moved on from it.
    """
    name = str(correction.get("preset"))
    preset = presets().get(name)
    if preset is None:
        return dict(correction), {}
    if preset.refused:
        raise ValueError(f"preset: {name} is refused: {preset.refused}")
    blocks = ("clip", "reference_kl", "vocabulary")
    others = {name: block for name in blocks if (block := getattr(preset, name)) is not None}
    return {**preset.correction, **{key: value for key, value in correction.items() if key != "preset"}}, others
