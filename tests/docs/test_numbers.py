"""Numbers that pages state in words: defaults, sizes, published values and arithmetic."""

import csv
import math
import re

import pytest
from pages_fixture import DOCS, published
from study_fixture import ROOT

from findings.lookups import k3
from tailrl.config.jobs import Evaluation
from tailrl.config.load import read_study
from tailrl.config.sampler import VllmSettings
from tailrl.config.training import Training
from tailrl.planning.machine import read_machine
from tailrl.planning.plan import StudyPlan, plan_page
from tailrl.planning.shapes import shape_of
from tailrl.tasks.registry import load_task

BLOCKS = {"training": Training, "sampler": VllmSettings, "evaluation": Evaluation}


def words(page: str) -> str:
    """A page's text on one line."""
    return re.sub(r"\s+", " ", (DOCS / page).read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", ["reliability.md", "how-to/gpu.md"])
def test_a_default_that_a_page_gives_is_the_settings(page: str) -> None:
    """`training.max_skipped` (3), and likewise."""
    found = re.findall(r"`(\w+)\.(\w+)`(?: \||,)?(?: vLLM's share of the GPU)? \(?(\d[\d.]*)\b", words(page))
    assert found
    for block, key, number in found:
        assert BLOCKS[block].model_fields[key].default == float(number), (block, key)


def test_the_default_policy_has_the_size_that_the_tutorial_says() -> None:
    policy = read_study(ROOT / "config.yaml").policy
    assert f"a Llama of {shape_of(policy).parameters / 1e6:.1f} million parameters" in words("tutorials/reproduce.md")


def test_so_many_of_smollm2s_held_out_problems_are_in_order_already() -> None:
    """Copying the prompt solves these."""
    task = read_study(ROOT / "studies/smollm2.yaml").evaluation.task
    problems = load_task(task).problems
    copied = sum(problem.prompt.strip() == problem.answer for problem in problems)
    assert f"{copied} of the {len(problems)} held-out problems are in order already" in words("findings/smollm2.md")


def test_so_many_policies_have_no_scores_by_problem() -> None:
    """A policy is of a study, an arm and a seed; an ablation's arm has as many runs as its score."""
    scored = {(row["study"], row["arm"], row["seed"]) for row in published("policies")}
    trained = {policy for policy in scored if not policy[1].startswith("base")}
    by_problem = {(row["study"], row["arm"], row["seed"]) for row in published("problems")}
    lacking = len(trained - by_problem)
    ablated = {(row["study"], row["arm"]): int(row["avg_n"]) for row in published("ablations")}
    means = sum(runs for arm, runs in ablated.items() if arm not in {policy[:2] for policy in trained})
    page = words("limitations.md")
    said = f"Of {len(trained):,} policies in `results/tables/policies.csv` {lacking:,} ({lacking / len(trained):.0%})"
    assert said.replace("%)", " %)") in page
    assert f"Of {means} runs of ablations only the means of their arms are published" in page


def test_the_days_on_gpus_are_those_that_the_plan_expects() -> None:
    days = []
    for name, devices in (("gpu", 1), ("paper", 8)):
        page = plan_page(StudyPlan(read_study(ROOT / f"studies/{name}.yaml"), read_machine(None, "80GB"), devices))
        days += [round(float(hours) / 24) for hours in re.findall(r"([\d.]+) h of (?:training|evaluating)", page)]
    assert days == [2, 0, 8, 3]
    assert "2 days on one GPU" in words("tutorials/reproduce.md")
    assert "8 days of training on eight GPUs, and 3 days of evaluating on one" in words("tutorials/reproduce.md")


def test_times_are_published_or_said_to_be_estimates() -> None:
    """Times of fuzz.csv, chaos.csv and plans have tests of their own; Slurm's are settings."""
    time = re.compile(r"\b(?:\d+|ten|two|half an?|an?) (?:minutes?|hours?)\b")
    pages = ["../README.md", "../CONTRIBUTING.md", "quickstart.md", "performance.md"]
    pages += [
        path.relative_to(DOCS).as_posix() for folder in ("tutorials", "how-to") for path in DOCS.glob(f"{folder}/*")
    ]
    pages.remove("how-to/slurm.md")
    with (DOCS / "results/study_time.csv").open(newline="", encoding="utf-8") as file:
        whole = {row["run"]: float(row["seconds"]) for row in csv.DictReader(file) if row["part"] == "whole"}
    set_up = 28  # seconds, of an empty environment
    fast, slow = (
        round((whole[f"AMD EPYC {avx}"] + set_up) / 60) for avx in ("with AVX-512 in bfloat16", "without AVX-512")
    )
    default = {
        "../README.md": f"{fast} to {slow} minutes",
        "tutorials/from-the-paper.md": f"{fast} to {slow} minutes",
        "quickstart.md": f"with AVX-512 it took {fast} minutes, without {slow}",
        "how-to/gpu.md": f"{fast} minutes, {slow} without AVX-512",
    }
    assert [page for page, phrase in default.items() if phrase not in words(page)] == []
    others = {page: words(page).replace(default.get(page, ""), "") for page in pages}
    assert [page for page in pages if time.search(others[page]) and "estimate" not in others[page]] == []
    summary = words("results/default/summary.md")
    (hours,) = re.findall(r"Wall time of the jobs: .*? each, ([\d.]+) h in all", summary)
    (memory,) = re.findall(r"Hardware: .*? cores, (\d+ GB)", summary)
    assert f"The published run had {memory} of memory" in words("quickstart.md")
    assert f"the training jobs of the published run took {hours} h, added up" in words("quickstart.md")


def test_versions_are_those_of_the_pins() -> None:
    pins = "".join((ROOT / f"envs/{name}.txt").read_text(encoding="utf-8") for name in ("cpu", "slurm", "kubernetes"))

    def pin(name: str) -> str:
        return re.findall(rf"^{name}==([\d.]+)", pins, re.MULTILINE)[0]

    page, slurm = words("how-to/slurm.md"), pin("snakemake-executor-plugin-slurm")
    assert f"The plugin ({slurm})" in page and f"the plugin {slurm} and Snakemake {pin('snakemake')}" in page
    assert f"The plugin ({pin('snakemake-executor-plugin-kubernetes')})" in page
    assert f"to {pin('trl').rpartition('.')[0]} were tried" in words("tutorials/train-with-trl.md")


def test_the_tutorial_adds_the_studies_minutes_up() -> None:
    table = (DOCS.parent / "studies/README.md").read_text(encoding="utf-8")
    minutes = re.findall(r"\| (\d+) \| [^|]* \|$", table, re.MULTILINE)
    assert len(minutes) > 30
    assert f"All studies together take about {sum(map(int, minutes)) / 60:.0f} hours" in words("tutorials/reproduce.md")


def test_what_fuzzing_found_is_in_its_file() -> None:
    with (DOCS / "results/fuzz.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))

    def total(column: str, own: list[dict[str, str]]) -> int:
        return sum(int(row[column]) for row in own)

    page = words("reliability.md")
    assert {row["kind"] for row in rows} == {"studies", "rows", "results", "models", "logs"}
    assert f"{total('failed', rows)} failed, which are mended" in page
    assert f"tried {total('cases', rows):,} inputs in {total('seconds', rows) / 60:.0f} minutes" in page
    logs, others = ([row for row in rows if (row["kind"] == "logs") == of_logs] for of_logs in (True, False))
    last = [[row for row in own if row["commit"] == own[-1]["commit"]] for own in (logs, others)]
    assert not any(total("failed", own) for own in last)
    cases = [f"{total('cases', own):,}" for own in last]
    assert f"The last {cases[0]} logs found nothing, nor did the last {cases[1]} others" in page
    assert f"The slowest took {max(float(row['slowest']) for row in rows)} s" in page


def test_sizes_of_k3_are_those_of_published_studies() -> None:
    found = k3("ablate_engine", "vllm"), k3("smollm2", "naive")
    assert f"near {found[0].bare} with the small policy" in words("concepts/mismatch.md")
    assert f"{found[1].bare} with SmolLM2-135M." in words("concepts/mismatch.md")
    assert f"{k3('stale', 'stale').mean:.1f}" == "0.1"  # my_k3.yaml


def test_thresholds_and_floors() -> None:
    """What docs/concepts/dvp.md and mis.md say of them."""
    assert f"{math.exp(-13) * 151_936:.2f}" == "0.34" and f"{0.15 / 0.85:.3f}" == "0.176"
    assert 0.93**-9 < 2 < 0.93**-10
    page = words("concepts/dvp.md")
    assert "made for 151,936 tokens" in page and "at most 0.34 of the mass" in page and "0.176/V" in page


def test_the_shape_of_the_mismatch_is_that_of_the_published_distributions() -> None:
    """|Δ| of vLLM in bfloat16: above 90 %, and the least and most below 60 %."""
    with (DOCS / "results/tables/probability.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    found = [row for row in rows if (row["study"], row["engine"]) == ("distributions", "vllm_bf16")]
    below = [float(row["size_mean"]) for row in found if float(row["nats_from"]) >= 0.5]
    assert float(found[0]["nats_to"]) == 0.1  # exp(-0.1) is 0.90, exp(-0.5) is 0.61
    text = (
        f"{float(found[0]['size_mean']):.5f} nats for tokens above 90 %, and {min(below):.3f} to {max(below):.3f} nats"
    )
    assert text in words("concepts/mismatch.md")
