"""What is claimed, as data: every claim, and every statement of the two papers. The YAML files beside this hold them.

A claim is known by its id, which never changes. Its text is for the reader, and may be reworded.
"""

import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from tailrl.config.base import Settings
from tailrl.config.load import read_yaml

FOLDER = Path(__file__).parent

TRAINED = ("mismatch", "mechanism", "remedies")
"""The files of claims that trained arms decide, in the order of the report."""

SEVERAL = {
    "ablation.{field}.*": "ablation of {field}",
    "across.lost_mass.*": "across studies: 1 − Z",
    "warning.*.collapse*": "announces a collapse",
    "warning.*.before_reward": "warns before the falling reward does",
}
"""The text of several claims at once, by a pattern of their ids."""


class Claim(Settings):
    """An entry of the catalogue.

    Attributes:
        endpoint: the primary endpoint in words, fixed before any result.
        unit: of the effect.
        rule: how the outcome follows from what was found; see `decide.RULES`.
        family: claims of one family share Holm's correction; empty: the claim is a family of its own.
        limit: what the endpoint is held against; within: the range that it has to lie in.
        requires: the id of a claim without which this one cannot be reproduced.
        name: of claims that are alike, what this one is about.
        measure: of trained arms, the function of `endpoints` that measures the claim.
        arms, against: the kinds of arms that are compared (`arm_kinds.KINDS`), each list a kind at once.
        apart: settings in which the two may differ, beside vocabulary and correction.
        needs: the arms that a study lacks where it has none to compare.
        number: what is measured of each run (`endpoints.NUMBERS`); beside: what is told besides.
        direction: the claim lies above its limit or control, below it, or on either side.
        seen: the result in words. reported: the paper's own effect.
    """

    id: str
    text: str
    source: str
    endpoint: str
    unit: str
    rule: Literal["directed", "change", "refutes", "fact", "above", "within", "told"] = "directed"
    family: str = ""
    limit: float = math.nan
    within: tuple[float, float] = (math.nan, math.nan)
    requires: str = ""
    name: str = ""
    measure: str = ""
    arms: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    needs: str = ""
    number: str = ""
    beside: str = ""
    direction: Literal["above", "below", "either"] = "above"
    seen: str = ""
    reported: float | None = None

    def filled(self, **holes: str) -> "Claim":
        """The claim on one field, or with one reference: the names in braces in its id and endpoint are filled in."""
        return self.model_copy(update={key: getattr(self, key).format(**holes) for key in ("id", "endpoint")})


class Statement(Settings):
    """A row of the table of all claims: what a paper states or leaves open.

    Attributes:
        part: the heading that it stands under.
        text: the statement or the question.
        by: ids of the claims that decide it; `*` stands for any part of an id.
        figures: of a study that show it, the best one first.
        command: what makes a run that speaks to it.
        only: how the names of the studies begin whose lines count; empty for all.
        held_by: the test that holds a definition.
        beyond: why no run at this scale decides it, where none can.
    """

    part: str
    id: str
    text: str
    by: tuple[str, ...] = ()
    figures: tuple[str, ...] = ()
    command: str = ""
    only: str = ""
    held_by: str = ""
    beyond: str = ""


def claims_of(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Claim]:
    """The claims of a file's entries, by id; an entry with `each` stands for a claim of each of its names."""
    for claim, entry in entries.items():
        for part, name in entry.get("each", {"": ""}).items():
            own = {"id": claim, **entry, "name": name}
            own.pop("each", None)
            holes = {"{part}": part, "{name}": name}
            yield Claim(**{key: _put(value, holes) if isinstance(value, str) else value for key, value in own.items()})


def _put(text: str, holes: Mapping[str, str]) -> str:
    for hole, value in holes.items():
        text = text.replace(hole, value)
    return text


def read_claims(*names: str) -> dict[str, Claim]:
    """The claims of some files beside this, in their order, by id."""
    return {claim.id: claim for name in names for claim in claims_of(read_yaml(FOLDER / f"{name}.yaml"))}


CATALOGUE = read_claims(*TRAINED, "probes", "comparisons")
"""Every claim by its id."""

TRAINED_CLAIMS = [claim for claim in CATALOGUE.values() if claim.measure]
"""Those that trained arms decide, in the order of the report."""

STATEMENTS = [
    Statement(part=part, id=name, **entry)
    for part, own in read_yaml(FOLDER / "statements.yaml").items()
    for name, entry in own.items()
]
"""Every statement of the two papers, and every question that they leave open."""

WORDS = {claim.id: claim.text for claim in CATALOGUE.values()} | SEVERAL
"""The text of each claim, and of several at once."""


def named(pattern: str) -> dict[str, Claim]:
    """The claims whose id fits the pattern, by what each is about."""
    return {claim.name: claim for claim in CATALOGUE.values() if fnmatchcase(claim.id, pattern)}


def words_of(claim: str, otherwise: str = "") -> str:
    """The text of the claim with this id, or of the claims of a pattern; `otherwise` where there is none."""
    field, _, asked = claim.removeprefix("ablation.").rpartition(".")
    if claim.startswith("ablation.") and field and (words := WORDS.get(f"ablation.{{field}}.{asked}")):
        return words.format(field=field)
    return WORDS.get(claim, otherwise)
