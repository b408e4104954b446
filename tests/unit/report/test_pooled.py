"""The page and the tables of the pooled remedies, from the tables of finished parts."""

from pathlib import Path

import pytest

from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.report.pooled import write_pooled
from tailrl.runtime.errors import StudyError

LIFTS = {"exact": 0.3, "floor_naive": 0.0, "floor_dvp": 0.25, "floor_control": 0.1}


def part(folder: Path, start: float, lifts: dict[str, float]) -> Path:
    """policies.csv of a part, with a base policy and two seeds of each arm."""
    rows = [{"arm": "base", "seed": 0, "avg_mean": start}]
    rows += [{"arm": arm, "seed": seed, "avg_mean": start + lift + 0.01 * seed} for arm, lift in lifts.items()
             for seed in (0, 1)]  # fmt: skip
    write_csv(folder / "policies.csv", rows)
    return folder


def test_two_parts(tmp_path: Path) -> None:
    """One in a results folder, the other published."""
    first = part(tmp_path / "results/remedies_k3_1/tables", 0.4, LIFTS)
    second = part(tmp_path / "docs/results/remedies_k3_2", 0.5, LIFTS | {"floor_dvp": 0.27})
    write_pooled([first, second], tmp_path / "out")
    text = (tmp_path / "out/pooled.md").read_text(encoding="utf-8")
    assert text.startswith("# Remedies over 2 warm starts\n\nFrom remedies_k3_1, remedies_k3_2. ")
    assert "one warm start" not in text
    assert "| dvp | +26.0 [+13.3, +38.7] | 0.024 | +16.0 [" in text
    assert "| floor_dvp | 71.5 % [" in text and "| 2 | 4 |\n" in text
    naive, control, exact = read_csv(tmp_path / "out/differences.csv")
    assert [row["less"] for row in (naive, control, exact)] == ["naive", "control", "exact"]
    assert (naive["cause"], naive["remedy"], naive["difference_n"]) == ("floor", "dvp", "2")
    assert float(naive["difference_mean"]) == pytest.approx(0.26)
    assert [row["arm"] for row in read_csv(tmp_path / "out/scores.csv")] == ["base", *LIFTS]


def test_one_part_says_that_it_is_one(tmp_path: Path) -> None:
    write_pooled([part(tmp_path / "remedies_k3_1", 0.4, LIFTS)], tmp_path / "out")
    text = (tmp_path / "out/pooled.md").read_text(encoding="utf-8")
    assert "This is one warm start." in text and "p, Holm" not in text
    assert read_csv(tmp_path / "out/differences.csv")[0]["difference_p"] == ""


def test_a_trial_is_no_part(tmp_path: Path) -> None:
    whole, trial = (part(tmp_path / f"remedies_k3_{n}", 0.4, LIFTS) for n in (1, 2))
    lines = (trial / "policies.csv").read_text(encoding="utf-8").splitlines()
    (trial / "policies.csv").write_text("\n".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(StudyError, match=r"remedies_k3_1: floor_control has 2 seeds, but 1 in .*2: was one a trial\?$"):
        write_pooled([whole, trial], tmp_path / "out")


def test_no_part_and_a_table_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"^no part is finished: "):
        write_pooled([], tmp_path)
    folder = part(tmp_path / "remedies_k3_1", 0.4, LIFTS)
    path = folder / "policies.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("0.4", "x"), encoding="utf-8")
    with pytest.raises(StudyError, match=r"policies\.csv: a line's avg_mean is not a number"):
        write_pooled([folder], tmp_path)
