"""The examples of docs/studies.md, as they stand there."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from study_fixture import copy_workflow

from tailrl.config.load import merged, parse_study, read_config, read_study

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/studies.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def test_the_arm_and_the_ablation_go_into_a_study() -> None:
    arm, ablation, _ = map(yaml.safe_load, blocks("yaml"))
    before = parse_study(read_config(ROOT / "config.yaml"))
    study = parse_study(merged(read_config(ROOT / "config.yaml"), arm, ablation))
    assert study.arms.keys() - before.arms.keys() == {"top_k_mis"}
    run = study.run("top_k_mis")
    assert (run.vocabulary.k, run.correction.limit, run.training.learning_rate) == (20, 3.0, 2e-4)
    assert list(study.ablation_arms("threshold")) == [
        *("dvp_mis+threshold=1.5", "dvp_mis", "dvp_mis+threshold=3.0", "dvp_mis+threshold=8.0"),
        *("top_k_mis+threshold=1.5", "top_k_mis+threshold=2.0", "top_k_mis", "top_k_mis+threshold=8.0"),
    ]


def test_the_study_that_extends_another(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "studies/shared", tmp_path / "shared")
    *_, study = blocks("yaml")
    (tmp_path / "cooler.yaml").write_text(study, encoding="utf-8")
    cooler, temperature = read_study(tmp_path / "cooler.yaml"), read_study(ROOT / "studies/ablate_temperature.yaml")
    assert (cooler.name, cooler.seeds, cooler.training.temperature) == ("cooler", (200, 201), 0.7)
    assert cooler.training == temperature.training.model_copy(update={"temperature": 0.7})
    assert (cooler.arms, cooler.policy, cooler.task) == (temperature.arms, temperature.policy, temperature.task)


def test_the_task_and_the_remedy_work_where_they_are_added(tmp_path: Path) -> None:
    copy = copy_workflow(tmp_path)
    for patch in blocks("diff"):
        (tmp_path / "patch").write_text(patch, encoding="utf-8")
        applied = subprocess.run(["git", "apply", "patch"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert applied.returncode == 0, applied.stderr
    script = """
import json, torch
from tailrl.objective.corrections import correct
from tailrl.config.load import parse_study
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
arms = {"root": {"correction": {"sequence": "root", "sequence_threshold": 2.0}}}
study = parse_study({"name": "s", "arms": arms, "task": {"name": "backwards", "words": 4, "problems": 50}})
problems = load_task(study.task).problems
delta_T = torch.tensor([0.3, 0.5, 3.0])
inside_T, sequence_T = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
weights = correct(delta_T, inside_T, sequence_T, 2, study.run("root").correction, 0 * delta_T)
print(json.dumps({
    "prompt": problems[0].prompt.split(), "answer": problems[0].answer.split(),
    "scores": [score(p.solution, p.answer, p.compared) for p in problems],
    "weights": weights.used_N.tolist(), "ratio": study.run("root").correction.ratio,
}))
"""
    ended = copy.run(sys.executable, "-c", script)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["prompt"]) == 4 and found["answer"] == found["prompt"][::-1]
    assert found["scores"] == [1.0] * 50
    assert found["weights"] == [pytest.approx(math.exp(0.4)), 2.0] and found["ratio"]
    # As the page says: a study of it, described by the schema, whose problems Snakemake makes, for a run to train on.
    schema = copy.run("tailrl", "schema")
    (tmp_path / "workflow/schemas/study.schema.json").write_text(schema.stdout, encoding="utf-8")
    study = copy.write_study({"name": "back", "task": {"name": "backwards", "words": 4, "problems": 50}})
    problems = "results/back/data/train.jsonl"
    ended = copy.run("snakemake", "--cores", "1", problems, "--configfile", study)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made = [json.loads(line) for line in (tmp_path / problems).read_text(encoding="utf-8").splitlines()]
    assert len(made) == 50 and all(one["answer"].split()[::-1] == one["prompt"].split() for one in made)


def test_the_table_of_ablations_is_that_of_the_files() -> None:
    """Every target, and how many runs it plans."""
    rows = dict(re.findall(r"^\| `(ablate_\w+)` \|.*\| (\d+) \| (?:≈ )?\d+ \|$", PAGE, re.MULTILINE))
    runs: dict[str, int] = {}
    for path in sorted((ROOT / "studies").glob("ablate_*.yaml")):
        study = read_study(path)
        family = re.sub(r"^(ablate_(?:length|domain))_.*", r"\1", study.name)
        runs[family] = runs.get(family, 0) + len(study.all_arms()) * len(study.seeds)
    assert {name: int(count) for name, count in rows.items()} == runs
