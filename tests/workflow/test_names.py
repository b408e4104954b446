"""One name means one thing: rules, studies, arms and ablations; and a study is planned by its name."""

import os
import re
import subprocess
from collections import Counter

import pytest
from slow_cases import slow_but
from study_fixture import PLANNED, ROOT, TINY, Workflow, copy_workflow

from tailrl.analysis.pools import pools
from tailrl.claims.catalogue import STATEMENTS
from tailrl.claims.evidence import COMMANDS
from tailrl.config.load import read_study
from tailrl.config.policy import MADE_MODELS
from tailrl.config.study import Study

STUDIES: dict[str, Study] = {
    path.stem: read_study(path) for path in [ROOT / "config.yaml", *sorted((ROOT / "studies").glob("*.yaml"))]
}
NAMES = sorted(STUDIES.keys() - {"config"})
COMPARED = {
    "ablate_domain": ["ablate_domain_arithmetic", "ablate_domain_words"],
    "ablate_length": ["ablate_length_3", "ablate_length_4", "ablate_length_6"],
}
RULES = [
    *pools(),
    *(
        name
        for file in [ROOT / "Snakefile", *(ROOT / "workflow/rules").glob("*.smk")]
        for name in re.findall(r"^ *rule (\w+):", file.read_text(encoding="utf-8"), re.MULTILINE)
    ),
]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    return copy_workflow(tmp_path_factory.mktemp("names"))


def output(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stdout + ended.stderr


# --- what the names are ------------------------------------------------------------------------------


def test_no_name_means_two_things() -> None:
    """Rules, studies, studies side by side; and what every study adds: a rule an arm, a rule an ablation."""
    assert len(RULES) >= 20 and len(NAMES) > 25
    fixed = Counter([*RULES, *NAMES, *COMPARED])
    assert [name for name, count in fixed.items() if count > 1] == []
    for study in STUDIES.values():
        own = [f"train_{arm}" for arm in study.arms] + [f"ablation_{ablation}" for ablation in study.ablations]
        assert [name for name in own if fixed[name] or own.count(name) > 1] == [], study.name


def test_no_study_is_called_what_make_does() -> None:
    """Else `make soak` would be either."""
    own = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(own) > 10 and "soak" in own
    assert set(own) & {*NAMES, *COMPARED} == set()


def test_a_job_is_called_what_its_rule_is() -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "workflow/rules").glob("*.smk"))]
    pairs = re.findall(r"^ *rule (\w+):((?:(?!^ *rule\b).)*)", "\n".join(texts), re.MULTILINE | re.DOTALL)
    jobs = {rule: job.replace("-", "_") for rule, text in pairs for job in re.findall(r"tailrl job ([a-z-]+)", text)}
    assert len(jobs) > 10
    assert {rule: job for rule, job in jobs.items() if rule != job} == {}


def test_a_study_is_called_what_its_file_is() -> None:
    assert {name: study.name for name, study in STUDIES.items() if name not in (study.name, "config")} == {}


def test_results_over_all_studies_lie_in_no_studys_folder() -> None:
    text = (ROOT / "workflow/rules/report.smk").read_text(encoding="utf-8")
    shared = set(re.findall(r'"results/(\w+)/', text))
    assert shared == {"early_warning", "overview"} and not {*shared, *pools()} & STUDIES.keys()


def test_every_command_of_a_page_is_a_name() -> None:
    """The pages print `make NAME`; it is Snakemake's name, but for the default study and the tests."""
    commands = {*COMMANDS.values(), *(statement.command for statement in STATEMENTS)}
    printed = {word for command in commands for word in command.removeprefix("make ").split()}
    assert len(printed) > 15
    assert printed - {*NAMES, *COMPARED, *RULES} <= {"reproduce", "test", ""}


def test_make_knows_every_name() -> None:
    made = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {*NAMES, *COMPARED, "figure1", "early_warning", "distributions", "gradients", "overview", *pools()} <= set(
        made
    )
    for name in ("stress", "ablate_length", "early_warning", "long_growth"):
        command = ["make", "--no-print-directory", "-n", name]
        # Not what a make that runs these tests was given, ARGS among it.
        own = {key: value for key, value in os.environ.items() if "MAKE" not in key and key not in ("ARGS", "MFLAGS")}
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, env=own).stdout
        assert said.rstrip().endswith(f"tailrl unlock && snakemake --cores all {name}")


# --- what they plan ----------------------------------------------------------------------------------


def counts(ended: subprocess.CompletedProcess[str]) -> list[dict[str, int]]:
    """Jobs by rule, for each Snakemake that spoke."""
    assert ended.returncode == 0, output(ended)
    tables = re.findall(r"^Job stats:\njob +count\n[- ]+\n(.*?)\n\n", output(ended), re.MULTILINE | re.DOTALL)
    found = [dict(line.split() for line in table.splitlines()) for table in tables]
    # A dry run says it before the jobs and after them.
    return [{rule: int(count) for rule, count in table.items()} for table in found[::2]]


@pytest.mark.parametrize("name", slow_but(("tiny",), ("tiny", "ablate_rho")))
def test_a_name_plans_the_report_and_every_ablation(workflow: Workflow, name: str) -> None:
    study = STUDIES[name]
    (planned,) = counts(workflow.run("snakemake", "--dry-run", study.name))
    assert planned["train"] == len(study.all_arms()) * len(study.seeds)
    assert {f"ablation_{ablation}" for ablation in study.ablations} | {
        "html",
        "summarise",
        study.name,
    } <= planned.keys()


def test_a_study_named_like_a_rule_is_refused(workflow: Workflow) -> None:
    file = workflow.folder / "studies/train.yaml"
    file.write_text((workflow.folder / TINY).read_text(encoding="utf-8").replace("name: tiny", "name: train"), "utf-8")
    said = output(workflow.run("snakemake", "--dry-run", "train"))
    file.unlink()
    assert "train.yaml: train is the name of a rule; give the file another name" in said and "Traceback" not in said


def test_a_name_is_short_for_its_file(workflow: Workflow) -> None:
    def plan(*words: str) -> list[str]:
        ended = workflow.run("snakemake", "--dry-run", *words)
        assert ended.returncode == 0, output(ended)
        return sorted(PLANNED.findall(output(ended)))

    more = ("--config", "seeds=[7]", "training={steps: 2}")
    by_name = plan("tiny", *more)
    assert by_name == plan("all", "ablations", "--configfile", "studies/tiny.yaml", *more)
    assert by_name == plan("tiny", "--configfile", "studies/tiny.yaml", *more)


def test_what_trains_nothing_plans_its_page(workflow: Workflow) -> None:
    assert counts(workflow.run("snakemake", "--dry-run", "gradient_quality")) == [
        {"measure_gradients": 1, "gradients": 1, "gradient_quality": 1, "total": 3}
    ]
    (planned,) = counts(workflow.run("snakemake", "--dry-run", "smollm2_checks"))
    assert (planned["distributions"], planned["smollm2_model"], planned.get("train")) == (1, 1, None)
    (planned,) = counts(workflow.run("snakemake", "--dry-run", "flips_layers2"))
    assert (planned["distributions"], planned["compare"], planned.get("train")) == (1, 1, None)


@pytest.mark.parametrize(
    ("text", "trains"),
    [
        ('name: spelt\nextends: "shared/flips.yaml"\n', False),
        ("{name: spelt, extends: ./shared/../shared/flips.yaml}\n", False),
        ("name: spelt\nextends: flips_layers2.yaml  # which extends it\n", False),
        ("name: spelt\nextends: tiny.yaml\n# not extends: shared/flips.yaml\n", True),
    ],
)
def test_what_trains_nothing_is_read_in_any_spelling(workflow: Workflow, text: str, trains: bool) -> None:
    file = workflow.folder / "studies/spelt.yaml"
    file.write_text(text, encoding="utf-8")
    try:
        (planned,) = counts(workflow.run("snakemake", "--dry-run", "spelt"))
    finally:
        file.unlink()
    assert ("train" in planned, "distributions" in planned) == (trains, not trains)


def test_figure_1_is_of_the_papers_study(workflow: Workflow) -> None:
    (planned,) = counts(workflow.run("snakemake", "--dry-run", "figure1"))
    assert (planned["train"], planned["figure1"], planned.get("html")) == (3, 1, None)


@pytest.mark.slow  # the first study that fails
@pytest.mark.parametrize("compared", slow_but(("ablate_domain",), COMPARED))
def test_studies_side_by_side_are_planned_one_after_another(workflow: Workflow, compared: str) -> None:
    """Each by a Snakemake of its own, with the options of the first; the last one plans the comparison too."""
    planned = counts(workflow.run("snakemake", "--dry-run", compared, "--config", "seeds=[1,2]"))
    assert [table["train"] for table in planned] == [2 * len(STUDIES[name].arms) for name in COMPARED[compared]]
    assert [table.get("across") for table in planned] == [*(None for _ in planned[1:]), 1]


@pytest.mark.slow  # the test above
def test_the_comparison_is_made_of_what_the_others_left(workflow: Workflow) -> None:
    """Else a run more of theirs would not make it again."""
    run = "results/ablate_domain_arithmetic/train/dvp/seed220/run.json"
    (workflow.folder / run).parent.mkdir(parents=True)
    (workflow.folder / run).touch()
    graph = output(workflow.run("snakemake", "--filegraph", "ablate_domain"))
    boxes = [box for box in graph.split("</table>") if ">results/ablate_domain_words/across.md<" in box]
    assert any(f">{run}<" in box for box in boxes)


def test_only_a_target_names_a_study(workflow: Workflow) -> None:
    """The same word may be an option's value."""
    (planned,) = counts(workflow.run("snakemake", "--dry-run", "--directory", "stress", "tiny"))
    assert planned["train"] == len(STUDIES["tiny"].all_arms()) * len(STUDIES["tiny"].seeds)


@pytest.mark.slow  # the test above
def test_only_a_target_names_studies_side_by_side(workflow: Workflow) -> None:
    planned = counts(workflow.run("snakemake", "--dry-run", "ablate_domain", "--directory", "ablate_domain"))
    assert [table["train"] for table in planned] == [
        len(STUDIES[name].arms) * len(STUDIES[name].seeds) for name in COMPARED["ablate_domain"]
    ]


# --- jobs in other processes -------------------------------------------------------------------------


def test_jobs_in_other_processes_are_told_the_study(workflow: Workflow) -> None:
    """As on a cluster: Snakemake starts itself again for each job, whose command line names no target."""
    last = 'include: "workflow/rules/named.smk"\n'
    with workflow.edited("Snakefile", last, f"{last}print('HANDED ON', workflow.overwrite_configfiles)\n"):
        by_name = output(workflow.run("snakemake", "--dry-run", "tiny"))
    assert f"HANDED ON [{workflow.folder / 'studies/tiny.yaml'!r}]\n" in by_name


# --- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("stress", "collapse"), "one study a call, not stress, collapse: `make stress collapse` runs them one after"),
        (("stress", "--configfile", "studies/tiny.yaml"), "stress names a study itself; beside --configfile name a"),
    ],
)
def test_two_names_in_one_call(workflow: Workflow, words: tuple[str, ...], sentence: str) -> None:
    ended = workflow.run("snakemake", "--dry-run", *words)
    assert ended.returncode != 0 and sentence in output(ended) and "Traceback" not in output(ended)


def test_a_misspelt_name(workflow: Workflow) -> None:
    ended = workflow.run("snakemake", "--dry-run", "stres", "train_dpv", "ablate_lenght")
    assert ended.returncode != 0 and "Traceback" not in output(ended)
    for word, meant in {"stres": "stress", "train_dpv": "train_dvp", "ablate_lenght": "ablate_length"}.items():
        assert f"{word}: there is no such target; did you mean {meant}?\n" in output(ended)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--configfile", TINY, "train_naive"), "there is no file train_naive; a target stands before"),
        (("--profile", "profiles/kubernetes"), "profiles/kubernetes: Snakemake lacks the plugin of this executor"),
    ],
)
def test_what_snakemake_itself_would_not_explain(workflow: Workflow, words: tuple[str, ...], sentence: str) -> None:
    ended = workflow.run("snakemake", "--dry-run", *words)
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("Using ")]
    assert sentence in line


def test_the_words_of_a_call_that_is_right_are_no_misspelt_names(workflow: Workflow) -> None:
    words = ("--dry-run", "--cores", "all", "--rerun-triggers", "mtime", "params", "--forcerun", "train")
    assert "no such target" not in output(workflow.run("snakemake", *words, "--", "train_naive", "ablations"))


def test_the_first_study_that_fails_ends_them_all(workflow: Workflow) -> None:
    ended = workflow.run("snakemake", "--dry-run", "ablate_length", "--config", "seeds=[-1]")
    assert ended.returncode != 0 and output(ended).count("seeds.0") == 1
    assert "ablate_length_3: its Snakemake ended with 1; no other study was started" in output(ended)


MADE_FOR = ("smollm2", "smollm2_checks", "smollm2_fp8_1")


def test_a_model_that_the_workflow_makes_need_not_be_there(workflow: Workflow) -> None:
    """Any other folder has to."""
    assert {getattr(STUDIES[name].policy, "path", "") for name in MADE_FOR} == set(MADE_MODELS)
    assert workflow.run("tailrl", "check", "studies/smollm2.yaml").returncode == 0
    study = workflow.write_study({"policy": {"source": "pretrained", "path": "results/models/smollm"}})
    assert "there is no folder results/models/smollm" in output(workflow.run("tailrl", "check", study))
