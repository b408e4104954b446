"""A whole tiny study through Snakemake with the real vLLM engine, and what is stale after an edit of it."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from cases_fixture import rest_long
from study_fixture import SECRETS, TINY, Workflow

from tailrl.reports.figures import FIGURES
from tailrl.tracking.metrics import METRICS

pytestmark = pytest.mark.vllm

ARMS, SEEDS = ("naive", "dvp_mis"), (0, 1)
RUNS = [(arm, seed) for arm in ARMS for seed in SEEDS]
TRAINED = [f"train {arm}, seed {seed}" for arm, seed in RUNS]
EVALUATED = [f"evaluate {arm}" for arm in ("base", *ARMS)]
REPORTED = ["tables, figures and summary"]


@pytest.fixture
def results(finished: Workflow) -> Path:
    return finished.folder / "results" / "tiny"


@pytest.fixture
def study(finished: Workflow) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((finished.folder / TINY).read_text(encoding="utf-8"))
    return loaded


def metrics(results: Path, arm: str, seed: int) -> list[dict[str, float]]:
    lines = (results / "train" / arm / f"seed{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# --- what a study leaves -----------------------------------------------------------------------------


def test_every_output_exists(results: Path) -> None:
    files = [f"data/{name}.jsonl" for name in ("train", "evaluation", "warm_start")]
    files += [f"eval/{arm}{end}" for arm in ("base", *ARMS) for end in (".json", ".samples.jsonl", ".manifest.json")]
    for folder in ("base", *(f"train/{arm}/seed{seed}/policy" for arm, seed in RUNS)):
        files += [f"{folder}/{name}" for name in ("model.safetensors", "config.json", "tokenizer.json")]
    for arm, seed in RUNS:
        names = ("metrics.jsonl", "tokens.npz", "run.json", "manifest.json", "policy/README.md")
        files += [f"train/{arm}/seed{seed}/{name}" for name in names]
    files += [f"figures/{figure}.svg" for figure in FIGURES] + [f"tables/{figure}.csv" for figure in FIGURES]
    files += [f"tables/{table}.csv" for table in ("policies", "differences", "claims")]
    files += ["summary.md", "summary.html", "data/problems.json", "base/warm_start.json"]
    assert [file for file in files if not (results / file).is_file() or not (results / file).stat().st_size] == []


@pytest.mark.parametrize(("arm", "seed"), RUNS)
def test_every_step_is_logged(results: Path, study: dict[str, Any], arm: str, seed: int) -> None:
    steps = metrics(results, arm, seed)
    assert [step["train/step"] for step in steps] == list(range(study["training"]["steps"]))
    for step in steps:
        assert step.keys() == METRICS.keys()
        assert step["rollout_corr_unmasked/delta_abs_mean"] > 0, "bfloat16 against float32: the mismatch is real"
        assert step["rollout_corr_unmasked/delta_abs_mean"] < 0.1
        assert step["time/step"] > 0


@pytest.mark.parametrize("seed", SEEDS)
def test_only_the_arm_that_prunes_loses_mass(results: Path, study: dict[str, Any], seed: int) -> None:
    vocabulary = study["policy"]["vocabulary_size"]
    for side in ("train", "rollout"):
        for step in metrics(results, "naive", seed):
            assert step[f"dvp/kept_mass_{side}_mean"] == step[f"dvp/kept_mass_{side}_min"] == 1
            assert step[f"dvp/kept_vocab_per_token_{side}"] == vocabulary
        for step in metrics(results, "dvp_mis", seed):
            assert 0.5 < step[f"dvp/kept_mass_{side}_min"] < step[f"dvp/kept_mass_{side}_mean"] < 1
            assert 1 <= step[f"dvp/kept_vocab_per_token_{side}"] < vocabulary


def test_the_weights_are_trained_and_the_arms_apart(results: Path) -> None:
    assert all(sum(step["train/grad_norm"] for step in metrics(results, arm, seed)) > 0 for arm, seed in RUNS)
    weights = [
        (results / "train" / arm / f"seed{seed}" / "policy/model.safetensors").read_bytes() for arm, seed in RUNS
    ]
    assert len({*weights, (results / "base/model.safetensors").read_bytes()}) == 1 + len(RUNS)


@pytest.mark.parametrize(("arm", "seed"), RUNS)
def test_the_tokens_are_those_of_the_metrics(results: Path, arm: str, seed: int) -> None:
    with np.load(results / "train" / arm / f"seed{seed}" / "tokens.npz") as tokens:
        delta = np.abs(tokens["logp_train"].astype(np.float64) - tokens["logp_infer"])
        for number, step in enumerate(metrics(results, arm, seed)):
            chosen = tokens["step"] == number
            assert chosen.sum() == pytest.approx(16 * step["response/length_mean"])
            inside = chosen & ~tokens["outside"]
            assert delta[inside].mean() == pytest.approx(step["rollout_corr_unmasked/delta_abs_mean"], rel=1e-3)
            assert tokens["outside"][chosen].sum() == step["dvp/sampled_outside_train_support_count"]


def test_a_run_says_what_ran(results: Path, study: dict[str, Any]) -> None:
    for arm, seed in RUNS:
        run = json.loads((results / "train" / arm / f"seed{seed}" / "run.json").read_text(encoding="utf-8"))
        assert (run["study"], run["arm"], run["seed"]) == ("tiny", arm, seed)
        assert run["settings"]["training"]["steps"] == study["training"]["steps"]
        assert run["versions"]["vllm"]
        assert run["wall_seconds"] > run["startup_seconds"] > 0


def test_every_policy_is_evaluated(results: Path, study: dict[str, Any]) -> None:
    problems, samples = study["evaluation"]["task"]["problems"], study["evaluation"]["samples"]
    for arm, seeds in (("base", SEEDS[:1]), *((arm, SEEDS) for arm in ARMS)):
        record = json.loads((results / "eval" / f"{arm}.json").read_text(encoding="utf-8"))
        assert [policy["seed"] for policy in record["policies"]] == list(seeds)
        for policy in record["policies"]:
            assert [len(problem["correct"]) for problem in policy["per_problem"]] == [samples] * problems


def test_the_summary_has_a_row_for_every_arm(results: Path) -> None:
    summary = (results / "summary.md").read_text(encoding="utf-8")
    for section in ("Arms", "Held-out score", "Training"):
        table = summary.partition(f"## {section}\n")[2].partition("\n## ")[0]
        first_cells = re.findall(r"^\| (\w+) \|", table, re.MULTILINE)
        assert [cell for cell in first_cells if cell in ARMS] == list(ARMS), section


def test_the_pages_show_the_figures(results: Path) -> None:
    page = (results / "summary.html").read_text(encoding="utf-8")
    assert page.count('<div role="img"') == len(FIGURES)
    assert page.count('<figure class="chart"') == 3


@pytest.mark.parametrize("which", rest_long(RUNS[-1:], RUNS, lambda run: f"{run[0]}-{run[1]}"))
def test_wandb_can_read_its_mirror(finished: Workflow, results: Path, which: tuple[str, int]) -> None:
    arm, seed = which
    (run,) = (results / "wandb").glob(f"offline-run-*-tiny-{arm}-seed{seed}-*")
    shown = finished.run("wandb", "leet", "inspect", "--summary", "--json", str(run))
    assert shown.returncode == 0, shown.stderr
    record, last = json.loads(shown.stdout), metrics(results, arm, seed)[-1]
    assert (record["state"], record["exit_code"]) == ("finished", 0)
    assert (record["config"]["arm"], record["config"]["seed"]) == (arm, seed)
    assert arm in record["tags"]
    assert last.keys() <= record["summary"].keys()
    for name, value in last.items():
        assert value is None or record["summary"][name] == pytest.approx(value), name


def test_no_secret_is_left_in_any_file(finished: Workflow) -> None:
    """Results, logs, W&B's files, Snakemake's own records."""
    files = [path for path in finished.folder.rglob("*") if path.is_file()]
    assert {"run.json", "summary.html"} <= {path.name for path in files}
    left = [path for path in files for secret in SECRETS.values() if secret.encode() in path.read_bytes()]
    assert left == []


# --- what is stale after an edit ---------------------------------------------------------------------


def test_a_finished_study_computes_nothing_again(finished: Workflow, results: Path) -> None:
    times = {path: path.stat().st_mtime_ns for path in results.rglob("*") if path.is_file()}
    again = finished.run("snakemake", "--cores", "2", "--configfile", TINY)
    assert again.returncode == 0
    assert "Nothing to be done" in again.stdout + again.stderr
    assert times == {path: path.stat().st_mtime_ns for path in results.rglob("*") if path.is_file()}


AFTER_EDITS = {
    "reports/mismatch/page.py": REPORTED,
    "reports/mismatch/kept.rst": REPORTED,
    "reports/overview/summary.md.j2": REPORTED,
    "evaluation/model_card.md.j2": [],
    "objective/loss.py": [*TRAINED, *EVALUATED[1:], *REPORTED],
    "rollout/vllm/engine.py": [*TRAINED, *EVALUATED, *REPORTED],
    "rollout/transformers.py": [],
    "evaluation/evaluate.py": [*EVALUATED, *REPORTED],
    "../eval_tasks/boxed.yaml": [*EVALUATED, *REPORTED],
    "training/base_policy.py": ["base policy", *TRAINED, *EVALUATED, *REPORTED],
    "cli/jobs.py": [],
}
FAST = ("reports/overview/summary.md.j2", "objective/loss.py", "rollout/transformers.py", "evaluation/evaluate.py")


@pytest.mark.parametrize("edited", rest_long(FAST, AFTER_EDITS))
def test_an_edit_plans_what_depends_on_it(finished: Workflow, edited: str) -> None:
    file, expected = os.path.normpath(f"workflow/tailrl/{edited}"), AFTER_EDITS[edited]
    path = finished.folder / file
    text = path.read_text(encoding="utf-8")
    first = next(line for line in text.splitlines() if text.count(f"{line}\n") == 1)
    with finished.edited(file, f"{first}\n", f"{first} \n"):
        planned = finished.plan()
    assert planned == sorted(expected)


def test_a_file_that_was_only_touched_makes_nothing_stale(finished: Workflow) -> None:
    path = finished.folder / "workflow/tailrl/objective/loss.py"
    times = path.stat()
    path.touch()
    try:
        assert finished.plan() == []
    finally:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


CHANGED: list[tuple[dict[str, Any], list[str]]] = [
    ({"description": "Another sentence"}, REPORTED),
    ({"evaluation.samples": 3}, [*EVALUATED, *REPORTED]),
    ({"training.steps": 4}, [*TRAINED, *EVALUATED[1:], *REPORTED]),
    ({"arms.dvp_mis.correction.veto": None}, [*TRAINED[2:], "evaluate dvp_mis", *REPORTED]),
    ({"arms.more": {}}, ["train more, seed 0", "train more, seed 1", "evaluate more", *REPORTED]),
    (
        {"seeds": [0, 1, 2]},
        ["train naive, seed 2", "train dvp_mis, seed 2", "evaluate naive", "evaluate dvp_mis", *REPORTED],
    ),
    ({"ablations": {}}, []),
    ({"ablations.rho.values": ["1e-4"]}, []),
]


@pytest.mark.parametrize("case", rest_long([CHANGED[2], CHANGED[4]], CHANGED, lambda case: "".join(case[0])))
def test_a_changed_setting_plans_what_depends_on_it(finished: Workflow, case: tuple[dict[str, Any], list[str]]) -> None:
    changes, expected = case
    assert finished.plan(study=finished.write_study(changes)) == sorted(expected)


def test_an_ablation_adds_its_arms_alone(finished: Workflow) -> None:
    """The value that the base arm has already is that arm, and is not computed twice; nor is anything of the others for
    a value more."""

    def arms(*names: str) -> list[str]:
        runs = [f"train {name}, seed {seed}" for name in names for seed in SEEDS]
        return sorted([*runs, *(f"evaluate {name}" for name in names), "table and figure of the ablation rho"])

    assert finished.plan("ablation_rho") == arms("rho=e-13")
    more = finished.write_study({"ablations.rho.values": ["1e-2", "e-13", "0.34/V"]})
    assert finished.plan("ablation_rho", study=more) == arms("rho=e-13", "rho=0.34-V")


def test_a_misspelt_key_stops_a_finished_study(finished: Workflow, results: Path) -> None:
    study = finished.write_study({"training.stpes": 3})
    result = finished.refuse("--cores", "2", "--configfile", study)
    assert "training.stpes is not a known key (did you mean 'steps'?)" in result.stdout + result.stderr
    assert (results / "summary.html").is_file()
