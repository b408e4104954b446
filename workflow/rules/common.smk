# What the rules share: the study, checked before any job starts, and where its results lie.
import os
import platform
import re
from pathlib import Path

from snakemake.exceptions import WorkflowError

from tailrl.distribution_settings import DistributionSettings
from tailrl.errors import StudyError
from tailrl.gradient_settings import GradientQuality
from tailrl.modules import sampling_files, source_files, training_files
from tailrl.settings import Evaluation, PolicyFile
from tailrl.study import BASE_ARM, merged, parse_study, read_config

try:
    # Snakemake has read the files already, but takes the last of two equal keys without a word, and extends none.
    files = [read_config(file) for file in workflow.configfiles]
    config.pop("extends", None)
    study = parse_study(
        merged(*files, config), " ".join(map(str, workflow.configfiles)) or "study"
    )
    study.check_files()
except StudyError as error:
    raise WorkflowError(str(error)) from None

results = f"results/{study.name}"
conda_env = f"{workflow.basedir}/envs/cpu.yaml"


def check_writable(folder):
    existing = next(
        path for path in (Path(folder), *Path(folder).parents) if path.exists()
    )
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise WorkflowError(f"{existing}: results cannot be written there")


def policy_folder(arm, seed):
    return (
        f"{results}/base"
        if arm == BASE_ARM
        else f"{results}/train/{arm}/seed{seed}/policy"
    )


def arm_seeds(arm):
    return (0,) if arm == BASE_ARM else study.seeds


def arm_results(arms):
    runs = [
        f"{results}/train/{arm}/seed{seed}/{file}"
        for arm in arms
        for seed in study.seeds
        for file in RUN_FILES
    ]
    return runs + [f"{results}/eval/{arm}.json" for arm in [BASE_ARM, *arms]]


# What the pages over all studies are made of: whatever is there.
def finished_runs(wildcards):
    return sorted(map(str, Path("results").glob("*/train/*/seed*/run.json")))


def known_claims(wildcards):
    roots = ("results", "docs/results")
    return [
        str(path)
        for root in roots
        for path in sorted(Path(root).glob("**/*claims.csv"))
    ]


RUN_FILES = ("metrics.jsonl", "tokens.npz", "run.json")

check_writable(results)


# For `tailrl unlock`, which can look for a running Snakemake on its own machine alone.
onstart:
    Path(".snakemake/host").write_text(platform.node())


wildcard_constraints:
    arm="|".join(map(re.escape, [BASE_ARM, *study.all_arms()])),
    seed=r"\d+",
    engine="|".join(map(re.escape, study.distributions.engines)),
