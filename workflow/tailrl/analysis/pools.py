"""What the pages over the parts of a study hold, as data: `pools.yaml`."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Literal, Self

import yaml
from pydantic import Field, model_validator

from tailrl.config.base import Settings

SCORE_TABLE, SCORE_COLUMN = "policies.csv", "avg_mean"
"""Where each part has the held-out avg@k of its policies."""

Some = Annotated[tuple[str, ...], Field(min_length=1)]


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that one of the patterns describes, in their own order."""
    wanted = tuple(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def named(text: str, arm: str) -> str:
    """A text with the arm's name for {arm}, and the last word of it for {last}."""
    return text.format(arm=arm, last=arm.rpartition("_")[2])


class ArmsLess(Settings):
    """Arms, each less the same sum of other arms."""

    arms: Some = Field(description="patterns of arms' names")
    without: tuple[str, ...] = Field((), description="patterns of those that are left out")
    less: str = Field(description="arms with + and - between them; {arm}: the arm's name, {last}: its last word")

    def weights(self, arm: str) -> dict[str, float]:
        """The weight of each arm in the difference: 1 for the arm itself, less the sum of the others."""
        found = {arm: 1.0}
        sign = -1.0
        for word in named(self.less, arm).split():
            if word in ("+", "-"):
                sign = -1.0 if word == "+" else 1.0
            else:
                found[word] = found.get(word, 0.0) + sign
        return found

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Those of the names that are compared."""
        left_out = matching(names, self.without)
        return [name for name in matching(names, self.arms) if name not in left_out]


class Near(Settings):
    """Lines count only where a measure of the arm is near that of another arm."""

    measure: str = Field(description="the measure")
    of: str = Field(description="the other arm; {arm} and {last} as in `less`")
    factor: float = Field(gt=1, description="the largest ratio of the two, either way")


class Family(Settings):
    """Differences that are tested together."""

    of: Annotated[tuple[ArmsLess, ...], Field(min_length=1)] = Field(description="what is compared")
    primary: bool = Field(False, description="whether it is a primary endpoint")
    holm: Literal["family", "part"] = Field("family", description="whose lines share Holm's correction")
    between: tuple[str, str] | None = Field(None, description="the difference in one part less that in another")
    near: Near | None = Field(None, description="which lines count; null: all")


class MeasureColumn(Settings):
    """A column of a table that each part has, by arm and seed."""

    table: str = Field(description="the table's file")
    column: str = Field(description="the column")
    geometric: bool = Field(False, description="whether its mean over parts is geometric")


class SlopeOf(Settings):
    """How a measure grows with another."""

    of: str = Field(description="the measure that grows")
    against: str = Field(description="the measure that it grows with")
    arms: Some = Field(description="patterns of arms' names")


class PoolFigure(Settings):
    """Families and measures against a measure."""

    x: str = Field(description="a measure")
    panels: tuple[Some, ...] = Field(description="for each panel the families or the measures in it")


class Pool(Settings):
    """One page over the parts of a study."""

    title: str
    parts: Some
    unit: Literal["part", "seed"] = "part"
    noun: str = Field(description="what differs between parts")
    families: dict[str, Family]
    measures: dict[str, MeasureColumn] = Field(default_factory=dict)
    slopes: tuple[SlopeOf, ...] = ()
    figure: PoolFigure | None = None

    @property
    def tables(self) -> list[str]:
        """The tables that each part must have."""
        return list(dict.fromkeys([SCORE_TABLE, *(measure.table for measure in self.measures.values())]))

    @property
    def outputs(self) -> list[str]:
        """The names of the files that the page comes with."""
        more = [*(["slopes.csv"] if self.slopes else []), *(["pooled.svg"] if self.figure else [])]
        return ["pooled.md", "comparisons.csv", "measures.csv", *more]

    @model_validator(mode="after")
    def _known(self) -> Self:
        measures = {one.near.measure for one in self.families.values() if one.near}
        measures |= {name for slope in self.slopes for name in (slope.of, slope.against)}
        drawn = {name for panel in self.figure.panels for name in panel} if self.figure else set()
        measures |= {self.figure.x} if self.figure else set()
        if unknown := (measures - self.measures.keys()) | (drawn - self.measures.keys() - self.families.keys()):
            raise ValueError(f"{self.title}: there is no measure or family {min(unknown)}")
        parts = {part for one in self.families.values() for part in one.between or ()}
        if unknown := parts - set(self.parts):
            raise ValueError(f"{self.title}: there is no part {min(unknown)}")
        if self.unit == "part" and (parts or self.slopes):
            raise ValueError(f"{self.title}: parts that repeat each other do not grow")
        return self


@cache
def pools() -> dict[str, Pool]:
    """Every page by the name of its target."""
    data = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {name: Pool.model_validate(pool) for name, pool in data.items()}
