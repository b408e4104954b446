"""Every command of the pages can be run: Snakemake plans it, make has it, tailrl knows it; tutorials run whole."""

import re
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest
import yaml
from pages_fixture import PAGES, additions, blocks, commands, lines_of, studies, write_studies
from study_fixture import ROOT, TINY, Workflow, copy_workflow

from tailrl.cli import commands as cli
from tailrl.config.load import merged, read_study

TUTORIALS = [
    "tutorials/reproduce.md",
    "tutorials/read-the-report.md",
    "tutorials/add-an-arm.md",
    "tutorials/from-the-paper.md",
]
"""tests/unit/integrations/trl/test_trainer.py runs that of TRL, test_diagnose.py that of a log."""
TAILRL = {command.__name__.rstrip("_") for group in cli.HELP_GROUPS.values() for command in group}
ELSEWHERE = {".", "cat", "echo", "python", "pip", "uv", "cp", "lm-eval", "export", "rsync", "tar", "torchrun", "wandb"}
LOG = re.compile(r"results/(\w+)/(?:logs/)?train/(\w+)/seed(\d+)")


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory, policy_folder: Path) -> Workflow:
    """With the studies that the pages write, and what they add to the default study."""
    copy = copy_workflow(tmp_path_factory.mktemp("pages"))
    for page in PAGES:
        if page != "how-to/your-task.md":  # of a task that is not there
            write_studies(copy.folder, page)
    (copy.folder / "config.yaml").write_text(extended(ROOT / "config.yaml"), encoding="utf-8")
    (copy.folder / "my_problems.jsonl").touch()
    (copy.folder / "my_model").symlink_to(policy_folder)
    return copy


def extended(file: Path) -> str:
    """The default study with what the tutorials add to it."""
    study = yaml.safe_load(file.read_text(encoding="utf-8"))
    return yaml.safe_dump(merged(study, *additions("tutorials/add-an-arm.md")), sort_keys=False)


@cache
def planned(folder: Path, command: str) -> subprocess.CompletedProcess[str]:
    """A Snakemake command's dry run."""
    return Workflow(folder).run(*shlex.split(command), "--dry-run")


PLANS_MUCH = (
    "tutorials/reproduce.md",
    "tutorials/add-an-arm.md",
    "tutorials/from-the-paper.md",
    "how-to/gpu.md",
    "quickstart.md",
)
"""Their commands take 16 s, those of all other pages 4 s."""


def check_commands(page: str, workflow: Workflow) -> None:
    """Each command of a page is a command, with options and targets that there are."""
    for command in [part for line in commands(page) for part in line.split(" && ")]:
        words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
        match words:
            case ["snakemake", *rest]:
                if "--profile" not in rest:  # of a cluster: tests/workflow/test_profiles.py
                    ended = planned(workflow.folder, shlex.join(words))
                    assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"
            case ["make", *rest]:
                ended = subprocess.run(["make", "-n", *rest], cwd=ROOT, capture_output=True, text=True, check=False)
                assert ended.returncode == 0, ended.stderr
            case ["tailrl", "check" | "plan" | "schema" | "metrics", *_]:
                ended = workflow.run(*words)
                assert ended.returncode == 0 or "does not fit" in ended.stdout, f"{command}\n{ended.stderr}"
            case ["tailrl", name, *_]:
                assert name in TAILRL
            case ["tail", *_, path]:
                study, arm, seed = LOG.search(path).groups()  # type: ignore[union-attr]
                found = read_study(ROOT / ("config.yaml" if study == "default" else f"studies/{study}.yaml"))
                assert arm in found.arms and int(seed) in found.seeds
            case [word, *_]:
                assert word in ELSEWHERE, command


@pytest.mark.parametrize("page", [page for page in PAGES if page not in PLANS_MUCH])
def test_its_commands_are_there(page: str, workflow: Workflow) -> None:
    check_commands(page, workflow)


@pytest.mark.slow
def test_the_commands_of_pages_that_plan_much_are_there(workflow: Workflow) -> None:
    for page in PLANS_MUCH:
        check_commands(page, workflow)


# --- tutorials, whole ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """A checkout whose studies are the tiny one under other names, sampled by the exact engine; installed already."""
    copy = copy_workflow(tmp_path_factory.mktemp("small"))
    tiny = yaml.safe_load((ROOT / TINY).read_text(encoding="utf-8"))
    exact = {"engine": "exact", "dtype": "float32"}
    tiny |= {"ablations": {}, "evaluation": {**tiny["evaluation"], "sampler": exact}}
    tiny["policy"]["warm_start"]["stages"][0]["problems"] = 400
    pruned = {"sampler": exact, "vocabulary": {"rule": "min_p", "rho": "1e-2"}}
    naive = {"sampler": exact}
    for name, arms in (
        ("default", {"naive": naive, "dvp": pruned, "dvp_mis": {**pruned, "correction": {"sequence": "mis"}}}),
        ("collapse", {"naive": naive}),
        ("stress", {"dvp_scaled": pruned}),
        ("causes", {"naive": naive}),
    ):
        file = "config.yaml" if name == "default" else f"studies/{name}.yaml"
        seeds = [0, 1] if name == "default" else [0]
        study = {**tiny, "name": name, "seeds": seeds, "arms": arms}
        if name == "causes":
            study |= {"parts": {"1": {}, "3": {}}, "pooled": {"title": "parts"}}
        (copy.folder / file).write_text(yaml.safe_dump(study), encoding="utf-8")
    for name in ("Makefile", "pyproject.toml"):
        (copy.folder / name).write_bytes((ROOT / name).read_bytes())
    for name in (".venv/bin/activate", ".venv/.installed"):
        (copy.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (copy.folder / name).touch()
    return copy


@pytest.mark.slow
@pytest.mark.parametrize("page", TUTORIALS)
def test_a_tutorial_runs_from_its_first_line_to_its_last(page: str, small: Workflow) -> None:
    """Shell and Python in their order, after what the page adds to studies; the first page makes the default study."""
    config = small.folder / "config.yaml"
    if page == TUTORIALS[2]:
        config.write_text(extended(config), encoding="utf-8")
        write_studies(small.folder, page)
    script = ["set -euo pipefail", *(line for block in blocks(page, "sh") for line in lines_of(block))]
    ended = small.run("bash", "-c", "\n".join(script))
    assert ended.returncode == 0, (ended.stdout + ended.stderr)[-5000:]
    results = small.folder / "results/default"
    assert (results / "summary.html").stat().st_size
    for code in blocks(page, "python"):
        shown = small.run("python", "-c", code)
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"^dvp minus naive: [+-]\d+\.\d \[", shown.stdout, re.MULTILINE)
    if page == TUTORIALS[2]:
        assert (results / "train/top_k_mis/seed0/metrics.jsonl").stat().st_size
        assert studies(page).keys() == {"studies/cooler.yaml", "studies/warm_starts.yaml"}


@pytest.mark.slow
@pytest.mark.vllm
def test_the_cause_is_found_and_mended(small: Workflow) -> None:
    """The tutorial with the real vLLM, on the tiny policy: the penalty is named with its number, and gone after."""
    shutil.copytree(ROOT / "examples", small.folder / "examples", dirs_exist_ok=True)
    ended = {line: small.run("bash", "-c", line) for line in commands("tutorials/find-the-cause.md")}
    codes = {line: one.returncode for line, one in ended.items()}
    [named, clean] = [line for line in ended if line.startswith("tailrl explain")]
    assert codes == {line: int(line == named) for line in ended}, [one.stderr[-2000:] for one in ended.values()]
    found = re.search(r"this model with a repetition penalty of ([\d.]+):", ended[named].stdout)
    assert found and float(found[1]) == pytest.approx(1.1, abs=0.02)
    assert "differ by rounding alone" in ended[clean].stdout
    assert (small.folder / "change.html").stat().st_size > 1000
