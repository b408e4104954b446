"""What Snakemake plans, and what it refuses, in a copy of the workflow. Nothing is computed here."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from cases_fixture import rest_long
from study_fixture import TINY, Workflow, copy_workflow

from tailrl.config.load import read_study

PREPARED = ["base policy", "problems of the study tiny"]
REPORTED = ["tables, figures and summary"]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    """Shared: what a test writes beside a study file of its own, it takes away."""
    return copy_workflow(tmp_path_factory.mktemp("workflow"))


def jobs(*arms: str, seeds: tuple[int, ...] = (0, 1)) -> list[str]:
    """The messages of the jobs that these arms need."""
    return [f"train {arm}, seed {seed}" for arm in arms for seed in seeds] + [f"evaluate {arm}" for arm in arms]


def refusal(result: subprocess.CompletedProcess[str]) -> str:
    """The sentence with which Snakemake stopped, checked to be one line and to come before any job."""
    assert result.returncode != 0
    output = result.stdout + result.stderr
    assert "Traceback" not in output
    assert "Job stats" not in output
    found = re.search(r"^WorkflowError[^\n]*:\n(.*?)(?=^  File |\Z)", output, re.MULTILINE | re.DOTALL)
    assert found, output
    (sentence,) = found[1].strip().splitlines()
    return sentence


def test_the_copy_runs_its_own_package(workflow: Workflow) -> None:
    """Else every other test here would look at the installed package."""
    with workflow.edited("workflow/tailrl/config/study.py", "A study: the content", "The copy's study: the content"):
        assert '"description": "The copy\'s study: the content' in workflow.run("tailrl", "schema").stdout
    imported = workflow.run("python", "-c", "import tailrl; print(tailrl.__file__)").stdout
    assert imported.strip() == str(workflow.folder / "workflow" / "tailrl" / "__init__.py")


# --- what is planned ---------------------------------------------------------------------------------


def test_a_study_plans_every_arm_with_every_seed(workflow: Workflow) -> None:
    assert workflow.plan() == sorted([*PREPARED, *jobs("naive", "dvp_mis"), "evaluate base", *REPORTED])


def test_a_plan_sums_its_reasons_up(workflow: Workflow) -> None:
    """A job's own reason names every file: it is there when asked for."""
    plan = ("snakemake", "--dry-run", "--configfile", TINY)
    by_itself, asked = workflow.run(*plan), workflow.run(*plan, "--quiet", "host")
    output = by_itself.stdout + by_itself.stderr
    assert "Reason: " not in output and "reason: " not in output
    assert "Reasons:\n" in output and re.search(r"^Job \d+: train naive, seed 0$", output, re.MULTILINE)
    assert "Reason: Missing output files: " in asked.stdout + asked.stderr


def test_the_default_study_is_used_by_itself(workflow: Workflow) -> None:
    result = workflow.run("snakemake", "--dry-run")
    assert result.returncode == 0, result.stderr
    counts = dict(re.findall(r"^(\w+) +(\d+)$", result.stdout + result.stderr, re.MULTILINE))
    arms, runs = 7, 4 * 3 + 3 * 5
    assert counts == {
        "problems": "1",
        "policy": "1",
        "train": str(runs),
        "evaluate": str(arms + 1),
        "summarise": "1",
        "study": "1",
        "total": str(runs + arms + 1 + 4),
    }


def test_a_cpu_without_a_formats_instructions_leaves_its_arms_out(workflow: Workflow) -> None:
    (workflow.folder / "cpuinfo").write_text("processor\t: 0\nflags\t\t: fpu avx2\n")
    (workflow.folder / "coarse.yaml").write_text(
        "name: coarse\nseeds: [0]\narms: {naive: {}, fp8: {sampler: {kv_cache_dtype: fp8_e4m3}}}\n"
    )
    command = ("snakemake", "--dry-run", "--configfile", "coarse.yaml")
    with workflow.edited("workflow/tailrl/runtime/devices.py", 'Path("/proc/cpuinfo")', 'Path("cpuinfo")'):
        here = workflow.run(*command)
        on_another = workflow.run("snakemake", "--dry-run", "--configfile", TINY)
    sentence = "tailrl: left out, since on a CPU an fp8 cache needs AVX-512 or AMX, which this one has not: arms fp8\n"
    assert here.returncode == 0 and here.stderr.count(sentence) == 1
    assert "train naive, seed 0" in here.stdout + here.stderr and "train fp8" not in here.stdout + here.stderr
    assert "left out" not in on_another.stderr


def test_another_study_replaces_the_default_one(workflow: Workflow) -> None:
    """Snakemake merges configurations by itself: no arm, seed or ablation of config.yaml may shine through."""
    (workflow.folder / "other.yaml").write_text("name: other\narms: {only: {}}\n")
    planned = workflow.plan(study="other.yaml")
    prepared = ["base policy", "problems of the study other"]
    assert planned == sorted([*prepared, *jobs("only", seeds=(0, 1, 2)), "evaluate base", *REPORTED])
    assert "ablation_rho" not in workflow.run("snakemake", "--list-rules", "--configfile", "other.yaml").stdout


def test_an_arm_with_its_own_seeds(workflow: Workflow) -> None:
    more = workflow.write_study({"arms.naive.seeds": [4, 5, 6]})
    expected = [*PREPARED, *jobs("naive", seeds=(4, 5, 6)), *jobs("dvp_mis"), "evaluate base", *REPORTED]
    assert workflow.plan(study=more) == sorted(expected)


def test_one_arm_alone(workflow: Workflow) -> None:
    assert workflow.plan("train_naive") == sorted([*PREPARED, "train naive, seed 0", "train naive, seed 1"])


def test_the_base_policy_is_evaluated_without_training(workflow: Workflow) -> None:
    assert workflow.plan("results/tiny/eval/base.json") == sorted([*PREPARED, "evaluate base"])


def test_a_baseline_is_the_base_policy_at_another_temperature(workflow: Workflow) -> None:
    """It is evaluated again, and only the report is made again for it."""
    more = workflow.write_study({"baselines": [0.01, 0.3]})
    planned = workflow.plan(study=more)
    assert set(planned) - set(workflow.plan()) == {"evaluate base@0.01", "evaluate base@0.3"}
    shown = workflow.run("snakemake", "--dry-run", "--printshellcmds", "--configfile", more)
    commands = [line for line in shown.stdout.splitlines() if "--arm base@0.3 " in line]
    assert commands and "--policy=0=results/tiny/base" in commands[0]
    # The settings are in a file, which a dry run does not write.
    assert read_study(str(workflow.folder / more)).baseline_evaluations()["base@0.3"].temperature == 0.3


def test_an_ablation_plans_its_own_arms(workflow: Workflow) -> None:
    """The value that the base arm has already is that arm."""
    arms = jobs("dvp_mis", "rho=e-13")
    assert workflow.plan("ablation_rho") == sorted(
        [*PREPARED, *arms, "evaluate base", "table and figure of the ablation rho"]
    )


def test_a_value_more_in_an_ablation_plans_the_jobs_of_that_value_more(workflow: Workflow) -> None:
    more = workflow.write_study({"ablations.rho.values": ["1e-2", "e-13", "0.34/V"]})
    before, after = workflow.plan("ablation_rho"), workflow.plan("ablation_rho", study=more)
    assert set(before) < set(after)
    assert sorted(set(after) - set(before)) == sorted(jobs("rho=0.34-V"))


def test_no_command_holds_settings(workflow: Workflow) -> None:
    """The system takes arguments of at most 128 KiB. A dry run writes no file of settings either."""
    # 150 ways to train, whose settings are 300 kB together.
    arms = {f"dvp_{n}": {"vocabulary": {"rule": "min_p", "rho": f"{n}e-5"}} for n in range(1, 100)}
    ablation = {"base": "dvp_1", "field": "training.learning_rate", "values": [n * 1e-5 for n in range(1, 50)]}
    changes = {"name": "many", "seeds": [0], "arms": arms, "ablations": {"rate": ablation}}
    study = workflow.write_study(changes, name="many.yaml")
    before = set(workflow.folder.rglob("*.json"))
    planned = workflow.run("snakemake", "-n", "-p", "all", "ablations", "gradients", "download", "--configfile", study)
    assert planned.returncode == 0, planned.stdout + planned.stderr
    commands = re.findall(r"^.*\b(?:tailrl|snakemake) .*$", planned.stdout + planned.stderr, re.MULTILINE)
    assert len(commands) > 250
    assert [command for command in commands if len(command) > 2000 or '{"' in command] == []
    assert set(workflow.folder.rglob("*.json")) == before


@pytest.mark.slow
def test_settings_of_any_length_reach_a_job(workflow: Workflow) -> None:
    file = workflow.write_study({"name": "long", "description": "x" * 150_000}, name="long.yaml")
    ended = workflow.run("snakemake", "--cores", "1", "download", "--configfile", file)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    shutil.rmtree(workflow.folder / "results")  # other tests of this folder expect none


def test_what_a_study_extends_is_part_of_it(workflow: Workflow) -> None:
    """Its file alone is on the command line, which may say more; `ablations` is the target of all ablations."""
    lines = "extends: studies/tiny.yaml\nname: child\nablations: {rho: {values: [1e-2, 1e-3]}}\n"
    (workflow.folder / "child.yaml").write_text(lines, encoding="utf-8")
    planned = workflow.plan("ablations", "--config", "seeds=[5]", study="child.yaml")
    prepared = ["base policy", "problems of the study child"]
    trained = jobs("dvp_mis", "rho=1e-3", seeds=(5,))
    assert planned == sorted([*prepared, *trained, "evaluate base", "table and figure of the ablation rho"])


def test_the_number_of_ranks_is_a_resource(workflow: Workflow) -> None:
    """One process, unless a profile or the command line gives the rule more."""
    plan = ("snakemake", "--dry-run", "--printshellcmds", "train_naive", "--configfile", TINY)
    for more, count in (((), 1), (("--set-resources", "train:ranks=2"), 2)):
        output = workflow.run(*plan, *more).stdout
        assert len(re.findall(rf"tailrl job train .* --ranks {count} 2>>", output)) == 2, output


def test_the_gradients_need_neither_policy_nor_training(workflow: Workflow) -> None:
    jobs_alone = ["gradient estimators on tiny models", "table and figure of the gradient estimators"]
    assert workflow.plan("gradients") == jobs_alone
    assert workflow.plan("gradients", study="studies/gradient_quality.yaml") == jobs_alone


def test_what_looks_at_all_studies_computes_none(workflow: Workflow) -> None:
    assert workflow.plan("overview") == ["page over all studies"]


@pytest.mark.long  # `test_staleness.py` plans and counts jobs of engines
def test_the_distributions_need_the_base_policy_and_one_job_an_engine(workflow: Workflow) -> None:
    one = workflow.write_study(
        {"distributions": {"engines": {"fp16": {"sampler": {"dtype": "float16"}}}}}, name="a.yaml"
    )
    two = {"fp16": {"sampler": {"dtype": "float16"}}, "floor": {"rescored": 1}}
    both = workflow.write_study({"distributions": {"engines": two}}, name="b.yaml")
    reported = "tables and figure of the distributions"
    assert workflow.plan("distributions", study=one) == sorted([*PREPARED, "distributions of fp16", reported])
    assert {"distributions of fp16", reported} < set(workflow.plan(study=one)), "engines that are named are compared"
    more = set(workflow.plan("distributions", study=both)) - set(workflow.plan("distributions", study=one))
    assert more == {"distributions of floor"}
    assert len(workflow.plan("distributions")) == len(PREPARED) + 6 + 1, "the default engines"
    assert workflow.plan("equal_mass") == sorted([*PREPARED, "thresholds of equal kept mass"])


def test_a_data_file_that_is_gone_is_named(workflow: Workflow) -> None:
    study = workflow.write_study({"evaluation.task": {"name": "aime25", "path": "problems.jsonl"}})
    assert "problems.jsonl" in refusal(workflow.run("snakemake", "--dry-run", "--configfile", study))


def test_a_job_depends_on_its_own_engine_alone(tmp_path: Path) -> None:
    """Else a change in an engine that a study never uses would compute it again.

    The sources of a job are read when it is planned: one that cannot be parsed stops those that depend on it.
    """
    workflow = copy_workflow(tmp_path)
    arms = {arm: {"sampler": {"engine": arm, "dtype": "float32"}} for arm in ("transformers", "exact")}
    changes = {"arms": arms, "ablations": {}, "evaluation.sampler": arms["exact"]["sampler"]}
    study = workflow.write_study(changes)
    engines = workflow.folder / "workflow/tailrl/rollout"
    (engines / "vllm.py").write_text("(")
    assert workflow.plan(study=study) == sorted([*PREPARED, *jobs(*arms), "evaluate base", *REPORTED])
    (engines / "transformers.py").write_text("(")
    assert workflow.plan("train_exact", study=study) == sorted([*PREPARED, *jobs("exact")[:2]])
    assert workflow.run("snakemake", "--dry-run", "train_transformers", "--configfile", study).returncode != 0


@pytest.mark.slow
def test_braces_in_text_are_no_wildcards(tmp_path: Path, policy_folder: Path) -> None:
    """In the checkout's path and in what a study says; the paths of inputs are refused in a sentence."""
    workflow = copy_workflow(tmp_path / "a {word}")
    study = workflow.write_study({"description": "a {word} of {seed}"})
    words = ("--dry-run", "--configfile", study)
    for targets in (("ablations",), ("download",)):
        shown = workflow.run("snakemake", "--printshellcmds", *targets, *words)
        assert shown.returncode == 0, shown.stderr
    ended = workflow.run("snakemake", "--cores", "1", "download", "--configfile", study)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (settings,) = (workflow.folder / ".snakemake/settings").iterdir()
    assert '"a {word} of {seed}"' in settings.read_text(encoding="utf-8")
    (workflow.folder / "{arm}.jsonl").touch()
    study = workflow.write_study({"task": {"name": "aime25", "path": "{arm}.jsonl"}}, name=study)
    assert "task.path: Snakemake takes the braces in {arm}.jsonl for a" in refusal(workflow.run("snakemake", *words))
    shutil.copytree(policy_folder, workflow.folder / "{seed}")
    study = workflow.write_study({"policy": {"source": "pretrained", "path": "{seed}"}}, name=study)
    said = refusal(workflow.run("snakemake", *words))
    assert "policy.path: Snakemake takes the braces in {seed}/" in said and said.endswith("for a wildcard; rename it")
    elsewhere = refusal(workflow.run("snakemake", *words, "--directory", str(tmp_path)))
    assert elsewhere.startswith(f"{workflow.folder}: Snakemake takes braces in the workflow's path for wildcards")


def test_the_workflow_is_used_from_another_folder(workflow: Workflow) -> None:
    """Its own files lie beside the Snakefile; results, in the folder."""
    (workflow.folder / "elsewhere").mkdir()
    shown = workflow.run("snakemake", "--dry-run", "--directory", "elsewhere")
    assert "input: results/default/summary.html" in shown.stdout, shown.stderr


# --- what is refused ---------------------------------------------------------------------------------


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    ({"seedz": [0]}, "seedz is not a known key (did you mean 'seeds'?)"),
    ({"training.stpes": 3}, "training.stpes is not a known key (did you mean 'steps'?)"),
    ({"arms.dvp_mis.vocabulary.roh": "e-8"}, "arms.dvp_mis.vocabulary.roh is not a known key"),
    ({"arms.naive": {"training": {"stpes": 3}}}, "arms.naive.training"),
    ({"arms.naive": {"vocabulary": {"rule": "min_p"}}}, "arms.naive.vocabulary.rho is missing"),
    (
        {"arms.dvp_mis.vocabulary.rho": "e+3"},
        "rho: write e-13, 1e-6 or 0.34/V, with a value in (0, 1] (given: 'e+3')",
    ),
    ({"arms.dvp_mis.vocabulary.outside": "paper_fill"}, "paper_fill has no effect beside a correction"),
    ({"arms": {"base": {}}, "ablations": {}}, "'base' cannot name an arm"),
    ({"arms": {"a b": {}}, "ablations": {}}, "'a b' cannot name an arm"),
    ({"ablations.rho.base": "dvp"}, "there is no arm 'dvp'"),
    ({"ablations.rho.field": "vocabulary.roh"}, "an arm has no field 'vocabulary.roh'"),
    ({"ablations.rho.values": ["e-13", "big"]}, "'big'"),
    ({"policy.heads": 3}, "hidden_size / heads must be 32, 64 or 128"),
    ({"training.steps": "many"}, "training.steps"),
    ({"gradient_quality": {"vocabulary_size": 24, "length": 5}}, "responses each are too many to enumerate"),
    (
        {"distributions": {"engines": {"a": {"dtype": "float16"}}}},
        "distributions.engines.a.dtype is not a known key",
    ),
    ({"seeds": [0, 0]}, "the same seed is given twice"),
    ({"task": {"name": "aime25", "path": "nowhere.parquet"}}, "task.path: there is no data file nowhere.parquet"),
]
FAST = [IMPOSSIBLE[0], IMPOSSIBLE[9], IMPOSSIBLE[-1]]
"""A key, a rule between two places, and what lies on the disk; the sentences are `config/test_refusals.py`'s."""


@pytest.mark.parametrize("case", rest_long(FAST, IMPOSSIBLE, lambda case: ", ".join(case[0])))
def test_an_impossible_study_is_refused_in_one_sentence(workflow: Workflow, case: tuple[dict[str, Any], str]) -> None:
    changes, sentence = case
    study = workflow.write_study(changes)
    assert sentence in refusal(workflow.refuse("--cores", "1", "--configfile", study))
    assert not (workflow.folder / "results").exists()


def test_a_key_that_is_given_twice_is_refused(workflow: Workflow) -> None:
    """Snakemake would take the second, and the arms of the first would be lost without a word."""
    (workflow.folder / "twice.yaml").write_text("name: s\narms: {a: {}}\narms: {b: {}}\n")
    sentence = refusal(workflow.run("snakemake", "--dry-run", "--configfile", "twice.yaml"))
    assert "twice.yaml" in sentence and "arms is given twice" in sentence


def test_text_that_is_no_yaml_is_refused(workflow: Workflow) -> None:
    (workflow.folder / "broken.yaml").write_text("name: [tiny\n")
    assert "not valid" in refusal(workflow.refuse("--cores", "1", "--configfile", "broken.yaml"))


def test_results_that_cannot_be_written_are_refused_at_the_start(tmp_path: Path) -> None:
    workflow = copy_workflow(tmp_path)
    (workflow.folder / "results").write_text("not a folder")
    sentence = refusal(workflow.refuse("--cores", "1", "--configfile", TINY))
    assert sentence == "results: results cannot be written there"


# --- form --------------------------------------------------------------------------------------------


def test_lint_finds_nothing(workflow: Workflow) -> None:
    result = workflow.run("snakemake", "--lint")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "in a good condition" in result.stdout + result.stderr


@pytest.mark.skipif(shutil.which("snakefmt") is None, reason="snakefmt is not installed")
def test_the_rules_are_formatted(workflow: Workflow) -> None:
    result = workflow.run("snakefmt", "--check", "Snakefile", "workflow/rules")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(("name", "runs"), [("night", "3"), ("gpu", "9"), ("paper", "3")])
def test_the_studies_of_larger_machines_are_planned(workflow: Workflow, name: str, runs: str) -> None:
    """From data sets and models that nobody has fetched here: nothing is read before a job needs it."""
    result = workflow.run("snakemake", "--dry-run", "figure1", "--configfile", f"studies/{name}.yaml")
    assert result.returncode == 0, result.stdout + result.stderr
    counts = dict(re.findall(r"^(\w+) +(\d+)$", result.stdout + result.stderr, re.MULTILINE))
    assert (counts["train"], counts["evaluate"], counts["figure1"]) == (runs, "4", "1")
