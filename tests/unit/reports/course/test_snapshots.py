"""Scores over training, from policies whose scores are known."""

import csv
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from artifacts_fixture import policy_of, write_scores

from tailrl.artifacts.manifest import MANIFEST, files_in, read_manifest, write_manifest
from tailrl.artifacts.results import read_results
from tailrl.config.study import Study
from tailrl.reports.course.snapshots import has_snapshots, score_points
from tailrl.reports.overview.study import write_report
from tailrl.stats.crossed import crossed_interval
from tailrl.stats.intervals import problem_interval

Make = Callable[..., tuple[Study, Path]]


def add_snapshots(study: Study, folder: Path, arm: str, seeds: tuple[int, ...], scores: dict[int, float]) -> None:
    """Of every seed a policy after each of the steps, right on a share of the samples."""
    path = folder / "eval" / f"{arm}.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    shape = [len(row["correct"]) for row in data["policies"][0]["per_problem"]]
    data["snapshots"] = []
    for seed in seeds:
        for step, share in scores.items():
            draws = [np.random.default_rng([seed, step, row]).uniform(size=size) for row, size in enumerate(shape)]
            correct = [[int(draw < share) for draw in row] for row in draws]
            data["snapshots"].append(policy_of(seed, correct, step=step))
            kept = folder / "train" / arm / f"seed{seed}" / "snapshots" / f"step-{step:08d}" / "model.safetensors"
            kept.parent.mkdir(parents=True)
            kept.write_text(f"{arm} {seed} {step}", encoding="utf-8")
    for seed in seeds:
        job = folder / "train" / arm / f"seed{seed}"
        known = read_manifest(job / MANIFEST)
        write_manifest(job / MANIFEST, files_in(job), inputs=known.inputs, steps=known.steps)
    write_scores(folder, study, arm, data["policies"], snapshots=data["snapshots"])


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_every_policy_is_a_point(make_study: Make, seeds: tuple[int, ...]) -> None:
    study, folder = make_study(seeds=list(seeds))
    add_snapshots(study, folder, "naive", seeds, {20: 0.4, 40: 0.6})
    results = read_results(study, folder, ("naive", "dvp"))
    points = score_points(results)
    assert [(p.arm, p.step, p.policies) for p in points] == [
        *(("naive", step, 1 if step == 0 else len(seeds)) for step in (0, 20, 40, 60)),
        *(("dvp", step, 1 if step == 0 else len(seeds)) for step in (0, 60)),
    ]
    assert points[0].avg == problem_interval(results.base.scores[0].correct_PK)
    last = [score.correct_PK for score in results.evaluations["naive"].scores]
    expected = problem_interval(last[0]) if len(last) == 1 else crossed_interval([c.mean(axis=1) for c in last])
    assert points[3].avg == expected
    # 120 problems, 4 samples: three standard errors of a share.
    for point, share in zip(points[1:3], (0.4, 0.6), strict=True):
        assert abs(point.avg.mean - share) < 3 * (share * (1 - share) / (480 * len(seeds))) ** 0.5
        assert point.avg.low < point.avg.mean < point.avg.high


def test_a_snapshot_at_the_last_step_is_the_last_policy(make_study: Make) -> None:
    """A stop rule can end a run at such a step: its policy counts once."""
    study, folder = make_study(seeds=[0, 1])
    add_snapshots(study, folder, "naive", (0, 1), {30: 0.5, 60: 0.5})
    points = score_points(read_results(study, folder, ("naive",)))
    assert [(p.step, p.policies) for p in points] == [(0, 1), (30, 2), (60, 2)]


@pytest.mark.slow
def test_the_report_shows_them_where_there_are_any(make_study: Make) -> None:
    made, folder = make_study(arms={"naive": {}, "mis": {"correction": {"sequence": "mis"}}}, ablations={})
    assert not has_snapshots(read_results(made, folder, made.arms))
    for arm in made.arms:
        add_snapshots(made, folder, arm, made.seeds, {30: 0.5})
    assert has_snapshots(read_results(made, folder, made.arms))
    write_report(made, folder, folder)
    with (folder / "tables" / "figure1.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["arm"], row["step"]) for row in rows[:3]] == [("naive", "0"), ("naive", "30"), ("naive", "60")]
    assert "Figure 1 of arXiv 2512.23087" in (folder / "summary.html").read_text(encoding="utf-8")
    assert "<svg" in (folder / "figures" / "figure1.svg").read_text(encoding="utf-8")
