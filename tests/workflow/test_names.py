"""One name means one thing: rules, studies, parts, arms and ablations; and what is asked for is what is planned."""

import os
import re
import subprocess
from collections import Counter

import pytest
from parts_fixture import IN_PARTS
from study_fixture import ROOT, TINY, Workflow, copy_workflow

from tailrl.artifacts.published import read_published, write_table
from tailrl.artifacts.tables import read_csv, write_csv
from tailrl.config.load import read_study
from tailrl.config.policy import MADE_MODELS
from tailrl.config.study import Study
from tailrl.planning.formats import without_lacking
from tailrl.reports.overview.evidence import command_of, read_made_for
from tailrl.runtime.devices import cpu_flags

FILES = [*sorted((ROOT / "studies").glob("*.yaml")), *sorted((ROOT / "studies/search").glob("*.yaml"))]
STUDIES: dict[str, Study] = {
    path.relative_to(ROOT / "studies").with_suffix("").as_posix(): read_study(path) for path in FILES
}
RULES = [
    name
    for file in [ROOT / "Snakefile", ROOT / "workflow/Snakefile", *sorted((ROOT / "workflow/rules").glob("*.smk"))]
    for name in re.findall(r"^ *rule (\w+):", file.read_text(encoding="utf-8"), re.MULTILINE)
]


@pytest.fixture(scope="module")
def workflow(tmp_path_factory: pytest.TempPathFactory) -> Workflow:
    return copy_workflow(tmp_path_factory.mktemp("names"))


def output(ended: subprocess.CompletedProcess[str]) -> str:
    return ended.stdout + ended.stderr


# --- what the names are ------------------------------------------------------------------------------


def test_no_name_means_two_things() -> None:
    """Rules, and what a study adds: a rule an arm, a rule an ablation, a rule a part."""
    assert len(RULES) >= 20 and [name for name, count in Counter(RULES).items() if count > 1] == []
    for study in [read_study(ROOT / "config.yaml"), *STUDIES.values()]:
        added = [f"part_{part}" for part in study.parts]
        for part in study.each().values():
            added += [name for arm in part.arms if (name := f"train_{arm}") not in added]
            added += [name for ablation in part.ablations if (name := f"ablation_{ablation}") not in added]
        assert not set(added) & set(RULES), study.name


def test_no_study_is_called_what_make_does() -> None:
    """Else `make soak` would be either."""
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(targets) > 10 and "soak" in targets
    assert set(targets) & STUDIES.keys() == set()


def test_a_job_is_called_what_its_rule_is() -> None:
    texts = [file.read_text(encoding="utf-8") for file in sorted((ROOT / "workflow/rules").glob("*.smk"))]
    pairs = re.findall(r"^ *rule (\w+):((?:(?!^ *rule\b).)*)", "\n".join(texts), re.MULTILINE | re.DOTALL)
    jobs = {rule: job.replace("-", "_") for rule, text in pairs for job in re.findall(r"tailrl job ([a-z-]+)", text)}
    assert len(jobs) > 10
    assert {rule: job for rule, job in jobs.items() if rule != job} == {}


def test_a_study_is_called_what_its_file_is() -> None:
    assert {name: study.name for name, study in STUDIES.items() if name.replace("/", "_") != study.name} == {}


def test_no_study_is_a_part_of_another_one() -> None:
    """Its name would be that of the other with something behind it, and its file would extend a shared one alone."""
    names = sorted(STUDIES)
    assert [name for name in names if re.fullmatch(r".*_(seed)?\d+", name) and name.rpartition("_")[0] in names] == []


def test_the_readme_of_studies_lists_every_study() -> None:
    text = (ROOT / "studies/README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[`([\w/]+)`\]\(([\w/]+)\.yaml\)", text, re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(STUDIES) and all(name == file for name, file in listed)


def test_every_command_of_a_page_is_a_name() -> None:
    """The pages print `make NAME`: a study's name, or one of make's own."""
    made_for = read_made_for([ROOT / "docs/results"]).made_for
    commands = {"make test", *(command_of(study) for study in made_for)}
    printed = {word for command in commands for word in command.removeprefix("make ").split()}
    assert len(printed) > 15
    assert printed - STUDIES.keys() <= {
        "reproduce",
        "test",
        "",
        "distributions",
        "gradients",
        "figure1",
        "optimum",
    }


def test_make_knows_every_study() -> None:
    made = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    assert {*STUDIES, "figure1", "distributions", "gradients", "overview"} <= set(made)
    # Not what a make that runs these tests was given, ARGS among it.
    own = {key: value for key, value in os.environ.items() if "MAKE" not in key and key not in ("ARGS", "MFLAGS")}
    for name, command in {
        "stress": "snakemake --cores all all ablations --configfile studies/stress.yaml",
        "search/dose": "snakemake --cores all all ablations --configfile studies/search/dose.yaml",
        "overview": "snakemake --cores all overview",
    }.items():
        words = ["make", "--no-print-directory", "-n", name]
        said = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=own).stdout
        assert said.rstrip().endswith(f"&& {command}")


# --- what is planned ---------------------------------------------------------------------------------


def planned(workflow: Workflow, *words: str) -> dict[str, int]:
    """Jobs by rule."""
    ended = workflow.run("snakemake", "--dry-run", *words)
    assert ended.returncode == 0, output(ended)
    table = re.findall(r"^Job stats:\njob +count\n[- ]+\n(.*?)\n\n", output(ended), re.MULTILINE | re.DOTALL)[0]
    return {rule: int(count) for rule, count in (line.split() for line in table.splitlines())}


def test_all_and_ablations_are_a_whole_study(workflow: Workflow) -> None:
    study = STUDIES["tiny"]
    jobs = planned(workflow, "all", "ablations", "--configfile", TINY)
    assert jobs["train"] == len(study.all_arms()) * len(study.seeds)
    assert (jobs["ablation"], jobs["summarise"]) == (len(study.ablations), 1)


@pytest.mark.slow
def test_a_part_is_planned_alone_and_all_of_them_with_the_page_over_them(workflow: Workflow) -> None:
    # Some of its engines' formats need AVX-512.
    study, _ = without_lacking(IN_PARTS["causes"].each()["causes/3"], cpu_flags())
    runs = len(study.arms) * len(study.seeds)
    jobs = planned(workflow, "part_3", "--configfile", "studies/causes.yaml")
    assert (jobs["problems"], jobs["train"], jobs["summarise"], jobs.get("pool")) == (1, runs, 1, None)
    jobs = planned(workflow, "--configfile", "studies/causes.yaml")
    assert (jobs["problems"], jobs["train"], jobs["summarise"], jobs["pool"]) == (5, 5 * runs, 5, 1)


def test_a_part_has_its_own_settings_in_its_own_folder(workflow: Workflow) -> None:
    """And a part that sets nothing of a kind has the study's."""
    parts = {"few": {"seeds": [7]}, "more": {"arms": {"dvp_mis": None, "extra": {}}}}
    study = workflow.write_study({"parts": parts, "ablations": {}})
    shown = workflow.run("snakemake", "--dry-run", "--configfile", study, "--quiet", "host")  # with reasons
    runs = set(re.findall(r"results/(\S+)/seed(\d+)/run\.json", shown.stdout))
    assert runs >= {("tiny/few/train/naive", "7"), ("tiny/few/train/dvp_mis", "7"), ("tiny/more/train/extra", "0")}
    assert not {run for run in runs if run[0] in ("tiny/more/train/dvp_mis", "tiny/few/train/extra")}
    assert "train naive, seed 7 of tiny/few" in shown.stdout


@pytest.mark.parametrize("file", ["train/extra/seed0/run.json", "eval/extra.json"])
def test_a_file_of_an_arm_that_only_another_part_has(workflow: Workflow, file: str) -> None:
    study = workflow.write_study({"parts": {"few": {}, "more": {"arms": {"extra": {}}}}, "ablations": {}})
    ended = workflow.run("snakemake", "--dry-run", f"results/tiny/few/{file}", "--configfile", study)
    assert ended.returncode != 0
    assert "tiny/few has no 'extra'; it has " in output(ended)
    assert "KeyError" not in output(ended)


@pytest.mark.long  # the tests above
def test_what_is_published_is_pooled_from_there(workflow: Workflow) -> None:
    """Parts that are here come first."""
    for table, column in (("policies", "avg_mean"), ("first_k3", "k3")):
        studies = read_published(ROOT / "docs/results", table)
        write_csv(workflow.folder / f"results/causes/2/tables/{table}.csv", studies["causes/2"])
        studies["causes/2"] = [row | {column: "0.5"} for row in studies["causes/2"]]
        write_table(workflow.folder / "docs/results", table, studies)
    ended = workflow.run("snakemake", "--cores", "1", "finished", "--configfile", "studies/causes.yaml")
    assert ended.returncode == 0, output(ended)
    made = workflow.folder / "results/causes/finished"
    for table in ("comparisons", "measures"):
        rows = [{"page": "pooled/pooled", **row} for row in read_csv(made / f"{table}.csv")]
        assert rows == read_published(ROOT / "docs/results", table)["causes"]


@pytest.mark.parametrize(
    ("study", "jobs"),
    [
        ("gradient_quality", {"measure_gradients": 1, "gradient_page": 1, "train": None}),
        ("smollm2_checks", {"distribution_page": 1, "smollm2_model": 1, "train": None}),
        ("flips", {"distribution_page": 13, "compare": 13, "policy": 13, "train": None}),
    ],
)
def test_what_trains_nothing_plans_its_page(workflow: Workflow, study: str, jobs: dict[str, int | None]) -> None:
    found = planned(workflow, "--configfile", f"studies/{study}.yaml")
    assert {rule: found.get(rule) for rule in jobs} == jobs


def test_figure_1_is_of_a_study_that_keeps_policies_on_the_way(workflow: Workflow) -> None:
    jobs = planned(workflow, "figure1", "--configfile", "studies/paper.yaml")
    assert (jobs["train"], jobs["figure1"], jobs["summarise"]) == (3, 1, 1)


def test_the_file_of_the_catalogue_is_the_same_workflow(workflow: Workflow) -> None:
    """Which Snakemake's catalogue, and `module`, expect at workflow/Snakefile."""
    assert planned(workflow, "--snakefile", "workflow/Snakefile")["train"] == planned(workflow)["train"]


@pytest.mark.long  # the test above
def test_the_workflow_is_a_module_of_another_one(workflow: Workflow) -> None:
    """As `snakedeploy` writes it, in another folder; a job of it runs."""
    folder = workflow.folder / "deployed"
    folder.mkdir()
    (folder / "Snakefile").write_text(
        f'configfile: "{workflow.folder / TINY}"\n'
        f'module tailrl:\n    snakefile: "{workflow.folder / "workflow/Snakefile"}"\n    config: config\n'
        "use rule * from tailrl\n"
    )
    words = ("--snakefile", str(folder / "Snakefile"), "--directory", str(folder))
    assert planned(workflow, *words)["train"] == 4
    ended = workflow.run("snakemake", "--cores", "1", "results/tiny/data/train.jsonl", *words)
    assert ended.returncode == 0, output(ended)


def test_a_page_of_finished_parts_asks_for_no_job_of_theirs(workflow: Workflow) -> None:
    """Also where an edit has made them stale."""
    study = workflow.write_study(
        {"name": "halves", "parts": {"1": {}, "2": {}}, "pooled": {"title": "t"}}, name="h.yaml"
    )
    table = workflow.folder / "results/halves/1/tables/policies.csv"
    table.parent.mkdir(parents=True)
    table.write_text("arm,seed,avg_mean\nbase,0,0.5\n", encoding="utf-8")
    assert planned(workflow, "finished", "--configfile", study) == {"pool": 1, "finished": 1, "total": 2}


def test_a_misspelt_target(workflow: Workflow) -> None:
    ended = workflow.run("snakemake", "--dry-run", "train_dpv")
    assert ended.returncode != 0 and "train_dpv" in output(ended) and "Traceback" not in output(ended)


MADE_FOR = ("smollm2", "smollm2_checks", "smollm2_fp8")


def test_a_model_that_the_workflow_makes_need_not_be_there(workflow: Workflow) -> None:
    """Any other folder has to."""
    assert {getattr(STUDIES[name].policy, "path", "") for name in MADE_FOR} == set(MADE_MODELS)
    assert workflow.run("tailrl", "check", "studies/smollm2.yaml").returncode == 0
    study = workflow.write_study({"policy": {"source": "pretrained", "path": "results/models/smollm"}})
    assert "there is no folder results/models/smollm" in output(workflow.run("tailrl", "check", study))
