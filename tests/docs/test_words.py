"""A difference is "A minus B" in every page, template, study and claim: readers take "less" for "fewer"."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
AS_A_DIFFERENCE = re.compile(
    r"\bless (that (of|in|at)|naive|its (matched )?control|the (matched control|untrained|exact)|untrained|exact\b"
    r"|(matched )?control|no mismatch|itself|0\.34/V)|, less \w+\b(?=[\"`:])"
)
PLACES = ("README.md", "docs/**/*.md", "docs/**/*.j2", "studies/**/*.yaml", "workflow/**/*.yaml", "workflow/**/*.j2",
          "workflow/**/*.py", "docs/results/tables/*.csv")  # fmt: skip


def test_no_difference_is_called_less() -> None:
    wrong = {
        f"{path.relative_to(ROOT)}:{number}"
        for place in PLACES
        for path in ROOT.glob(place)
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if AS_A_DIFFERENCE.search(line)
    }
    assert wrong == set()


@pytest.mark.parametrize(
    ("line", "wrong"),
    [("naive less its matched control", True), ("avg@k of a less that of b is +1", True), ('"floor, less naive"', True),
     ("less than half", False), ("token TIS less, DVP not", False), ("a rule that is less sure", False)],
)  # fmt: skip
def test_what_counts_as_a_difference(line: str, wrong: bool) -> None:
    assert bool(AS_A_DIFFERENCE.search(line)) == wrong
