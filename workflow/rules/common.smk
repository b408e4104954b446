# What the rules share: the study, checked before any job starts, and where its results lie.
import hashlib
import json
import logging
import os
import platform
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake_interface_logger_plugins.common import LogEvent

from tailrl.artifacts.evaluation import parts_of
from tailrl.artifacts.manifest import tell_of_sources
from tailrl.cli.job_client import OFFER
from tailrl.config.distributions import DistributionSettings
from tailrl.runtime.errors import StudyError, reason, say
from tailrl.runtime.devices import attached, cpu_flags, visible
from tailrl.config.gradients import GradientQuality
from tailrl.config.source_files import digest_of_files, job_files
from tailrl.config.jobs import Evaluation, PolicyFile
from tailrl.config.policy import MADE_MODELS
from tailrl.config.study import BASE_ARM
from tailrl.config.load import (
    NOTE,
    files_of,
    merged,
    own_results,
    parse_study,
    read_config,
)
from tailrl.config.training import without_operational
from tailrl.planning.again import again, manifests
from tailrl.planning.formats import without_lacking
from tailrl.planning.ending import stopped, where_to_look
from tailrl.runtime.atomic_files import forget_finished, hold, write_whole

try:
    # Snakemake has read the files already, but takes the last of two equal keys without a word, and extends none.
    files = [read_config(file) for file in workflow.configfiles]
    config.pop("extends", None)
    study = parse_study(
        merged(*files, config), " ".join(map(str, workflow.configfiles)) or "study"
    )
    study.check_files()
    # Where jobs run elsewhere, or on GPUs, this machine's CPU says nothing of them.
    if (
        workflow.is_main_process
        and workflow.resource_settings.nodes is None
        and not attached()
    ):
        study, left_out = without_lacking(study, cpu_flags())
        if left_out:
            say(left_out)
except StudyError as error:
    raise WorkflowError(str(error)) from None

results = f"results/{study.name}"
# The untrained policy's evaluations, by the names of their files.
untrained = {BASE_ARM: study.evaluation, **study.baseline_evaluations()}
online = os.getenv("WANDB_MODE") == "online"
names_engines = "engines" in study.distributions.model_fields_set
runs = study.runs()
seeds = study.arm_seeds()
# Models that the workflow makes itself. A study may name one before it is there.
made_here = getattr(study.policy, "path", None) in MADE_MODELS
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
conda_env = str(Path(workflow.basedir, pins).with_suffix(".yaml"))
conda_env = conda_env.replace("{", "{{").replace("}", "}}")


# Text for `params` in which Snakemake looks for no wildcards: a study's description may hold {word}.
def plain(text):
    return lambda wildcards: text


REPORT_FILES = job_files("report")


# The digest of source files is a parameter too: of an input Snakemake keeps the checksum at the end of the job, and takes
# what was edited while the job ran for what the job was made by.
def sources(files):
    return lambda wildcards: digest_of_files(files)


# What Snakemake compares with the settings of the last time: those that change a number.
def compared(settings):
    return json.dumps(without_operational(settings.model_dump(mode="json")))


# A job gets all its settings, in a file: one argument of a command holds 128 KiB. The process that starts the job writes
# it, here or on a cluster's node. It is named after its content, so that no edit changes the settings of a job that runs.
# Snakemake does not compare this path, since it is a function of `output`.
def in_file(text_of):
    def path(wildcards, output):
        data = text_of(wildcards).encode()
        file = Path(
            ".snakemake/settings", f"{hashlib.sha256(data).hexdigest()[:32]}.json"
        )
        starts_jobs = workflow.executor_plugin and not (
            workflow.dryrun or workflow.touch
        )
        if starts_jobs and not file.is_file():
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_whole(data, Path(f"{file}.{os.getpid()}"), file)
            except OSError as error:
                raise WorkflowError(
                    f"{file}: could not be written: {reason(error)}"
                ) from None
        return str(file)

    return path


def check_writable(folder):
    existing = next(
        path for path in (Path(folder), *Path(folder).parents) if path.exists()
    )
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise WorkflowError(f"{existing}: results cannot be written there")


def policy_folder(arm, seed):
    return (
        f"{results}/base"
        if arm in untrained
        else f"{results}/train/{arm}/seed{seed}/policy"
    )


# Of every run one folder of policies on the way, where the study keeps any.
has_snapshots = study.training.snapshot_every is not None


def snapshot_folders(arm):
    return [
        f"{results}/train/{arm}/seed{seed}/snapshots"
        for seed in arm_seeds(arm)
        if has_snapshots and arm not in untrained
    ]


def arm_seeds(arm):
    return (0,) if arm in untrained else seeds[arm]


# Paths, not `rules.train.output`: that is no pattern for `expand` where a profile says `default-storage-provider`.
def run_files(arms, *names):
    return [
        f"{results}/train/{arm}/seed{seed}/{name}"
        for arm in arms
        for seed in arm_seeds(arm)
        for name in names
    ]


def arm_results(arms):
    evaluated = [
        f"{results}/eval/{arm}.{ending}"
        for arm in [*untrained, *arms]
        for ending in ("json", "manifest.json")
    ]
    return run_files(arms, *RUN_FILES) + evaluated


def evaluation_of(arm):
    return untrained.get(arm, study.evaluation)


# What the pages over several studies are made of: whatever is there.
def finished_runs(wildcards):
    return sorted(map(str, Path("results").glob("*/train/*/seed*/run.json")))


def finished_results(studies):
    return [
        str(path)
        for name in studies
        for pattern in ("train/*/seed*/run.json", "eval/*.json")
        for path in sorted(Path("results", name).glob(pattern))
    ]


def known_claims(wildcards):
    roots = (Path("results"), home / "docs/results")
    return [str(path) for root in roots for path in sorted(root.glob("**/*claims.csv"))]


# The command of a job with an engine in it. A process that was killed or hung, or whose engine failed, is started once
# more, and its log goes on. One that exits with 1 has said what must be mended: `retries` would repeat that too, since it
# knows no exit codes. One that was asked to end (Ctrl-C: 130, a scheduler: 143) is to stay ended.
def once_more(command):
    return (
        f"job() {{{{ {command} 2>> {{log:q}}; }}}}\n"
        "job || {{ code=$?; [ $code -gt 1 ] && [ $code -ne 130 ] && [ $code -ne 143 ] && "
        'echo "tailrl: the process ended with $code and is started once more" >> {log:q} && job; }}'
    )


RUN_FILES = ("metrics.jsonl", "tokens.npz", "run.json", "manifest.json")

# Snakemake ends with a traceback where it may not remove an old result or write its own notes.
for folder in (".snakemake", results, *Path(results).glob("*/")):
    check_writable(folder)


def study_note():
    file = Path(os.path.abspath(workflow.configfiles[0]))
    return own_results(Path(results), file, study)


# Snakemake counts its jobs before the first one starts, in a dry run too: then a sentence says which run again, and why.
# Nothing may run that would overwrite another study.
def before_the_first_job(record):
    if getattr(record, "event", None) == LogEvent.RUN_INFO:
        logger.removeFilter(before_the_first_job)
        try:
            study_note()
        except StudyError as error:
            say(str(error))
            if not workflow.dryrun:
                sys.exit(1)
        sentence = again(workflow.dag, workflow.persistence)
        if sentence and not workflow.touch:
            say(sentence)
    return True


logger.addFilter(before_the_first_job)


# The messages of the jobs that Ctrl-C stopped: Snakemake tells no hook of it, and prints pages about each as if it had
# failed.
stopped_jobs = None


def note_what_is_stopped(record):
    global stopped_jobs
    if record.getMessage().startswith("Terminating processes on user request"):
        stopped_jobs = [job.message or job.name for job in workflow.scheduler.running]
    return stopped_jobs is None or record.levelno < logging.ERROR


logger.addFilter(note_what_is_stopped)


# What names the study in another call; None where the call named one, and so asked for all of it.
def study_options():
    files = " ".join(os.path.relpath(file) for file in workflow.configfiles)
    default = files in ("config.yaml", str(home / "config.yaml"))
    return None if named else "" if default else f" --configfile {files}"


def say_what_was_edited():
    try:
        tell_of_sources(
            *(path for job in workflow.dag.jobs for path in manifests(job.output))
        )
    except StudyError as error:
        say(str(error))


# What this process holds until it ends. A Snakemake that ends removes the locks of all others in the folder (9.27), so that
# a second one could start on the same study, and both would write the same files.
held = []


# For `tailrl unlock`, which can look for a running Snakemake and its jobs on its own machine alone.
onstart:
    executor = (
        f"\n{workflow.executor_plugin.name}" if workflow.non_local_exec else ""
    )
    Path(".snakemake/host").write_text(platform.node() + executor)
    # Here jobs fork from a process that has imported torch, where the system can do that, and without CUDA, which forbids it.
    # A job of several ranks starts its own processes.
    elsewhere = workflow.non_local_exec or attached() or visible()
    elsewhere = elsewhere or max(ranks_of("train"), ranks_of("evaluate")) > 1
    if hasattr(os, "pidfd_open") and not elsewhere:
        samplers = [
            study.evaluation.sampler,
            *(run.sampler for run in runs.values()),
        ]
        with_vllm = any(sampler.engine == "vllm" for sampler in samplers)
        libraries = "torch,vllm" if with_vllm else "torch"
        held.append(TemporaryDirectory(prefix="tailrl-jobs-"))
        os.environ[OFFER] = f"{os.getpid()} {libraries} {held[-1].name}"
    Path(results).mkdir(parents=True, exist_ok=True)
    held.append(hold(Path(results, NOTE)))
    if held[-1] is None:
        raise WorkflowError(
            f"{results}: another Snakemake runs this study; wait for its end, or stop it"
        )
    Path(results, NOTE).write_text(f"{study_note()}\n")


# Finished runs' results have a second name until Snakemake has seen the runs' ends (`tailrl.training.results`), and so have
# evaluated policies: those of this study that it was asked for.
onsuccess:
    say_what_was_edited()
    made = (str(file) for job in workflow.dag.jobs for file in job.output)
    say(where_to_look(results, made, study.ablations, study_options()))
    for job in workflow.dag.jobs:
        if job.rule.name == "train":
            forget_finished(Path(job.output.run).parent / "checkpoints")
        elif job.rule.name == "evaluate":
            shutil.rmtree(parts_of(Path(job.output.summary)), ignore_errors=True)


onerror:
    say_what_was_edited()
    if stopped_jobs is not None:
        say(stopped(stopped_jobs))
        sys.exit(130)


wildcard_constraints:
    model="|".join(Path(path).name for path in MADE_MODELS),
    arm="|".join(map(re.escape, [*untrained, *runs])),
    seed=r"\d+",
    engine="|".join(map(re.escape, study.distributions.engines)),
