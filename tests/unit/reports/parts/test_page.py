"""The pages, tables and figures over parts, from the tables of finished ones."""

from collections.abc import Callable
from pathlib import Path

import pytest
from parts_fixture import IN_PARTS, POOLS

from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.config.pooled import Pool
from tailrl.reports.parts.page import write_pooled
from tailrl.runtime.errors import StudyError

LIFTS = {"exact": 0.3, "floor_naive": 0.0, "floor_dvp": 0.25, "floor_control": 0.1}
CAUSES = ("base", "exact", "int8", "int8_control", "noise_int8", "noise_int8_control")
RESPONSES = ("tokens", "delta_abs", "delta_sd", "sample_size")


def remedies(folder: Path, start: float, lifts: dict[str, float]) -> Path:
    """policies.csv of a part, with a base policy and two seeds of each arm."""
    rows = [{"arm": "base", "seed": 0, "avg_mean": start}]
    rows += [{"arm": arm, "seed": seed, "avg_mean": start + lift + 0.01 * seed} for arm, lift in lifts.items()
             for seed in (0, 1)]  # fmt: skip
    write_csv(folder / "policies.csv", rows)
    return folder


def causes(folder: Path, lost: float) -> Path:
    scores = {"int8": 0.8 - lost, "noise_int8": 0.8 - 2 * lost}
    rows = [{"arm": arm, "seed": seed, "avg_mean": scores.get(arm, 0.8)} for arm in CAUSES for seed in range(2)]
    write_csv(folder / "policies.csv", rows)
    sizes = {"int8": 7e-5, "noise_int8": 8e-5}
    write_csv(folder / "first_k3.csv", [row | {"k3": sizes.get(str(row["arm"]), 0.0)} for row in rows])
    return folder


def length(folder: Path, tokens: float, harm: float) -> Path:
    scores = {"exact": 0.8, "naive": 0.8, "fp8": 0.8 - harm, "fp8_control": 0.8, "fp8_dvp": 0.75}
    rows = [{"arm": arm, "seed": seed, "avg_mean": score + 0.01 * (seed % 3)} for arm, score in scores.items()
            for seed in range(310, 316 if arm in ("fp8", "fp8_control") else 313)]  # fmt: skip
    write_csv(folder / "policies.csv", rows)
    sizes = {"tokens": tokens, "delta_abs": 0.1 * tokens**0.5, "delta_sd": 0.2, "sample_size": 0.5}
    write_csv(folder / "responses.csv", [row | sizes | {"delta_abs": sizes["delta_abs"] * (1 + 0.01 * int(row["seed"]))}
                                         for row in rows])  # fmt: skip
    return folder


def text_of(out: Path) -> str:
    return (out / "pooled.md").read_text(encoding="utf-8")


def test_two_parts(tmp_path: Path) -> None:
    """One in a results folder, the other published."""
    first = remedies(tmp_path / "results/remedies_k3/1/tables", 0.4, LIFTS)
    second = remedies(tmp_path / "docs/results/remedies_k3/2", 0.5, LIFTS | {"floor_dvp": 0.27})
    write_pooled(IN_PARTS["remedies_k3"], [first, second], tmp_path / "out")
    text = text_of(tmp_path / "out")
    assert text.startswith("# Remedies at one cause after another, over 2 warm starts\n\nFrom parts 1, 2. ")
    assert "9, 10. Comparisons that need them are missing." in text
    assert "one warm start" not in text
    assert "| floor_dvp | floor_naive | +26.0 [+13.3, +38.7] | 0.024 | +25.0 to +27.0 |" in text
    assert "| floor_dvp | floor_control | +16.0 [" in text
    assert "| floor_dvp | 71.5 % [" in text
    naive, control, exact, *_ = read_csv(tmp_path / "out/comparisons.csv")
    assert [row["minus"] for row in (naive, control, exact)] == ["floor_naive", "floor_control", "exact"]
    assert (naive["family"], naive["arm"], naive["difference_n"]) == ("floor, minus naive", "floor_dvp", "2")
    assert float(naive["difference_mean"]) == pytest.approx(0.26)
    assert [row["arm"] for row in read_csv(tmp_path / "out/measures.csv")] == ["base", *LIFTS]


def test_one_part_says_that_it_is_one(tmp_path: Path) -> None:
    write_pooled(IN_PARTS["remedies_k3"], [remedies(tmp_path / "remedies_k3/1", 0.4, LIFTS)], tmp_path / "out")
    assert "This is one warm start." in text_of(tmp_path / "out")
    assert read_csv(tmp_path / "out/comparisons.csv")[0]["difference_p"] == ""


def test_harm_has_a_row_an_arm_and_a_figure(tmp_path: Path) -> None:
    folders = [causes(tmp_path / f"causes/{n}/tables", lost) for n, lost in ((1, 0.01), (2, 0.02), (3, 0.03))]
    write_pooled(IN_PARTS["causes"], folders, tmp_path)
    page = text_of(tmp_path)
    assert "over 3 warm starts" in page and "From parts 1, 2, 3. Not finished: 4, 5." in page
    assert "| int8 | int8_control | -2.0 [-4.5, +0.5] | 0.148 |" in page
    assert "| noise_int8 | noise_int8_control | -4.0 [-9.0, +1.0] |" in page
    assert "| noise_int8 | noise_int8_control + int8 - int8_control | -2.0 [-4.5, +0.5] |" in page
    assert "| int8 | 78.0 % [75.5, 80.5] | 7e-05 [7e-05, 7e-05] |" in page
    assert "A line counts where k3 of the first ten steps, nats of both is within a factor of 2." in page
    rows = read_csv(tmp_path / "comparisons.csv")
    assert [row["arm"] for row in rows] == ["int8", "noise_int8", "noise_int8"]
    assert "<svg" in (tmp_path / "pooled.svg").read_text(encoding="utf-8")


def test_a_cause_whose_k3_is_another_is_not_compared(tmp_path: Path) -> None:
    folder = causes(tmp_path / "causes/1", 0.02)
    path = folder / "first_k3.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("8e-05", "3e-04"), encoding="utf-8")
    write_pooled(IN_PARTS["causes"], [folder], tmp_path)
    assert "| noise_int8_control + int8 - int8_control | the measures differ |  |  |" in text_of(tmp_path)
    assert [row["counts"] for row in read_csv(tmp_path / "comparisons.csv")] == ["True", "True", "False"]


def test_growth_over_lengths(tmp_path: Path) -> None:
    sizes = {"long/030": (32, 0.01), "long/150": (149, 0.05), "long/500": (500, 0.2)}
    folders = [length(tmp_path / name / "tables", *size) for name, size in sizes.items()]
    write_pooled(IN_PARTS["long"], folders, tmp_path)
    page = text_of(tmp_path)
    assert "From parts 030, 150, 500. Not finished: 060, 300. Comparisons that need them are missing." in page
    assert "| fp8 | 500 | fp8_control | -20.0 [" in page
    assert "| fp8 | 500 - 030 | fp8_control | -19.0 [" in page
    assert "| \\|Δ_y\\|, nats | tokens of a response | fp8 | 0.5 [0.5, 0.5] | 6 |" in page
    assert "## effective sample size\n\n| arm | 030 | 150 | 500 |" in page
    (slope,) = read_csv(tmp_path / "slopes.csv")
    assert float(slope["slope_mean"]) == pytest.approx(0.5) and slope["parts"] == "3"
    assert (tmp_path / "pooled.svg").read_text(encoding="utf-8").count("tokens of a response") >= 3


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("remedies_k3", lambda folder: remedies(folder, 0.4, LIFTS)),
        ("causes", lambda folder: causes(folder, 0.01)),
        ("long", lambda folder: length(folder, 30, 0.01)),
    ],
)
def test_the_files_are_those_that_are_promised_and_the_same_each_time(
    tmp_path: Path, name: str, make: Callable[[Path], Path]
) -> None:
    folder = make(tmp_path / next(iter(IN_PARTS[name].parts)))
    for out in ("one", "other"):
        write_pooled(IN_PARTS[name], [folder], tmp_path / out)
    assert {file.name for file in (tmp_path / "one").iterdir()} == set(POOLS[name].outputs)
    for file in (tmp_path / "one").iterdir():
        assert (tmp_path / "other" / file.name).read_bytes() == file.read_bytes()


def test_a_trial_is_no_part(tmp_path: Path) -> None:
    whole, trial = (remedies(tmp_path / f"remedies_k3/{n}", 0.4, LIFTS) for n in (1, 2))
    lines = (trial / "policies.csv").read_text(encoding="utf-8").splitlines()
    (trial / "policies.csv").write_text("\n".join(lines[:-1]), encoding="utf-8")
    with pytest.raises(StudyError, match=r"remedies_k3/1: floor_control has 2 seeds, but 1 in .*2: was one a trial\?$"):
        write_pooled(IN_PARTS["remedies_k3"], [whole, trial], tmp_path / "out")


def test_no_part_another_study_and_a_table_that_is_none(tmp_path: Path) -> None:
    for name in IN_PARTS:
        with pytest.raises(StudyError, match=r"^no part is finished: "):
            write_pooled(IN_PARTS[name], [], tmp_path)
    folder = remedies(tmp_path / "remedies_k3/1", 0.4, LIFTS)
    with pytest.raises(StudyError, match=r"remedies_k3/9: 9 is no part of this study$"):
        write_pooled(IN_PARTS["causes"], [remedies(tmp_path / "remedies_k3/9", 0.4, LIFTS)], tmp_path)
    path = folder / "policies.csv"
    path.write_text(path.read_text(encoding="utf-8").replace("0.4", "x"), encoding="utf-8")
    with pytest.raises(StudyError, match=r"policies\.csv: a line's seed or avg_mean is not a number"):
        write_pooled(IN_PARTS["remedies_k3"], [folder], tmp_path)
    other = causes(tmp_path / "causes/1", 0.01)
    write_csv(other / "first_k3.csv", [{"arm": "int8", "seed": 0, "k3": "much"}])
    with pytest.raises(StudyError, match=r"first_k3\.csv: a line's seed or k3 is not a number"):
        write_pooled(IN_PARTS["causes"], [other], tmp_path)


def test_a_family_of_greedy_scores_and_one_against_the_untrained_policy(tmp_path: Path) -> None:
    """Greedy scores have signs of their own; differences are paired within a part."""
    contrast = {"arms": ["floor_*"], "without": ["floor_naive"], "minus": "floor_naive"}
    pool = Pool.model_validate(
        {
            "title": "Skill",
            "measures": {"greedy score": {"table": "policies.csv", "column": "greedy"}},
            "families": {
                "greedy": {"measure": "greedy score", "margins": {"*_dvp": 0.02}, "of": [contrast]},
                "sampled": {"of": [contrast]},
                "gain": {"measure": "greedy score", "of": [{"arms": ["exact"], "minus": "base"}]},
            },
        }
    )
    folders = []
    for number, untrained in ((1, 0.4), (2, 0.5)):
        folder = remedies(tmp_path / str(number), untrained, LIFTS)
        rows = [row | {"greedy": 1.0 - float(row["avg_mean"])} for row in read_csv(folder / "policies.csv")]
        write_csv(folder / "policies.csv", rows)
        folders.append(folder)
    study = IN_PARTS["remedies_k3"].model_copy(update={"pooled": pool})
    write_pooled(study, folders, tmp_path)
    rows = {
        (row["family"], row["arm"]): float(row["difference_mean"]) for row in read_csv(tmp_path / "comparisons.csv")
    }
    assert rows["sampled", "floor_dvp"] == pytest.approx(0.25)
    assert rows["greedy", "floor_dvp"] == pytest.approx(-0.25)
    assert rows["gain", "exact"] == pytest.approx(-0.305)
    page = text_of(tmp_path)
    assert "Differences are in greedy score." in page and page.count("Differences are in") == 3
    assert "| exact | 75.5 % [12.0, 100.0] | 24.5 % [0.0, 88.0] |" in page
    assert "Not all parts are finished: no verdict is final." in page
    assert "| least and most | 90 % interval | margin | verdict |" in page
    assert "| -25.0 to -25.0 | -25.0 | ±2 | not decided |" in page
    (level,) = read_csv(tmp_path / "equivalence.csv")
    assert (level["arm"], level["margin"], level["difference_low"]) == ("floor_dvp", "0.02", "")


def test_a_family_in_a_measure_that_is_not_there() -> None:
    with pytest.raises(ValueError, match="there is no measure or family greedy"):
        family = {"measure": "greedy", "of": [{"arms": ["a"], "minus": "b"}]}
        Pool.model_validate({"title": "Skill", "families": {"of greedy": family}})
