"""What the harness that strikes a study (tests/chaos) plans, notes, publishes and plants."""

import ast
import csv
import os
import shutil
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import chaos_tables
import faults
import kills
import planted
import pytest
import rows
import slips
import victims
from kills import AIMS, RECORDS, STARTS, TRAINING_AIMS, TWO_JOBS, Kill
from rows import EQUAL, Rows, Struck
from study_fixture import ROOT

from blocks import filled

# --- what is planned ---------------------------------------------------------------------------------


@pytest.mark.parametrize("aims", [AIMS, TRAINING_AIMS])
@pytest.mark.parametrize("seed", range(20))
def test_every_round_meets_every_part_of_a_study(seed: int, aims: tuple[str, ...]) -> None:
    planned, size = kills.plan(4 * len(aims), seed, aims), len(aims)
    for first in range(0, len(planned), size):
        assert Counter(kill.aim for kill in planned[first : first + size]) == Counter(aims)
        ordered = [victims.STAGES.index(k.aim) for k in planned[first : first + size] if k.aim in victims.STAGES]
        assert ordered == sorted(ordered), "else a study would have to be begun anew for each"
    assert all(0 <= kill.share < 1 for kill in planned)
    assert all(kill.mode in ("everything", "Snakemake") for kill in planned if kill.aim in (STARTS, RECORDS))
    assert all((kill.mode == TWO_JOBS) == (kill.aim == TWO_JOBS) for kill in planned)
    ends = ("everything", "Snakemake")
    assert all(before.mode in ends for before, kill in pairwise(planned) if kill.aim == STARTS)


def test_each_kind_is_struck_twenty_times_by_300_kills() -> None:
    planned = kills.plan(300, 0)
    assert min(Counter(kill.aim for kill in planned).values()) >= 20
    assert min(Counter(kill.mode for kill in planned).values()) >= 20


def test_a_seed_is_a_plan() -> None:
    """In any process: Python hashes texts differently in each."""
    command = [sys.executable, "-c", "import kills; print([kills.plan(n, 3) for n in (2, 10, 37)])"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "7"}
    shown = subprocess.run(command, capture_output=True, text=True, env=environment, check=True).stdout
    assert shown.strip() == str([kills.plan(n, 3) for n in (2, 10, 37)])
    assert kills.plan(10, 3) != kills.plan(10, 4)
    assert [len(kills.plan(n, 3)) for n in (1, 2, 37)] == [1, 2, 37]


# --- what is noted -----------------------------------------------------------------------------------

PLANNED = kills.plan(28, 5)
VALUES = {"killed": "everything", "at": "training", "step": "4", "half_written": True, "seconds": 1.5, "interrupted": 1}


def add(noted: Rows, kill: Kill) -> None:
    noted.add(aim=kill.aim, **VALUES)


def test_a_row_is_in_the_file_at_once_and_says_what_followed(tmp_path: Path) -> None:
    file = tmp_path / "kills.csv"
    noted = Rows(file, PLANNED, "exact", 5)
    for number, kill in enumerate(PLANNED[:3], start=1):
        add(noted, kill)
        assert [row.followed for row in rows.read(file)] == [""] * number
    noted.settle(EQUAL)
    add(noted, PLANNED[3])
    noted.settle("not as undisturbed: a")
    read = rows.read(file)
    assert read == noted.rows
    assert [(row.kill, row.study, row.followed) for row in read] == [
        *((number, 1, EQUAL) for number in (1, 2, 3)),
        (4, 2, "not as undisturbed: a"),
    ]
    assert (read[0].half_written, read[0].seconds, read[0].interrupted) == (True, 1.5, 1)
    assert all(row.commit and row.hardware and (row.engine, row.seed) == ("exact", 5) for row in read)


def test_the_script_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """After the last study that was compared; a row that was cut in the middle is none."""
    file = tmp_path / "kills.csv"
    noted = Rows(file, PLANNED, "exact", 5)
    for kill in PLANNED[:4]:
        add(noted, kill)
    noted.settle(EQUAL)
    for kill in PLANNED[4:6]:
        add(noted, kill)
    with file.open("a") as opened:
        opened.write("7,2,check")
    again = Rows(file, PLANNED, "exact", 5)
    assert [row.kill for row in again.rows] == [1, 2, 3, 4] and again.finished == 1 and again.seconds == 1.5
    assert rows.read(file) == again.rows
    add(again, PLANNED[4])
    assert (again.rows[-1].kill, again.rows[-1].study) == (5, 2)


def test_rows_of_another_engine_stay_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kills.csv"
    for engine, seed in (("exact", 5), ("vllm", 5)):
        noted = Rows(file, PLANNED, engine, seed)
        assert noted.rows == []
        add(noted, PLANNED[0])
        noted.settle(EQUAL)
    assert [row.engine for row in rows.read(file)] == ["exact", "vllm"]


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "kills.csv"
    noted = Rows(file, PLANNED, "exact", 5)
    add(noted, PLANNED[1])
    noted.settle(EQUAL)
    with pytest.raises(SystemExit, match=r"kill 1 is not that of the plan with seed 5; name another file$"):
        Rows(file, PLANNED, "exact", 5)
    file.write_text("kill,study\n1,1\n")
    with pytest.raises(SystemExit, match=r"its columns are not those of kills: kill, study, aim"):
        Rows(file, PLANNED, "exact", 5)


def make_row(**values: object) -> Struck:
    common = {"half_written": False, "seconds": 60.0, "interrupted": 0, "followed": EQUAL, "step": "", "at": ""}
    who = {"kill": 1, "study": 1, "commit": "c0ffee", "engine": "exact", "seed": 0, "hardware": "2 x CPU"}
    return Struck(**common | who | values)  # type: ignore[arg-type]


def test_the_table_counts_every_kill() -> None:
    struck = [
        make_row(aim="training", killed="everything", interrupted=2),
        make_row(aim="training", killed="train budget seed0", half_written=True),
        make_row(aim="training", killed="Snakemake", engine="vllm", followed="not as undisturbed: a", interrupted=1),
        make_row(aim=TWO_JOBS, killed="train budget seed0 + train difficulty seed0"),
        make_row(aim=STARTS, killed="Snakemake", followed=""),
    ]
    assert chaos_tables.table(struck).splitlines()[2:] == [
        f"| {STARTS} | exact | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 of 0 |",
        "| training | exact | 2 | 1 | 0 | 1 | 0 | 1 | 2 | 2 of 2 |",
        "| training | vllm | 1 | 0 | 1 | 0 | 0 | 0 | 0 | 0 of 1 |",
        f"| {TWO_JOBS} | exact | 1 | 0 | 0 | 0 | 1 | 0 | 0 | 1 of 1 |",
        "| all | | 5 | 1 | 2 | 1 | 1 | 1 | 2 | 3 of 4 |",
    ]
    assert chaos_tables.engines_table(struck).splitlines()[2:] == [
        "| exact | 4 | 1 | 1 | 2 | 3 of 3 |",
        "| vllm | 1 | 1 | 0 | 0 | 0 of 1 |",
    ]


# --- what is published -------------------------------------------------------------------------------


def test_the_page_has_the_tables_of_the_published_files() -> None:
    """Where it fails: `make pages`."""
    page = chaos_tables.PAGE
    assert filled(page, chaos_tables.tables(ROOT / "docs/results")) == page.read_text(encoding="utf-8")


def test_each_fault_was_planted_and_caught_within_ten_kills() -> None:
    """In the published run, or by its test; and the study without a fault passed all ten."""
    with (ROOT / "docs/results/planted.csv").open(newline="", encoding="utf-8") as file:
        found = list(csv.DictReader(file))
    names = list(slips.SLIPS)
    assert [row["fault"] for row in found] == [*names, planted.NONE, *faults.FAULTS]
    for name, row in zip(names, found, strict=False):
        assert slips.SLIPS[name].test.endswith(f"/{row['caught_by']}") and row["caught_by"]
    found = found[len(names) :]
    assert (found[0]["caught_by"], int(found[0]["kills"])) == ("", planted.KILLS)
    assert all(row["caught_by"] and 0 < int(row["kills"]) <= planted.KILLS for row in found[1:])


# --- what is planted ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the package with all faults."""
    package = tmp_path_factory.mktemp("planted") / "tailrl"
    shutil.copytree(ROOT / "workflow" / "tailrl", package, ignore=shutil.ignore_patterns("__pycache__"))
    faults.plant(package)
    return package


@pytest.mark.parametrize("name", slips.SLIPS)
def test_a_fault_that_a_test_must_catch_can_be_planted(name: str) -> None:
    slip = slips.SLIPS[name]
    text = (ROOT / "workflow" / "tailrl" / slip.file).read_text(encoding="utf-8")
    if slip.file.endswith(".py"):
        ast.parse(slips.planted(name, text))
    file, _, test = slip.test.partition("[")[0].partition("::")
    assert f"def {test}(" in (ROOT / file).read_text(encoding="utf-8")
    with pytest.raises(ValueError, match=r" has 0 times the text "):
        slips.planted(name, text.replace(slip.old, ""))


@pytest.mark.slow
def test_a_fault_fails_its_test(tmp_path: Path) -> None:
    """All of them: `make planted`."""
    name = "two spellings of an answer are two answers"
    assert list(slips.caught(tmp_path, [name])) == [(name, True)]


@pytest.mark.parametrize("name", faults.FAULTS)
def test_a_fault_is_in_the_copy_and_off(package: Path, name: str) -> None:
    """The old line is still there once, for where the fault is off; and the package knows nothing of it."""
    for edit in faults.FAULTS[name]:
        text = (package / edit.file).read_text(encoding="utf-8")
        ast.parse(text)
        assert f'.get("{faults.SWITCH}") == "{name}":' in text
        assert [line.strip() for line in text.splitlines()].count(edit.old) == 1
        assert faults.SWITCH not in (ROOT / "workflow" / "tailrl" / edit.file).read_text(encoding="utf-8")


def test_a_fault_whose_line_is_gone_is_refused(package: Path) -> None:
    file = package / "training" / "optimizer.py"
    file.write_text(file.read_text(encoding="utf-8").replace("optimizer.step()", "optimizer.step( )"), encoding="utf-8")
    with pytest.raises(ValueError, match=r"training/optimizer.py has 0 times the line 'optimizer.step\(\)'"):
        faults.plant(package)


def test_a_sentence_names_no_run() -> None:
    """Which run was struck first is chance."""
    files = (
        "list of files, train/budget/seed0/manifest.json (outputs, inputs), train/budget/seed0/metrics.jsonl, a/b.npz"
    )
    said = f"not as undisturbed: {files}"
    assert planted.shortened(said) == "not as undisturbed: b.npz, list of files, manifest.json, metrics.jsonl"
    said = "train/budget/seed0: went on from step 4, though it had a state of step 6\nmore"
    assert planted.shortened(said) == "a run: went on from an older state than its newest"


NAMED = (
    "no moment is restored",
    "the saved weights are one step old",
    "the engine keeps the base policy's weights",
    "the stale engine gets fresh weights",
    "the kept tokens are another run's",
)


@pytest.mark.long
def test_planted_faults_are_caught(tmp_path: Path) -> None:
    """All faults: `make planted`."""
    found = list(planted.run_faults(tmp_path, [planted.NONE, *NAMED], planted.SEED))
    assert [(row.fault, bool(row.caught_by)) for row in found] == [(planted.NONE, False), *((n, True) for n in NAMED)]
    assert all(row.kills <= planted.KILLS for row in found)
