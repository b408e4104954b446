"""The block of a study that says what the page over its parts holds."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tailrl.config.base import LARGEST_RATIO, Settings, Text

SCORE = "avg@k"
"""The measure that is always there: the held-out score of the last policy, a share of 1."""
SCORE_TABLE, SCORE_COLUMN = "policies.csv", "avg_mean"
"""Where each part has the held-out avg@k of its policies."""

BASE_ARM = "base"
"""The arm of the untrained policy: it is evaluated, never trained."""

Some = Annotated[tuple[str, ...], Field(min_length=1)]


def matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """The names that one of the patterns describes, in their own order."""
    wanted = tuple(patterns)
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]


def arm_weights(arm: str, minus: str) -> dict[str, float]:
    """The weight of each arm in an arm's difference from a sum of others, as `minus` says it: 1 for the arm itself."""
    weights = {arm: 1.0}
    sign = -1.0
    for word in named(minus, arm).split():
        if word in ("+", "-"):
            sign = -1.0 if word == "+" else 1.0
        else:
            weights[word] = weights.get(word, 0.0) + sign
    return weights


def named(text: str, arm: str) -> str:
    """A text with the arm's name for {arm}, and the last word of it for {last}."""
    return text.replace("{arm}", arm).replace("{last}", arm.rpartition("_")[2])


class ArmContrast(Settings):
    """Arms, each minus the same sum of other arms."""

    arms: Some = Field(description="patterns of arms' names")
    without: tuple[str, ...] = Field((), description="patterns of those that are left out")
    minus: str = Field(
        description="arms with + and - between them; {arm}: the arm's name, {last}: its last word; base: the untrained "
        "policy"
    )

    def chosen(self, names: Sequence[str]) -> list[str]:
        """Those of the names that are compared; none with itself."""
        left_out = matching(names, self.without)
        found = [name for name in matching(names, self.arms) if name not in left_out]
        return [name for name in found if any(arm_weights(name, self.minus).values())]


class Near(Settings):
    """Lines count only where a measure of the arm is near that of another arm."""

    measure: str = Field(description="the measure")
    of: str = Field(description="the other arm; {arm} and {last} as in `minus`")
    factor: float = Field(gt=1, le=LARGEST_RATIO, description="the largest ratio of the two, either way")


class Family(Settings):
    """Differences that are tested together."""

    of: Annotated[tuple[ArmContrast, ...], Field(min_length=1)] = Field(description="what is compared")
    measure: str = Field(SCORE, description="what the differences are in: the held-out score, or a measure of scores")
    primary: bool = Field(False, description="whether it is a primary endpoint")
    holm: Literal["family", "part"] = Field("family", description="whose lines share Holm's correction")
    between: tuple[Text, Text] | None = Field(None, description="the difference in one part minus that in another")
    near: Near | None = Field(None, description="which lines count; null: all")
    margins: dict[str, Annotated[float, Field(gt=0, lt=1)]] = Field(
        default_factory=dict,
        description="margins of equivalence, in the measure, by a pattern of arms' names: two arms are level where the "
        "90 % interval of their difference lies within the margin (unit: part)",
    )

    def margin(self, arm: str) -> float | None:
        """The arm's margin of equivalence, by the first pattern that describes it."""
        return next((margin for pattern, margin in self.margins.items() if fnmatchcase(arm, pattern)), None)


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
    panels: Annotated[tuple[Some, ...], Field(min_length=1)] = Field(
        description="for each panel the families or the measures in it"
    )


class Pool(Settings):
    """The page over the parts of a study."""

    title: str = Field(description="the page's title")
    noun: str = Field("part", description="what differs between parts, such as warm start")
    unit: Literal["part", "seed"] = Field(
        "part",
        description="what intervals are over. part: the parts repeat each other, and differences are paired within a "
        "part. seed: the parts differ in a setting, and intervals are over each part's seeds",
    )
    parts: tuple[Text, ...] = Field((), description="the parts that are pooled; none: all")
    families: dict[str, Family] = Field(default_factory=dict, description="differences of held-out scores, by family")
    measures: dict[str, MeasureColumn] = Field(default_factory=dict, description="columns of the parts' tables")
    against: Text | None = Field(
        None,
        description="a part that the others' score and measures are compared with, arm by arm (unit: seed)",
    )
    slopes: tuple[SlopeOf, ...] = Field(
        (), description="of logarithms, by least squares over the parts, one slope a seed (unit: seed)"
    )
    figure: PoolFigure | None = None

    @property
    def tables(self) -> list[str]:
        """The tables that each part must have."""
        return list(dict.fromkeys([SCORE_TABLE, *(measure.table for measure in self.measures.values())]))

    @property
    def outputs(self) -> list[str]:
        """The names of the files that the page comes with."""
        wanted: dict[str, object] = {
            "equivalence.csv": any(family.margins for family in self.families.values()),
            "changes.csv": self.against,
            "slopes.csv": self.slopes,
            "pooled.svg": self.figure,
        }
        return ["pooled.md", "comparisons.csv", "measures.csv", *(name for name, asked in wanted.items() if asked)]

    def check_parts(self, names: Collection[str]) -> None:
        """Raises ValueError for a part that the study has not."""
        between = [part for family in self.families.values() for part in family.between or ()]
        for part in (*self.parts, *between, *([self.against] if self.against else [])):
            if part not in (self.parts or names) or part not in names:
                raise ValueError(f"pooled: there is no part {part}")

    def check_arms(self, parts: Sequence[Mapping[str, Collection[int]]]) -> None:
        """Raises ValueError for a pattern or an arm that no part has, or numbers of seeds that differ between parts.

        Args:
            parts: of each pooled part its arms, with their seeds.
        """
        counts: dict[str, int] = {}
        for arms in parts:
            for arm, seeds in arms.items():
                if counts.setdefault(arm, len(seeds)) != len(seeds):
                    raise ValueError(f"pooled: {arm} has {len(seeds)} seeds in one part, and {counts[arm]} in another")
        for name, family in self.families.items():
            for contrast in family.of:
                for pattern in (*contrast.arms, *contrast.without, *family.margins):
                    if not matching(counts, [pattern]):
                        raise ValueError(f"pooled.families.{name}: no part has an arm {pattern}")
                for arm in contrast.chosen(list(counts)):
                    for word in arm_weights(arm, contrast.minus):
                        if word not in counts and word != BASE_ARM:
                            raise ValueError(f"pooled.families.{name}.minus: no part has an arm {word}")

    @model_validator(mode="after")
    def _known(self) -> Self:
        if SCORE in self.measures:
            raise ValueError(f"measures: {SCORE} is the score itself; give the measure another name")
        measures = {family.near.measure for family in self.families.values() if family.near}
        measures |= {family.measure for family in self.families.values()} - {SCORE}
        measures |= {name for slope in self.slopes for name in (slope.of, slope.against)}
        drawn = {name for panel in self.figure.panels for name in panel} if self.figure else set()
        measures |= {self.figure.x} if self.figure else set()
        if unknown := (measures - self.measures.keys()) | (drawn - self.measures.keys() - self.families.keys()):
            raise ValueError(f"there is no measure or family {min(unknown)}")
        between = any(family.between for family in self.families.values())
        if self.unit == "seed" and any(family.margins for family in self.families.values()):
            raise ValueError("unit: margins are of differences that are paired within parts: they need part")
        if self.unit == "part" and (between or self.slopes or self.against):
            raise ValueError("unit: parts that repeat each other do not differ: between, slopes and against need seed")
        return self
