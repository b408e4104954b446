# What the rules share: the study and its parts, checked before any job starts, and where their results lie.
import hashlib
import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from snakemake.exceptions import WorkflowError

from tailrl.artifacts.evaluation import parts_of
from tailrl.artifacts.published import file_of_part, has_part
from tailrl.cli import OFFER
from tailrl.config.jobs import PolicyFile
from tailrl.config.load import NOTE, merged, own_results, parse_study, read_config
from tailrl.config.policy import MADE_MODELS
from tailrl.config.source_files import PACKAGE, digest_of_files, job_files
from tailrl.config.study import BASE_ARM, WILDCARD
from tailrl.config.training import without_operational
from tailrl.planning.formats import without_lacking
from tailrl.reports import distributions
from tailrl.reports.figures import FIGURES, SNAPSHOT_FIGURES, TABLES, caption_file
from tailrl.runtime.atomic_files import forget_finished, hold, write_whole
from tailrl.runtime.devices import attached, cpu_flags, visible
from tailrl.runtime.errors import StudyError, reason, say

if WILDCARD.search(str(home)):
    raise WorkflowError(
        f"{home.resolve()}: Snakemake takes braces in the workflow's path for wildcards; start it in that folder, "
        "without --directory, or rename the folder"
    )

try:
    # Snakemake has read the files already, but takes the last of two equal keys without a word, and extends none.
    files = [read_config(file) for file in workflow.configfiles]
    config.pop("extends", None)
    whole = parse_study(
        merged(*files, config), " ".join(map(str, workflow.configfiles)) or "study"
    )
    # By the names of their folders: results/<study>, or of a study with parts results/<study>/<part>.
    studies = whole.each()
    for name, study in studies.items():
        study.check_files()
        # Where jobs run elsewhere, or on GPUs, this machine's CPU says nothing of them.
        if (
            workflow.is_main_process
            and workflow.resource_settings.nodes is None
            and not attached()
        ):
            studies[name], left_out = without_lacking(study, cpu_flags())
            if left_out:
                say(f"{name}: {left_out}" if whole.parts else left_out)
except StudyError as error:
    raise WorkflowError(str(error)) from None

R = "results/{study}"
# Behind a job's message: which part it is of.
OF_PART = " of {wildcards.study}" if whole.parts else ""
# The untrained policy's evaluations, by the names of their files.
untrained = {
    name: {BASE_ARM: study.evaluation, **study.baseline_evaluations()}
    for name, study in studies.items()
}
runs = {name: study.runs() for name, study in studies.items()}
seeds = {
    name: {**dict.fromkeys(untrained[name], (0,)), **study.arm_seeds()}
    for name, study in studies.items()
}
# Whether a run keeps policies on the way, and an engine its experts: alike in all parts.
any_study = next(iter(studies.values()))
has_snapshots = any_study.training.snapshot_every is not None
says_experts = any_study.says_experts


def study_of(wildcards):
    return studies[wildcards.study]


# A file can be asked for whose arm, engine or ablation only another part has.
def in_part(settings, wildcards, name):
    if name not in settings:
        there = f"; it has {', '.join(settings)}" if settings else ""
        raise WorkflowError(f"{wildcards.study} has no {name!r}{there}")
    return settings[name]


def run_of(wildcards):
    return in_part(runs[wildcards.study], wildcards, wildcards.arm)


MODEL_FILES = (
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
# The environment of `--sdm conda`, by the variable that make has too; where jobs run elsewhere, only it can tell. Snakemake
# formats this path.
pins = os.getenv("PINS") or f"envs/{'gpu' if attached() else 'cpu'}.txt"
conda_env = str(Path(home, pins).resolve().with_suffix(".yaml"))
conda_env = conda_env.replace("{", "{{").replace("}", "}}")


# The source files of a job, for `params`, by their digest when the rules were read: Snakemake tracks no imported code, and
# takes an input file that was edited while the job ran for what the job was made by.
def sources(files_of):
    return lambda wildcards: digest(
        tuple(files_of(wildcards) if callable(files_of) else files_of)
    )


digest = cache(digest_of_files)


# What Snakemake compares with the settings of the last time: those that change a number. It looks for no wildcards in what
# a function returns, and a study's description may hold {word}.
def compared(settings_of):
    return lambda wildcards: json.dumps(
        without_operational(settings_of(wildcards).model_dump(mode="json"))
    )


# A job gets all its settings, in a file: one argument of a command holds 128 KiB. The file is named after its content, so
# that no edit changes the settings of a job that runs; Snakemake does not compare its path, a function of `output`. A dry
# run writes nothing.
def in_file(text_of):
    def path(wildcards, output):
        data = text_of(wildcards).encode()
        file = Path(
            ".snakemake/settings", f"{hashlib.sha256(data).hexdigest()[:32]}.json"
        )
        if not (file.is_file() or workflow.dryrun):
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(data, Path(f"{file}.{os.getpid()}"), file)
            except OSError as error:
                raise WorkflowError(
                    f"{file}: could not be written: {reason(error)}"
                ) from None
        return str(file)

    return path


def settings_file(settings_of):
    return in_file(lambda wildcards: settings_of(wildcards).model_dump_json())


def policy_folder(study, arm, seed):
    return (
        f"results/{study}/base"
        if arm in untrained[study]
        else f"results/{study}/train/{arm}/seed{seed}/policy"
    )


def snapshot_folders(study, arm):
    return [
        f"results/{study}/train/{arm}/seed{seed}/snapshots"
        for seed in seeds[study][arm]
        if has_snapshots and arm not in untrained[study]
    ]


# Paths, not `rules.train.output`: that is no pattern for `expand` where a profile says `default-storage-provider`.
def run_files(study, arms, *names):
    return [
        f"results/{study}/train/{arm}/seed{seed}/{name}"
        for arm in arms
        for seed in seeds[study][arm]
        for name in names
    ]


RUN_FILES = ("metrics.jsonl", "tokens.npz", "run.json", "manifest.json")


def arm_results(study, arms):
    return run_files(study, arms, *RUN_FILES) + [
        f"results/{study}/eval/{arm}.{ending}"
        for arm in [*untrained[study], *arms]
        for ending in ("json", "manifest.json")
    ]


PAGES = {
    "report": ("summary.html", "summary.md"),
    "distributions": ("distributions/distributions.html",),
    "gradients": ("gradients/gradient_quality.md",),
}


def pages_of(study):
    return [
        f"results/{study}/{page}"
        for kind in studies[study].pages
        for page in PAGES[kind]
    ]


def problems_of(wildcards):
    return study_of(wildcards).problems()


def policy_of(wildcards):
    return PolicyFile(policy=study_of(wildcards).policy)


# A study may name a model that the workflow makes itself before it is there.
def local_model(wildcards):
    path = getattr(study_of(wildcards).policy, "path", None)
    if path in MADE_MODELS:
        return [f"{path}/{file}" for file in MODEL_FILES]
    return study_of(wildcards).local_policy()


def evaluation_of(wildcards):
    return untrained[wildcards.study].get(wildcards.arm, study_of(wildcards).evaluation)


def evaluation_files(wildcards):
    return job_files("evaluate", study_of(wildcards).evaluation)


def ablated_results(wildcards):
    study = study_of(wildcards)
    in_part(study.ablations, wildcards, wildcards.ablation)
    return arm_results(wildcards.study, study.ablation_arms(wildcards.ablation))


def seeds_of(wildcards):
    return in_part(seeds[wildcards.study], wildcards, wildcards.arm)


def gradients_of(wildcards):
    return study_of(wildcards).gradients()


def comparison_of(wildcards):
    study = study_of(wildcards)
    in_part(study.distributions.engines, wildcards, wildcards.engine)
    return study.compared(wildcards.engine)


def trainers_own(wildcards):
    return study_of(wildcards).trainers_own()


def engines_of(wildcards):
    return study_of(wildcards).distributions.engines


def known_claims(wildcards):
    roots = (Path("results"), home / "docs/results")
    return [str(path) for root in roots for path in sorted(root.glob("**/*claims.csv"))]


# Captions lie beside the code that draws, in the topics' folders.
def caption_of(name):
    return f"../{caption_file(name).relative_to(PACKAGE.parent)}"


def in_each(file):
    return [f"results/{name}/{file}" for name in studies]


def ablation_pages(*names):
    return [
        f"results/{study}/ablations/{name}.md"
        for study, settings in studies.items()
        for name in settings.ablations
        if not names or name in names
    ]


# What a page does not read must not make it stale.
def without(*fields):
    return lambda wildcards: study_of(wildcards).model_copy(
        update={
            field: type(study_of(wildcards))
            .model_fields[field]
            .get_default(call_default_factory=True)
            for field in fields
        }
    )


UNREAD = ("gradient_quality", "distributions", "makes", "endpoint")
reported = without(*UNREAD)
summarised = without(*UNREAD, "ablations")


# The folders of parts' tables; of `finished`, those that are here, or else as published.
def folders_to_pool(wildcards):
    parts = whole.pooled_parts
    if wildcards.which == "pooled":
        return [f"results/{part}/tables" for part in parts]
    places = [
        (Path("results", part, "tables"), home / "docs/results" / part)
        for part in parts
    ]
    there = [
        [str(place) for place in pair if has_part(place, whole.pooled.tables)]
        for pair in places
    ]
    return [pair[0] for pair in there if pair]


def tables_to_pool(wildcards):
    return [
        str(file_of_part(Path(folder), table))
        for folder in folders_to_pool(wildcards)
        for table in whole.pooled.tables
    ]


# The command of a job with an engine in it. A process that was killed or hung, or whose engine failed, is started once
# more, and its log goes on. One that exits with 1 has said what must be mended: `retries` would repeat that too, since it
# knows no exit codes. One that was asked to end (Ctrl-C: 130, a scheduler: 143) is to stay ended.
def once_more(command):
    return (
        f"job() {{{{ {command} 2>> {{log:q}}; }}}}\n"
        "job || {{ code=$?; [ $code -gt 1 ] && [ $code -ne 130 ] && [ $code -ne 143 ] && "
        'echo "tailrl: the process ended with $code and is started once more" >> {log:q} && job; }}'
    )


# Snakemake ends with a traceback where it may not remove an old result or write its own notes.
def check_writable(folder):
    existing = next(
        path for path in (Path(folder), *Path(folder).parents) if path.exists()
    )
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise WorkflowError(f"{existing}: results cannot be written there")


check_writable(".snakemake")
for name in studies:
    for folder in (f"results/{name}", *Path("results", name).glob("*/")):
        check_writable(folder)

# What this process holds until it ends.
held = []


onstart:
    # Nothing may run that would overwrite another study. Where a second Snakemake ends, it takes the locks of the first with
    # it (9.27): so the study is locked too.
    folder = Path("results", whole.name)
    folder.mkdir(parents=True, exist_ok=True)
    held.append(hold(folder / NOTE))
    if held[-1] is None:
        raise WorkflowError(
            f"{folder}: another Snakemake runs this study; wait for its end, or stop it"
        )
    try:
        note = own_results(
            folder, Path(os.path.abspath(workflow.configfiles[0])), whole
        )
    except StudyError as error:
        raise WorkflowError(str(error)) from None
    (folder / NOTE).write_text(f"{note}\n")
    # Here jobs fork from a process that has imported torch, where the system can do that, and without CUDA, which forbids it.
    # A job of several ranks starts its own processes.
    elsewhere = workflow.non_local_exec or attached() or visible()
    elsewhere = elsewhere or max(ranks_of("train"), ranks_of("evaluate")) > 1
    if hasattr(os, "pidfd_open") and not elsewhere:
        engines = {
            settings.sampler.engine
            for name, study in studies.items()
            for settings in (study.evaluation, *runs[name].values())
        }
        libraries = "torch,vllm" if "vllm" in engines else "torch"
        held.append(TemporaryDirectory(prefix="tailrl-jobs-"))
        os.environ[OFFER] = f"{os.getpid()} {libraries} {held[-1].name}"


# Finished runs' results have a second name until Snakemake has seen the runs' ends (`tailrl.training.results`), and so have
# evaluated policies: those that this call was asked for, since of others it has seen no end.
onsuccess:
    for job in workflow.dag.jobs:
        if job.rule.name == "train":
            forget_finished(Path(job.output.run).parent / "checkpoints")
        elif job.rule.name == "evaluate":
            shutil.rmtree(parts_of(Path(job.output.summary)), ignore_errors=True)
    pages = [
        page
        for name in studies
        for page in pages_of(name)
        if not page.endswith("summary.md")
    ]
    pages += [f"results/{whole.name}/pooled/pooled.md"] if whole.pooled else []
    if there := [page for page in pages if Path(page).exists()]:
        say(f"look at {', '.join(there)}")


wildcard_constraints:
    study="|".join(map(re.escape, studies)),
    model="|".join(Path(path).name for path in MADE_MODELS),
    arm="|".join(
        map(re.escape, dict.fromkeys(arm for arms in seeds.values() for arm in arms))
    ),
    seed=r"\d+",
    ablation="|".join(
        map(
            re.escape,
            dict.fromkeys(a for study in studies.values() for a in study.ablations),
        )
    )
    or "none",
    engine="|".join(
        map(
            re.escape,
            dict.fromkeys(
                e for study in studies.values() for e in study.distributions.engines
            ),
        )
    ),
