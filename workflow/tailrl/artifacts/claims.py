"""claims.csv: verdicts on claims, one row each. The only reader and writer of these files."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.config.messages import sentences
from tailrl.runtime.errors import DataError, one_line

Cell = Annotated[float, BeforeValidator(lambda cell: math.nan if cell == "" else cell)]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A line of the report: the claim, its verdict, the scope, and what was seen.

    Attributes:
        id, claim: the claim's id and its text.
        policy, task, dose, rate, arms, seeds: the scope; rate: the learning rate, or several; seeds: runs of the arm
            with fewest.
        effect, low, high, unit: the endpoint with its interval over seeds; NaN if there is none.
        p, p_holm: two-sided, raw and by Holm over the claim's family; NaN if no test decides.
        seen: the effect in words.
        endpoint: the primary endpoint, fixed beforehand.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    id: str
    claim: str
    source: str
    verdict: str
    policy: str
    task: str
    dose: str
    rate: str
    arms: str
    seeds: int
    effect: Cell
    low: Cell
    high: Cell
    unit: str
    p: Cell
    p_holm: Cell
    seen: str
    endpoint: str

    @property
    def where(self) -> str:
        """The mismatch and the learning rate in words; empty where neither is known."""
        return "; ".join(filter(None, [self.dose, self.rate and f"learning rate {self.rate}"]))


_ROW = TypeAdapter(Verdict)


def write_verdicts(path: Path, verdicts: Iterable[Verdict]) -> None:
    """Write one row a verdict."""
    write_csv(path, map(asdict, verdicts))


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts as written; raises StudyError if a column is missing or unknown, or a cell is not of its kind."""
    return verdicts_of(read_csv(path, [field.name for field in fields(Verdict)]), path)


def verdicts_of(rows: Iterable[Mapping[str, str]], path: Path) -> list[Verdict]:
    """The verdicts that rows of a table hold; raises StudyError as `read_verdicts` does."""
    found: list[Verdict] = []
    for number, row in enumerate(rows, start=2):
        try:
            found.append(_ROW.validate_python(row))
        except ValidationError as error:
            raise DataError(f"{path}, line {number}: {one_line(sentences(error))}") from None
    return found
