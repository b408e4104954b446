"""Figures of held-out scores against the files that they are made of."""

import json
from pathlib import Path

import numpy as np
import pytest
from csv_fixture import rows

from tailrl.artifacts.results import read_results
from tailrl.config.study import Study
from tailrl.reports.scores.numbers import RunScore, run_scores
from tailrl.reports.scores.page import score_by_k3_figure, write_scores


def test_each_run_is_a_row_with_its_k3_and_its_score(whole: tuple[Study, Path], tmp_path: Path) -> None:
    study, folder = whole
    write_scores(read_results(study, folder, study.arms), tmp_path)
    table = rows(tmp_path / "tables" / "score_by_k3.csv")
    assert [(row["arm"], int(row["seed"])) for row in table] == [(a, s) for a in study.arms for s in study.seeds]
    for row in table:
        job = folder / "train" / row["arm"] / f"seed{row['seed']}"
        logged = [json.loads(line)["rollout_corr_unmasked/k3_kl"] for line in (job / "metrics.jsonl").open()]
        assert float(row["k3"]) == pytest.approx(np.mean(logged), rel=1e-6)
        policies = json.loads((folder / "eval" / f"{row['arm']}.json").read_text())["policies"]
        [own] = [policy for policy in policies if policy["seed"] == int(row["seed"])]
        assert float(row["avg"]) == pytest.approx(np.mean([item["correct"] for item in own["per_problem"]]), rel=1e-6)


def test_a_run_is_a_dot_at_its_score_and_k3_in_its_arms_look(whole: tuple[Study, Path]) -> None:
    study, folder = whole
    read = read_results(study, folder, study.arms)
    runs = run_scores(read)
    unrecorded = RunScore(runs[0].arm, 99, float("nan"), 0.5)
    [ax] = score_by_k3_figure([*runs, unrecorded], read.arms, 0.25, 4).axes
    *dots, line = ax.lines
    for arm, own in zip(read.arms, dots, strict=True):
        assert [(run.avg, run.k3) for run in runs if run.arm == arm] == [*zip(*own.get_data(), strict=True)]
    assert set(line.get_xdata()) == {0.25} and len({(dot.get_color(), dot.get_marker()) for dot in dots}) == len(dots)
