"""The page of harm by cause, from the tables of parts."""

from pathlib import Path

import pytest

from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.report.study import write_harm
from tailrl.runtime.errors import StudyError

ARMS = ("base", "exact", "int8", "int8_control", "noise_int8", "noise_int8_control")


def part(folder: Path, lost: float) -> Path:
    scores = {"int8": 0.8 - lost, "noise_int8": 0.8 - 2 * lost}
    rows = [{"arm": arm, "seed": seed, "avg_mean": scores.get(arm, 0.8)} for arm in ARMS for seed in range(2)]
    write_csv(folder / "policies.csv", rows)
    sizes = {"int8": 7e-5, "noise_int8": 8e-5}
    write_csv(folder / "first_k3.csv", [row | {"k3": sizes.get(str(row["arm"]), 0.0)} for row in rows])
    return folder


def test_the_page_has_a_row_an_arm_and_a_figure(tmp_path: Path) -> None:
    folders = [part(tmp_path / f"causes_{n}" / "tables", lost) for n, lost in enumerate((0.01, 0.02, 0.03))]
    write_harm(folders, tmp_path)
    page = (tmp_path / "harm.md").read_text(encoding="utf-8")
    assert "over 3 warm starts" in page and "From causes_0, causes_1, causes_2." in page
    assert "| engine | int8 | 7e-05 | -2.0 [-4.5, +0.5] | 0.148, primary |" in page
    (noise,) = [line for line in page.splitlines() if line.startswith("| noise |")]
    assert "-4.0 [-9.0, +1.0]" in noise and "-2.0 [-4.5, +0.5]" in noise
    rows = read_csv(tmp_path / "harm.csv")
    assert [row["arm"] for row in rows] == ["int8", "noise_int8"]
    assert "<svg" in (tmp_path / "harm.svg").read_text(encoding="utf-8")


def test_no_part_and_a_broken_part_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="no part is finished: "):
        write_harm([], tmp_path)
    folder = part(tmp_path / "causes_1", 0.1)
    write_csv(folder / "policies.csv", [{"arm": "int8", "seed": 0, "avg_mean": 0.5}])
    with pytest.raises(StudyError, match="causes_1: no arm has a matched control"):
        write_harm([folder], tmp_path)
    write_csv(folder / "first_k3.csv", [{"arm": "int8", "seed": 0, "k3": "much"}])
    with pytest.raises(StudyError, match=r"first_k3\.csv: a line's k3 is not a number"):
        write_harm([folder], tmp_path)
