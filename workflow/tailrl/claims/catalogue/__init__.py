"""Every claim, and every statement of the two papers, as data in YAML files beside this module.

A claim is known by its id, which never changes. Its text is for the reader, and may be reworded.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from tailrl.config.base import Settings
from tailrl.config.load import read_yaml

FOLDER = Path(__file__).parent

TRAINED = ("mismatch", "mechanism", "remedies")
"""The files of claims about trained arms, in the order of the report."""

SEVERAL = {
    "ablation.{field}.*": "ablation of {field}",
    "across.lost_mass.*": "across studies: 1 − Z",
    "warning.*.collapse*": "announces a collapse",
    "warning.*.before_reward": "warns before the falling reward does",
}
"""The common text of several claims, by a pattern of their ids. Published lines alone are on `across` and `warning`."""


class Claim(Settings):
    """An entry of the catalogue.

    Attributes:
        endpoint: the primary endpoint in words, fixed before any result.
        unit: of the effect.
        rule: how the outcome follows from a finding, see `decide`.
        family: claims of one family share Holm's correction; empty for a family of its own.
        limit: the limit of the endpoint.
        measure: for trained arms, the name of the endpoint, a function of a topic of reports, that measures the claim.
        arms, against: the compared kinds of arms (`arm_kinds.KINDS`); an arm must be of all kinds in a list.
        apart: settings that may differ between the two, besides vocabulary and correction.
        needs: the missing arms, in words, for a study without suitable arms.
        number: the measured number of each run, by its name in that topic; beside: a second number, only reported.
        direction: the endpoint is above its limit or control, below it, or on either side.
        seen: the result in words. reported: the paper's own effect.
    """

    id: str
    text: str
    source: str
    endpoint: str
    unit: str
    rule: Literal["directed", "change", "refutes", "fact", "above", "told"] = "directed"
    family: str = ""
    limit: float = math.nan
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
        """The claim with the names in braces in its id and endpoint filled in, such as an ablation's field."""
        return self.model_copy(update={key: getattr(self, key).format(**holes) for key in ("id", "endpoint")})


class Statement(Settings):
    """A row of the table of all claims: what a paper states or leaves open.

    Attributes:
        part: its heading.
        text: the statement or the question.
        by: ids of the claims that decide it; `*` stands for any part of an id.
        held_by: the test that verifies a definition.
        beyond: why no run at this scale can decide it.
    """

    part: str
    id: str
    text: str
    by: tuple[str, ...] = ()
    held_by: str = ""
    beyond: str = ""


def claims_of(entries: Mapping[str, Mapping[str, Any]]) -> Iterator[Claim]:
    """The claims of a file's entries, by id."""
    return (Claim(id=claim, **entry) for claim, entry in entries.items())


def read_claims(*names: str) -> dict[str, Claim]:
    """The claims of some of the YAML files, in their order, by id."""
    return {claim.id: claim for name in names for claim in claims_of(read_yaml(FOLDER / f"{name}.yaml"))}


CATALOGUE = read_claims(*TRAINED, "probes", "comparisons", "planned")
"""Every claim by its id."""

TRAINED_CLAIMS = [claim for claim in CATALOGUE.values() if claim.measure]
"""The claims about trained arms, in the order of the report."""

STATEMENTS = [
    Statement(part=part, id=name, **entry)
    for part, own in read_yaml(FOLDER / "statements.yaml").items()
    for name, entry in own.items()
]
"""Every statement of the two papers, and every question left open."""

TEXTS = {claim.id: claim.text for claim in CATALOGUE.values()} | SEVERAL
"""The text of each claim, and the common texts of several."""


def words_of(claim: str, otherwise: str = "") -> str:
    """The text of the claim with this id, or of a pattern of claims; `otherwise` if there is none."""
    field, _, asked = claim.removeprefix("ablation.").rpartition(".")
    if claim.startswith("ablation.") and field and (words := TEXTS.get(f"ablation.{{field}}.{asked}")):
        return words.format(field=field)
    return TEXTS.get(claim, otherwise)
