"""The commands for the workflow's rules: one command a rule.

A job takes the digests of its source files before it imports them, and flushes its files to the disk before it ends:
Snakemake notes the end, and reads no file. Before that, a job with an engine takes GPUs of its own.
"""

import os
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from tailrl.artifacts.evaluation import parts_of
from tailrl.artifacts.manifest import MANIFEST, files_in, write_manifest
from tailrl.cli.job_client import UNUSED
from tailrl.cli.values import Noted, seed_and_folder, units, whole_number
from tailrl.config.distributions import Distributions
from tailrl.config.gradients import Gradients
from tailrl.config.jobs import Evaluation, PolicyFile, Problems, Run
from tailrl.config.load import parse_settings
from tailrl.config.source_files import at_start, job_files
from tailrl.config.study import Study
from tailrl.runtime.atomic_files import sync
from tailrl.runtime.devices import on_its_own, take
from tailrl.runtime.errors import StudyError, reason, say
from tailrl.runtime.imports import without
from tailrl.runtime.launch import launch
from tailrl.runtime.limits import enough_address_space, enough_shared_memory

app = Typer(add_completion=False, rich_markup_mode="markdown")
app.callback(help="The jobs of the workflow, as its rules call them.")(enough_address_space)
command = partial(app.command, cls=Noted)

SettingsText = Annotated[str, Option(help="the job's settings: JSON text, or a file that holds it", metavar="JSON")]
WholeStudy = Annotated[str, Option(help="the study: JSON text, or a file that holds it", metavar="JSON")]
ProblemFile = Annotated[Path, Option(help="the problems, one a line")]
PolicyFolder = Annotated[Path, Option(help="the folder of the policy")]
Folder = Annotated[Path, Option(help="the folder to read")]
Out = Annotated[Path, Option(help="the file or folder to write")]
Roots = Annotated[list[Path], Argument(help="folders of results", show_default=False)]
PartTables = Annotated[list[Path] | None, Option(help="folder of a finished part's tables; once for each")]


@command()
def problems(settings: SettingsText, out: Out) -> None:
    """Write the problems of a study."""
    tasks = parse_settings(Problems, settings)
    sources = at_start(job_files("problems", tasks))
    from tailrl.tasks.prepare import write_all_problems

    write_all_problems(tasks, out)
    write_manifest(out / MANIFEST, files_in(out), sources=sources)
    sync(out)


@command()
def policy(settings: SettingsText, problems: ProblemFile, out: Out) -> None:
    """Write the policy that reinforcement learning starts from."""
    made = parse_settings(PolicyFile, settings).policy
    at_start(job_files("policy", made))
    with without(UNUSED):
        from tailrl.training.base_policy import write_base_policy

    write_base_policy(made, problems, out)
    sync(out)


@command()
def train(
    settings: SettingsText,
    seed: Annotated[int, Option(parser=whole_number, metavar="N")],
    policy: PolicyFolder,
    problems: ProblemFile,
    out: Out,
    wandb: Annotated[Path, Option(help="the folder of W&B's files")],
    ranks: Annotated[int, Option(parser=units, metavar="N", help="processes that share the run")] = 1,
) -> None:
    """Train one arm with one seed."""
    run = parse_settings(Run, settings)
    if run.training.backend == "verl":
        at_start(job_files("train", run))
        with without(UNUSED):
            from tailrl.training.verl import train as train_by_verl

        if "RAY_ADDRESS" not in os.environ:  # else the cluster places verl's workers
            take(ranks)
        train_by_verl(run, seed, policy, problems, out, wandb, ranks)
        _write_card(out)
        return
    if "RANK" not in os.environ and take(ranks) and ranks > 1:
        enough_shared_memory(ranks)
    if ranks > 1 and "RANK" not in os.environ:
        _launch(ranks)
        return
    at_start(job_files("train", run))
    with without(UNUSED):
        from tailrl.planning.fits import check_training
        from tailrl.training.loop import train as train_run

    check_training(run, policy, int(os.environ.get("WORLD_SIZE", "1")))
    train_run(run, seed, policy, problems, out, wandb)
    if os.environ.get("RANK", "0") != "0":
        return
    _write_card(out)


def _write_card(out: Path) -> None:
    """Not in the loop: an edit of the card's words makes no run stale, and a run without its card is kept."""
    from tailrl.evaluation.model_card import write_card

    try:
        write_card(out)
    except (StudyError, OSError) as error:
        say(f"{out}: no model card: {reason(error)}")


@command()
def evaluate(
    arm: Annotated[str, Option()],
    settings: SettingsText,
    policy: Annotated[list[str], Option(metavar="SEED=FOLDER", help="a trained policy; once for each")],
    problems: ProblemFile,
    out: Out,
    samples: Annotated[Path, Option(help="the file of the samples to write")],
    snapshots: Annotated[list[str] | None, Option(metavar="SEED=FOLDER", help="policies kept during training")] = None,
    ranks: Annotated[int, Option(parser=units, metavar="N", help="processes that share the policies")] = 1,
) -> None:
    """Evaluate the policies of one arm."""
    evaluation = parse_settings(Evaluation, settings)
    with without(UNUSED):
        from tailrl.training.snapshots import read_snapshots

    policies = [seed_and_folder(text) for text in policy]
    on_the_way = [
        (seed, step, folder)
        for seed, snapshot in (seed_and_folder(text, "--snapshots") for text in snapshots or [])
        for step, folder in read_snapshots(snapshot)
    ]
    ranks = min(ranks, len(policies) + len(on_the_way))
    if "RANK" not in os.environ:
        take(ranks)
        if ranks > 1:
            _launch(ranks)
    share = on_its_own()
    at_start(job_files("evaluate", evaluation))
    with without(UNUSED):
        from tailrl.evaluation.evaluate import evaluate_arm, write_results
        from tailrl.planning.fits import check_sampling

    check_sampling(evaluation.sampler, policies[0][1])
    evaluated = evaluate_arm(arm, policies, problems, evaluation, parts_of(out), on_the_way, share)
    if evaluated is not None:
        write_results(evaluated, out, samples)


def _launch(ranks: int) -> None:
    launch(ranks, [sys.executable, "-P", "-c", "from tailrl.cli import main; main()", *sys.argv[1:]])


@command()
def summarise(study: WholeStudy, results: Folder, out: Out) -> None:
    """Write a study's tables, figures and summary."""
    from tailrl.reports.overview.study import write_report

    write_report(parse_settings(Study, study), results, out)


@command()
def ablation(study: WholeStudy, name: Annotated[str, Option()], results: Folder, out: Out) -> None:
    """Write an ablation's table and figure."""
    from tailrl.reports.ablation.page import write_ablation

    write_ablation(parse_settings(Study, study), name, results, out)


@command()
def measure_gradients(settings: SettingsText, out: Out) -> None:
    """Measure the arms' gradient estimators against the exact gradient."""
    measured = parse_settings(Gradients, settings)
    at_start(job_files("measure_gradients", measured))
    from tailrl.probes.gradients.quality import write_qualities

    write_qualities(measured, out)


@command()
def gradient_page(results: Folder, out: Out) -> None:
    """Write the table and figure of the measured gradients."""
    from tailrl.reports.gradients.page import write_gradients

    write_gradients(results, out)


@command()
def compare(settings: SettingsText, policy: PolicyFolder, problems: ProblemFile, out: Out) -> None:
    """Compare one engine's whole distributions with the trainer's."""
    compared = parse_settings(Distributions, settings)
    take(1)
    at_start(job_files("compare", compared))
    from tailrl.planning.fits import check_sampling
    from tailrl.probes.distributions.measure import write_distributions

    check_sampling(compared.engine.sampler, policy)
    write_distributions(compared, policy, problems, out)
    sync(out)


@command()
def distribution_page(results: Folder, engine: Annotated[list[str], Option(help="once for each")], out: Out) -> None:
    """Write the tables and the figure of the compared distributions."""
    from tailrl.reports.distributions.page import write_distribution_report

    write_distribution_report(results, engine, out)


@command()
def equal_mass_table(settings: SettingsText, policy: PolicyFolder, problems: ProblemFile, out: Out) -> None:
    """Find the k of top-k and the p of top-p that keep as much mass as min-p does."""
    compared = parse_settings(Distributions, settings)
    take(1)
    from tailrl.probes.distributions.equal_mass import write_equal_mass

    write_equal_mass(compared, policy, problems, out)


@command()
def overview(results: Roots, out: Out) -> None:
    """Write the page over all studies."""
    from tailrl.reports.overview.all_studies import write_all_studies

    write_all_studies(results, out)


@command()
def pool(study: WholeStudy, out: Out, part: PartTables = None) -> None:
    """Write the tables, the page and the figure over the finished parts of a study."""
    from tailrl.reports.parts.page import write_pooled

    write_pooled(parse_settings(Study, study), part or [], out)
