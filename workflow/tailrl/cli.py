"""The command line: one sub-command per rule. Thin: it parses, calls one function, and turns errors into a sentence.

Settings are JSON text or a file that holds it. Heavy libraries are imported by the sub-command that needs them. What a
job gives is on the disk before it ends: Snakemake, which notes the end, does not look into a file.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from tailrl.config.distributions import Distributions
from tailrl.config.gradients import Gradients
from tailrl.config.jobs import Evaluation, PolicyFile, Problems, Run
from tailrl.config.load import parse_settings, read_study
from tailrl.config.study import Study
from tailrl.runtime.atomic_files import sync
from tailrl.runtime.errors import StudyError, reason
from tailrl.runtime.launch import launch, tell_launcher
from tailrl.runtime.timeouts import EngineError, limit_the_end


def problems(args: argparse.Namespace) -> None:
    """Write the problems of a study."""
    from tailrl.tasks.prepare import write_all_problems

    write_all_problems(parse_settings(Problems, args.settings), args.out)
    sync(args.out)


def policy(args: argparse.Namespace) -> None:
    """Write the policy that reinforcement learning starts from."""
    from tailrl.training.base_policy import write_base_policy

    write_base_policy(parse_settings(PolicyFile, args.settings).policy, args.problems, args.out)
    sync(args.out)


def train(args: argparse.Namespace) -> None:
    """Train one arm with one seed."""
    if args.ranks > 1 and "RANK" not in os.environ:
        launch(args.ranks, [sys.executable, "-P", "-c", "from tailrl.cli import main; main()", *sys.argv[1:]])
        return
    from tailrl.evaluation.model_card import write_card
    from tailrl.training.loop import train as train_run

    train_run(parse_settings(Run, args.settings), args.seed, args.policy, args.problems, args.out, args.wandb)
    if os.environ.get("RANK", "0") != "0":
        return
    # Not in the loop: an edit of the card's words makes no run stale, and for want of a card no run is lost.
    try:
        write_card(args.out)
    except (StudyError, OSError) as error:
        print(f"tailrl: {args.out}: no model card: {reason(error)}", file=sys.stderr)


def card(args: argparse.Namespace) -> None:
    """Write the model card of a trained policy again, with what its evaluation found."""
    from tailrl.evaluation.model_card import write_card

    print(write_card(args.run, args.evaluation))


def evaluate(args: argparse.Namespace) -> None:
    """Evaluate the policies of one arm."""
    from tailrl.evaluation.evaluate import evaluate_arm, write_results
    from tailrl.training.snapshots import read_snapshots

    policies = [_seed_and_folder(text) for text in args.policy]
    snapshots = [
        (seed, step, folder)
        for seed, kept in map(_seed_and_folder, args.snapshots)
        for step, folder in read_snapshots(kept)
    ]
    settings = parse_settings(Evaluation, args.settings)
    evaluated = evaluate_arm(args.arm, policies, args.problems, settings, snapshots)
    write_results(evaluated, args.out, args.samples)
    sync(args.out.parent)


def report(args: argparse.Namespace) -> None:
    """Write a study's tables, figures and summary."""
    from tailrl.report.study import write_report

    write_report(parse_settings(Study, args.study), args.results, args.out)


def ablation(args: argparse.Namespace) -> None:
    """Write an ablation's table and figure."""
    from tailrl.report.study import write_ablation

    write_ablation(parse_settings(Study, args.study), args.name, args.results, args.out)


def gradients(args: argparse.Namespace) -> None:
    """Measure the arms' gradient estimators against the exact gradient."""
    from tailrl.probes.gradients.quality import write_qualities

    write_qualities(parse_settings(Gradients, args.settings), args.out)


def gradient_report(args: argparse.Namespace) -> None:
    """Write the table and figure of the measured gradients."""
    from tailrl.report.study import write_gradients

    write_gradients(args.results, args.out)


def distributions(args: argparse.Namespace) -> None:
    """Hold one engine's whole distributions against the trainer's."""
    from tailrl.probes.distributions.measure import write_distributions

    write_distributions(parse_settings(Distributions, args.settings), args.policy, args.problems, args.out)
    sync(args.out)


def distribution_report(args: argparse.Namespace) -> None:
    """Write the tables and the figure of the compared distributions."""
    from tailrl.report.study import write_distribution_report

    write_distribution_report(args.results, args.engine, args.out)


def equal_mass(args: argparse.Namespace) -> None:
    """Find the k of top-k and the p of top-p that keep as much mass as min-p does."""
    from tailrl.probes.distributions.equal_mass import write_equal_mass

    write_equal_mass(parse_settings(Distributions, args.settings), args.policy, args.problems, args.out)


def across(args: argparse.Namespace) -> None:
    """Hold studies against one another that have their arms in common."""
    from tailrl.report.study import write_across

    write_across([read_study(path) for path in args.study], args.results, args.out)


def early_warning(args: argparse.Namespace) -> None:
    """Say which metric announces a collapse, over the runs of one or more studies."""
    from tailrl.report.study import write_early_warning

    write_early_warning(args.results, args.out)


def paper(args: argparse.Namespace) -> None:
    """Write the page over all studies."""
    from tailrl.report.study import CAPTIONS, write_paper

    write_paper(args.results, CAPTIONS, args.out)


def claims(args: argparse.Namespace) -> None:
    """Print every claim's verdict by published results, as docs/claims.md has them."""
    from tailrl.report.study import claims_page, read_shown

    print(claims_page(read_shown([args.results]), args.results.parent), end="")


def download(args: argparse.Namespace) -> None:
    """Fetch the data sets and the model that a study needs, for nodes without a network."""
    from tailrl.model.download import download_inputs

    download_inputs(parse_settings(Study, args.study))


def mirror(args: argparse.Namespace) -> None:
    """Send a W&B server what it has not got of a study's runs."""
    from tailrl.tracking.wandb_mirror import mirror as mirror_runs

    mirror_runs(args.results)


def dashboard(args: argparse.Namespace) -> None:
    """Make a study's workspace and report on a W&B server."""
    from tailrl.tracking.wandb_dashboard import make_dashboard

    make_dashboard(args.results)


def check(args: argparse.Namespace) -> None:
    """Check study files and say what they hold."""
    for path in args.study:
        study = read_study(path)
        try:
            study.check_files()
        except StudyError as error:
            raise StudyError(f"{path}: {error}") from None
        print(f"{path}: {study.name}, {len(study.all_arms())} arms (with ablations), {len(study.seeds)} seeds")


def plan(args: argparse.Namespace) -> None:
    """Say what a study will need, on one machine: memory, time and disk, and what does not fit."""
    from tailrl.planning.machine import read_machine
    from tailrl.planning.page import plan_page

    machine = read_machine(args.machine, args.memory)
    print(plan_page(read_study(args.study), machine, args.gpus, args.prompt, args.response), end="")


def schema(_: argparse.Namespace) -> None:
    """Print the JSON schema of a study file."""
    print(json.dumps(Study.model_json_schema(), indent=2, ensure_ascii=False))


def metrics(_: argparse.Namespace) -> None:
    """Print the table of all metrics that training logs, as docs/metrics.md has it."""
    from tailrl.report.metrics import metrics_page

    print(metrics_page(), end="")


def unlock(_: argparse.Namespace) -> None:
    """Remove the lock that a killed Snakemake left in this folder; the lock of a running one stays."""
    from tailrl.runtime.snakemake_lock import remove_stale_lock

    remove_stale_lock(Path.cwd())


def _seed_and_folder(text: str) -> tuple[int, Path]:
    seed, separator, folder = text.partition("=")
    if not separator or not (seed.isascii() and seed.isdigit()):
        raise StudyError(f"--policy {text}: write it as SEED=FOLDER")
    return int(seed), Path(folder)


def _seed(text: str) -> int:
    return _whole_number(text, 0)


def _positive(text: str) -> int:
    return _whole_number(text, 1)


def _whole_number(text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise argparse.ArgumentTypeError(f"not a whole number from {least} on: {text!r}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with a command line as of everything else: in one sentence."""

    def error(self, message: str) -> NoReturn:
        raise StudyError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """The parser; each sub-command's help is its function's docstring."""
    parser = _Parser(prog="tailrl", description=__doc__.partition("\n")[0] if __doc__ else None)
    commands = parser.add_subparsers(required=True, metavar="command")
    text: dict[str, Any] = {"required": True}
    path: dict[str, Any] = {"required": True, "type": Path}
    options: dict[Callable[[argparse.Namespace], None], dict[str, dict[str, Any]]] = {
        problems: {"--settings": text, "--out": path},
        policy: {"--settings": text, "--problems": path, "--out": path},
        train: {
            "--settings": text,
            "--seed": {"required": True, "type": _seed},
            "--policy": path,
            "--problems": path,
            "--out": path,
            "--wandb": path,
            "--ranks": {"type": _positive, "default": 1},
        },
        card: {"run": {"type": Path}, "--evaluation": path},
        evaluate: {
            "--arm": text,
            "--settings": text,
            "--policy": {"required": True, "action": "append", "metavar": "SEED=FOLDER"},
            "--snapshots": {"default": [], "action": "append", "metavar": "SEED=FOLDER"},
            "--problems": path,
            "--out": path,
            "--samples": path,
        },
        report: {"--study": text, "--results": path, "--out": path},
        ablation: {"--study": text, "--name": text, "--results": path, "--out": path},
        gradients: {"--settings": text, "--out": path},
        gradient_report: {"--results": path, "--out": path},
        distributions: {"--settings": text, "--policy": path, "--problems": path, "--out": path},
        distribution_report: {"--results": path, "--engine": {"required": True, "action": "append"}, "--out": path},
        equal_mass: {"--settings": text, "--policy": path, "--problems": path, "--out": path},
        across: {"study": {"nargs": "+"}, "--results": path, "--out": path},
        early_warning: {"results": {"type": Path, "nargs": "+"}, "--out": path},
        paper: {"results": {"type": Path, "nargs": "+"}, "--out": path},
        claims: {"results": {"type": Path}},
        download: {"--study": text},
        mirror: {"results": {"type": Path}},
        dashboard: {"results": {"type": Path}},
        check: {"study": {"nargs": "+"}},
        plan: {
            "study": {},
            "--gpus": {"type": _positive, "default": 1, "help": "devices that share a job"},
            "--memory": {"help": "of a device, such as 80GB; that of the machine"},
            "--machine": {"type": Path, "help": "YAML of a device's throughputs; an H100's"},
            "--prompt": {"type": _positive, "default": 200, "help": "tokens of a prompt; 200"},
            "--response": {"type": _positive, "help": "tokens of a response; max_new_tokens"},
        },
        schema: {},
        metrics: {},
        unlock: {},
    }
    for function, arguments in options.items():
        command = commands.add_parser(function.__name__, help=function.__doc__, description=function.__doc__)
        command.set_defaults(function=function)
        for name, keywords in arguments.items():
            command.add_argument(name, **keywords)
    return parser


def main() -> None:
    """Entry point of `tailrl`: exits 1 with one sentence where the user can mend what is wrong."""
    # Progress bars and advice of libraries do not belong into a job's log.
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        args = build_parser().parse_args()
        args.function(args)
    except StudyError as error:
        _end(str(error))
    except EngineError as error:
        traceback.print_exception(error)
        print(f"tailrl: {error}", file=sys.stderr)
        sys.exit(os.EX_SOFTWARE)
    except OSError as error:
        # A file that the system refuses, or a full disk; an error without a number is a library's own.
        if error.errno is None:
            raise
        _end(f"{f'{error.filename}: ' if error.filename else ''}{reason(error)}")
    finally:
        limit_the_end()


def _end(sentence: str) -> NoReturn:
    sys.exit(1 if tell_launcher(sentence) else f"tailrl: {sentence}")
