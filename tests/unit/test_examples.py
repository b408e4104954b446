"""The notebooks of examples/ run, and print what is committed: words exactly, numbers to their last digit."""

import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebooks import committed

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
NUMBER = re.compile(r"-?\d+(?:\.(\d+))?")
LARGEST = 20_000
"""Bytes of a notebook with its outputs."""

RUN = """
import json, sys
import nbformat
from notebooks import outputs
print(json.dumps([text for _, text in outputs(nbformat.read(sys.argv[1], as_version=4))]))
"""


def same(printed: str, expected: str) -> bool:
    """Whether texts differ by at most one unit of a number's last digit: CPUs round differently."""
    if re.sub(r"\s+", " ", NUMBER.sub("#", printed)) != re.sub(r"\s+", " ", NUMBER.sub("#", expected)):
        return False
    pairs = zip(NUMBER.finditer(printed), NUMBER.finditer(expected), strict=True)
    return all(
        len(a[1] or "") == len(b[1] or "")
        and abs(float(a[0]) - float(b[0])) <= (1.01 * 10 ** -len(b[1]) if b[1] else 0)
        for a, b in pairs
    )


def test_a_difference_is_seen() -> None:
    assert same("k3 0.012  of 16", "k3 0.013 of 16")
    for other in (
        "k3 0.014 of 16",
        "k3 0.012 of 17",
        "k1 0.012 of 16",
        "k3 0.012",
        "k3 0.0120 of 16",
        "k3 -0.012 of 16",
    ):
        assert not same("k3 0.012 of 16", other)


def test_there_are_three_notebooks_which_the_page_lists() -> None:
    page = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"\((\w+\.ipynb)\)", page)
    assert listed == ["training_loop.ipynb", "gradient_exam.ipynb", "diagnose_a_log.ipynb"]
    assert {path.name for path in NOTEBOOKS} == set(listed)


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert path.stat().st_size < LARGEST
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    # In a process of its own: a notebook sets the number of threads.
    paths = [str(ROOT / "tests/fixtures"), *filter(None, sys.path)]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {paths!r}{RUN}", str(path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert ran.returncode == 0, ran.stderr
    for cell, text in zip(code, json.loads(ran.stdout), strict=True):
        assert same(text, committed(cell)), f"{text}\nis not\n{committed(cell)}"
