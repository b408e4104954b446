"""README's numbers, summed anew from the published scores by seed and problem, by code of its own."""

import gzip
import re
from collections import defaultdict
from csv import DictReader
from statistics import mean, stdev

import numpy as np
import pytest
from scipy.stats import t
from study_fixture import ROOT

Scores = dict[tuple[str, str], list[float]]
"""An arm's scores by seed and problem, of each part."""


def scores(study: str, run: str = "") -> dict[str, dict[str, Scores]]:
    """Of each part and measure the last policies' mean scores, by arm and seed over problems; of one of the reruns."""
    found: dict[str, dict[str, Scores]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    with gzip.open(ROOT / "docs/results/tables/problems.csv.gz", "rt", encoding="utf-8") as lines:
        for row in DictReader(lines):
            whole, _, part = row["study"].partition("/")
            if whole == study and row["run"] == run and not row["step"]:
                whose = row["arm"], row["seed"]
                found[part]["temperature 1"][whose].append(int(row["correct"]) / int(row["samples"]))
                if row.get("greedy"):
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
    # A sum of floats may lie on the other side of a tie, such as 25.85.
    middle, low, high = (round(mean(differences) + end, 9) for end in (0, -half, half))
    return f"{middle:+.1f} [{low:+.1f}, {high:+.1f}]".replace("-", "−")


@pytest.mark.parametrize(
    ("study", "measure", "arm", "minus"),
    [
        ("skill", "greedy", "rounding_naive", "exact"),
        ("skill_engine", "greedy", "engine_naive", "engine_control"),
        ("horizon", "temperature 1", "naive", "control"),
        ("skill", "greedy", "floor_naive", "exact"),
        ("skill", "greedy", "floor_naive", "floor_control"),
        ("skill", "greedy", "floor_dvp", "floor_naive"),
        ("skill", "greedy", "floor_mis", "floor_naive"),
    ],
)
def test_a_number_of_the_readme_is_that_of_the_scores(study: str, measure: str, arm: str, minus: str) -> None:
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert over_parts(study, measure, arm, minus) in readme


def crossed(first: np.ndarray, second: np.ndarray) -> str:
    """The mean of one arm's scores [seeds, problems] minus that of another with the same problems, in points.

    With its interval over seeds and problems at once, by sums of squares of the two-way analysis of variance. Both
    arms answer the same problems, so the problems' error comes from the differences by problem. The interval is no
    narrower than over seeds alone.
    """
    by_problem = first.mean(0) - second.mean(0)
    of_problems, problems = by_problem.var(ddof=1) / by_problem.size, by_problem.size
    of_seeds, of_rest, terms, alone = 0.0, 0.0, [(of_problems, problems - 1)], []
    for scores in (first, second):
        seeds = len(scores)
        total = ((scores - scores.mean()) ** 2).sum()
        among_seeds = problems * ((scores.mean(1) - scores.mean()) ** 2).sum()
        among_problems = seeds * ((scores.mean(0) - scores.mean()) ** 2).sum()
        rest_degrees = (seeds - 1) * (problems - 1)
        own = among_seeds / (seeds - 1) / scores.size
        rest = (total - among_seeds - among_problems) / rest_degrees / scores.size
        of_seeds, of_rest = of_seeds + own, of_rest + rest
        terms += [(own, seeds - 1), (rest, rest_degrees)]
        alone.append((own, seeds - 1))
    whole = max(of_seeds + of_problems - of_rest, of_seeds, of_problems)
    halves = [
        t.ppf(0.975, square**2 / sum(part**2 / degrees for part, degrees in parts)) * square**0.5
        for square, parts in ((whole, terms), (of_seeds, alone))
    ]
    middle, half = 100 * by_problem.mean(), 100 * max(halves)
    return f"{middle:+.1f} [{middle - half:+.1f}, {middle + half:+.1f}]".replace("-", "−")


def greedy(arm: str, minus: str, study: str = "default", run: str = "") -> str:
    """The greedy difference of two arms of a run of the default study, as `crossed`."""
    found = scores(study, run)[""]["greedy"]
    first, second = (np.array([values for (of, _), values in found.items() if of == name]) for name in (arm, minus))
    return crossed(first, second)


def test_the_greedy_difference_of_the_readme_is_that_of_the_scores() -> None:
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert greedy("naive", "exact") in readme


@pytest.mark.parametrize("run", ["1866912", "196fad3", "7254ba4"])
@pytest.mark.parametrize(
    ("arm", "minus"), [("naive", "exact"), ("naive_stressed", "exact"), ("naive_stressed", "naive_control")]
)
def test_the_other_runs_differences_are_those_of_their_scores(run: str, arm: str, minus: str) -> None:
    page = (ROOT / "docs/results/reruns/default.md").read_text(encoding="utf-8").replace("-", "−")
    assert greedy(arm, minus, "reruns", run) in page
