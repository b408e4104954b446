"""math-ai/aime25: the 30 problems of AIME 2025.

Columns: problem (other copies call it question), answer (0 to 999; one problem asks for degrees: `336^\\circ`), id.
"""

import re
from typing import Any

from tailrl.tasks.answers import integer
from tailrl.tasks.scoring import same_math
from tailrl.tasks.sources import RowError, answer_of, text_of

HUB_NAME = "math-ai/aime25"
SPLIT = "test"

_ONE_NUMBER = re.compile(r"[^0-9]*([0-9]+)(?:\.0+)?[^0-9]*")


def read_row(row: dict[str, Any]) -> tuple[object, str, str]:
    """A row's id, problem and answer; raises RowError."""
    text = text_of(row.get("problem", row.get("question")), "problem")
    answer = _number(answer_of(row.get("answer")))
    if answer is None or not 0 <= answer <= 999:
        raise RowError("answer is not an integer from 0 to 999")
    return row.get("id"), text, str(answer)


def _number(answer: str) -> int | None:
    """The integer that an answer writes, alone or with a unit, a sign or text around it; None for any other answer."""
    number = integer(answer)
    alone = _ONE_NUMBER.fullmatch(answer)
    if number is None and alone is not None and same_math(answer, alone[1]):
        return integer(alone[1])
    return number
