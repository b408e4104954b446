"""README's numbers, summed anew from the published scores by seed and problem, by code of its own."""

import gzip
import re
from collections import defaultdict
from csv import DictReader
from statistics import mean, stdev

import pytest
from scipy.stats import t
from study_fixture import ROOT

Scores = dict[tuple[str, str], list[float]]
"""An arm's scores by seed and problem, of each part."""


def scores(study: str) -> dict[str, dict[str, Scores]]:
    """Of each part and measure the last policies' mean scores, by arm and seed over problems."""
    found: dict[str, dict[str, Scores]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with gzip.open(ROOT / "docs/results/tables/problems.csv.gz", "rt", encoding="utf-8") as lines:
        for row in DictReader(lines):
            whole, _, part = row["study"].partition("/")
            if whole == study and not row["step"]:
                whose = row["arm"], row["seed"]
                found[part]["temperature 1"][whose].append(int(row["correct"]) / int(row["samples"]))
                if row["greedy"]:
                    found[part]["greedy"][whose].append(float(row["greedy"]))
    return found


def over_parts(study: str, measure: str, arm: str, minus: str) -> str:
    """The mean over parts of the differences within a part, in points, with its paired t interval, as printed."""
    differences = []
    for part in scores(study).values():
        by_arm: dict[str, list[float]] = defaultdict(list)
        for (name, _), by_problem in part[measure].items():
            by_arm[name].append(mean(by_problem))
        if arm in by_arm and minus in by_arm:
            differences.append(100 * (mean(by_arm[arm]) - mean(by_arm[minus])))
    half = float(t.ppf(0.975, len(differences) - 1)) * stdev(differences) / len(differences) ** 0.5
    middle = mean(differences)
    ends = f"[{middle - half:+.1f}, {middle + half:+.1f}]"
    return f"{middle:+.1f} {ends}".replace("-", "−")


@pytest.mark.parametrize(
    ("study", "measure", "arm", "minus"),
    [
        ("remedies_k3", "temperature 1", "engine_naive", "engine_control"),
        ("remedies_k3", "temperature 1", "floor_dvp_scaled", "floor_naive"),
        ("remedies_k3", "temperature 1", "floor_mis", "floor_naive"),
        ("horizon", "temperature 1", "naive", "control"),
        ("skill", "greedy", "floor_naive", "floor_control"),
        ("skill", "temperature 1", "floor_naive", "floor_control"),
        ("skill", "greedy", "rounding_naive", "exact"),
    ],
)
def test_a_number_of_the_readme_is_that_of_the_scores(study: str, measure: str, arm: str, minus: str) -> None:
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert over_parts(study, measure, arm, minus) in readme
