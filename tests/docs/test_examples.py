"""The examples of the pages, as they stand there."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pages_fixture
import pytest
from pages_fixture import DOCS, PAGES, blocks
from study_fixture import ROOT, Workflow, copy_workflow

from tailrl.config.load import merged, parse_study, read_config, read_study
from tailrl.config.study import Study
from tailrl.config.tasks.dapo_math import DapoMathTask
from tailrl.tasks.registry import load_task

ADD, REPRODUCE, TASK = "tutorials/add-an-arm.md", "tutorials/reproduce.md", "how-to/your-task.md"
OWN_CODE = ROOT / "examples/own_code"
PATCHES = [OWN_CODE / "backwards.patch", OWN_CODE / "root.patch"]


def default_with(*pages: str) -> Study:
    """config.yaml with what these pages add to it."""
    added = [block for page in pages for block in pages_fixture.additions(page)]
    return parse_study(merged(read_config(ROOT / "config.yaml"), *added))


# --- pieces of a study ---------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [page for page in PAGES if pages_fixture.additions(page)])
def test_what_goes_into_a_study_is_one(page: str) -> None:
    """Each arm and each ablation of these blocks is there, and none has a misspelt key."""
    study = default_with(ADD, page)
    for block in pages_fixture.additions(page):
        assert block.keys() <= {"arms", "ablations"}
        assert block.get("arms", {}).keys() <= study.arms.keys()
        assert block.get("ablations", {}).keys() <= study.ablations.keys()


def test_the_arm_and_the_ablation_do_what_the_page_says() -> None:
    study, before = default_with(ADD), parse_study(read_config(ROOT / "config.yaml"))
    assert study.arms.keys() - before.arms.keys() == {"top_k_mis", "noisy", "control", "verified", "plain"}
    run = study.run("top_k_mis")
    assert (run.vocabulary.k, run.correction.limit, run.training.learning_rate) == (20, 3.0, 2e-4)
    assert list(study.ablation_arms("threshold")) == [
        *("dvp_mis+threshold=1.5", "dvp_mis", "dvp_mis+threshold=3.0", "dvp_mis+threshold=8.0"),
        *("top_k_mis+threshold=1.5", "top_k_mis+threshold=2.0", "top_k_mis", "top_k_mis+threshold=8.0"),
    ]


@pytest.mark.parametrize("page", [page for page in PAGES if pages_fixture.studies(page) and page != TASK])
def test_a_study_that_a_page_writes_can_be_read(page: str, tmp_path: Path) -> None:
    copy = copy_workflow(tmp_path)
    pages_fixture.write_studies(tmp_path, page)
    for name in pages_fixture.studies(page):
        assert read_study(copy.folder / name).name == Path(name).stem


def test_the_study_that_extends_another(tmp_path: Path) -> None:
    copy_workflow(tmp_path)
    pages_fixture.write_studies(tmp_path, ADD)
    cooler = read_study(tmp_path / "studies/cooler.yaml")
    temperature = read_study(ROOT / "studies/ablate_temperature.yaml")
    assert (cooler.name, cooler.seeds, cooler.training.temperature) == ("cooler", (200, 201), 0.7)
    assert cooler.training == temperature.training.model_copy(update={"temperature": 0.7})
    assert (cooler.arms, cooler.policy, cooler.task) == (temperature.arms, temperature.policy, temperature.task)


def test_a_line_of_problems_can_be_read(tmp_path: Path) -> None:
    [line] = blocks("how-to/your-data.md", "json")
    (tmp_path / "mine.jsonl").write_text(line, encoding="utf-8")
    [problem] = load_task(DapoMathTask(name="dapo_math", path=str(tmp_path / "mine.jsonl"))).problems
    assert "What is 3 + 4?" in problem.prompt and problem.answer == "7"


# --- code ----------------------------------------------------------------------------------------------


def with_the_task_and_the_remedy(folder: Path) -> Workflow:
    """A copy of the workflow with what the page adds to it."""
    copy = copy_workflow(folder)
    for patch in PATCHES:
        applied = subprocess.run(["git", "apply", patch], cwd=folder, capture_output=True, text=True, check=False)
        assert applied.returncode == 0, applied.stderr
    pages_fixture.write_studies(folder, TASK)
    [mine] = blocks(TASK, "python")
    (folder / "mine.py").write_text(mine, encoding="utf-8")
    shutil.copy(OWN_CODE / "engine.py", folder)
    return copy


@pytest.mark.slow
def test_the_task_and_the_remedy_can_be_added(tmp_path: Path) -> None:
    """The patches fit, and the study of the page is planned with what they add."""
    copy = with_the_task_and_the_remedy(tmp_path)
    assert "base policy" in copy.plan(study="studies/back.yaml")
    assert "train root, seed 0" in " ".join(copy.plan(study="studies/mine.yaml"))


@pytest.mark.long
def test_code_of_ones_own_is_trained_from_its_import_path(tmp_path: Path) -> None:
    """An edit of it makes the runs that name it due."""
    copy = with_the_task_and_the_remedy(tmp_path)
    study = tmp_path / "studies/mine.yaml"
    small = "training: {steps: 2, prompts: 4, group_size: 4, max_new_tokens: 8}\nseeds: [0]\n"
    study.write_text(study.read_text(encoding="utf-8").replace("training: {steps: 20}\n", small), encoding="utf-8")
    done = copy.run("snakemake", "--cores", "2", "--configfile", "studies/mine.yaml")
    assert done.returncode == 0, done.stderr
    assert copy.plan(study="studies/mine.yaml") == []
    with (tmp_path / "mine.py").open("a", encoding="utf-8") as file:
        file.write("# Edited.\n")
    due = " ".join(copy.plan(study="studies/mine.yaml"))
    assert "root" in due


@pytest.mark.long  # the test above
def test_the_task_and_the_remedy_work_where_they_are_added(tmp_path: Path) -> None:
    copy = with_the_task_and_the_remedy(tmp_path)
    script = """
import json, torch
from tailrl.objective.corrections import correct
from tailrl.config.load import parse_study, read_study
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
arms = {"root": {"correction": {"sequence": "root", "sequence_threshold": 2.0}}}
study = parse_study({"name": "s", "arms": arms, "task": {"name": "backwards", "words": 4, "problems": 50}})
problems = load_task(study.task).problems
delta_T = torch.tensor([0.3, 0.5, 3.0])
inside_T, sequence_T = torch.zeros(3, dtype=torch.bool), torch.tensor([0, 0, 1])
weights = correct(delta_T, inside_T, sequence_T, 2, study.run("root").correction, 0 * delta_T)
written = read_study("studies/back.yaml")
print(json.dumps({
    "prompt": problems[0].prompt.split(), "answer": problems[0].answer.split(),
    "scores": [score(p.solution, p.answer, p.compared) for p in problems],
    "weights": weights.used_N.tolist(), "ratio": study.run("root").correction.ratio,
    "tasks": [task.name for task in (written.task, written.evaluation.task, *written.policy.warm_start.stages)],
}))
"""
    ended = copy.run(sys.executable, "-c", script)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert len(found["prompt"]) == 4 and found["answer"] == found["prompt"][::-1]
    assert found["scores"] == [1.0] * 50
    assert found["weights"] == [pytest.approx(math.exp(0.4)), 2.0] and found["ratio"]
    assert found["tasks"] == ["backwards"] * 3
    # As the page says: a study of it, described by the schema, whose problems Snakemake makes, for a run to train on.
    schema = copy.run("tailrl", "schema")
    (tmp_path / "workflow/schemas/study.schema.json").write_text(schema.stdout, encoding="utf-8")
    problems = "results/back/data/train.jsonl"
    ended = copy.run("snakemake", "--cores", "1", problems, "--configfile", "studies/back.yaml")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    made = [json.loads(line) for line in (tmp_path / problems).read_text(encoding="utf-8").splitlines()]
    assert len(made) == 4096 and all(one["answer"].split()[::-1] == one["prompt"].split() for one in made)


# --- tables --------------------------------------------------------------------------------------------


def rows(page: str, first: str) -> dict[str, list[str]]:
    """The rows of a page's table whose first column has this heading, by the name in that column."""
    text = (DOCS / page).read_text(encoding="utf-8")
    [table] = re.findall(rf"^\| {first} \|.*\n(?:\|.*\n)+", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[2:]]
    return {row[0].strip("| `"): row[1:] for row in cells}


def test_the_table_of_arms_is_that_of_the_default_study() -> None:
    study, found = read_study(ROOT / "config.yaml"), rows(REPRODUCE, "Arm")
    assert list(found) == list(study.arms)
    for name, (_, sampled, _) in found.items():
        floor = study.run(name).disturbance.floor
        assert not floor or sampled.startswith(("as ", "the same; ", f"the same, with {100 * floor:g} %")), name


def test_the_table_of_studies_counts_their_runs() -> None:
    """Of all parts and ablations; none of a study that trains nothing."""
    text = (ROOT / "studies/README.md").read_text(encoding="utf-8")
    listed = dict(re.findall(r"^\| \[`([\w/]+)`\]\(.*?\) \| [^|]* \| (\d*) +\|", text, re.MULTILINE))
    assert len(listed) > 35
    for name, runs in listed.items():
        parts = read_study(ROOT / f"studies/{name}.yaml").each().values()
        counted = [len(seeds) for part in parts if "report" in part.pages for seeds in part.arm_seeds().values()]
        assert int(runs or 0) == sum(counted), name
