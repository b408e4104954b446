"""The commands for people: one function each, whose docstring is its help."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, Exit, Option

from tailrl.cli.values import tokens, units, whole_number
from tailrl.runtime.errors import StudyError, writing

if TYPE_CHECKING:
    from tailrl.curves.history import History

StudyFiles = Annotated[list[str], Argument(metavar="STUDY...", help="study files", show_default=False)]
Folder = Annotated[
    Path, Argument(metavar="FOLDER", help="the study's results folder, such as results/default", show_default=False)
]


def check(study: StudyFiles) -> None:
    """Check study files, and count their arms and runs."""
    from tailrl.config.load import named_alike, read_study

    for path in study:
        found = read_study(path)
        try:
            found.check_files()
        except StudyError as error:
            raise StudyError(f"{path}: {error}") from None
        if other := named_alike(path, found.name):
            raise StudyError(
                f"{path}: name: {other} has the name {found.name!r} too, and so the same folder of results"
            )
        seeds = found.arm_seeds()
        runs = sum(map(len, seeds.values()))
        print(f"{path}: {found.name}, {len(seeds)} arms (with ablations), {runs} runs")


def plan(
    study: Annotated[str, Argument(metavar="STUDY", help="a study file", show_default=False)],
    gpus: Annotated[int, Option(parser=units, metavar="N", help="devices that share a job")] = 1,
    memory: Annotated[str | None, Option(help="of a device, such as 80GB; else an H100's")] = None,
    machine: Annotated[Path | None, Option(help="YAML of a device's throughputs and memory; else an H100's")] = None,
    prompt: Annotated[int, Option(parser=tokens, metavar="N", help="tokens of a prompt")] = 200,
    response: Annotated[
        int | None, Option(parser=tokens, metavar="N", help="tokens of a response; else max_new_tokens")
    ] = None,
) -> None:
    """Estimate a study's memory, time and disk; end with 1 where it does not fit."""
    from tailrl.config.load import read_study
    from tailrl.planning.jobs import what_would_fit
    from tailrl.planning.machine import read_machine
    from tailrl.planning.page import plan_page

    planned, device = read_study(study), read_machine(machine, memory)
    print(plan_page(planned, device, gpus, prompt, response), end="")
    if what_would_fit(planned, device, gpus, prompt, response):
        raise Exit(1)


def schema() -> None:
    """Print the JSON schema of a study file."""
    from tailrl.config.study import Study

    print(json.dumps(Study.model_json_schema(), indent=2, ensure_ascii=False))


def download(
    study: Annotated[str, Argument(metavar="STUDY", help="a study file, or JSON text of one", show_default=False)],
) -> None:
    """Fetch the data sets and the model of a study, for nodes without a network."""
    from tailrl.config.load import parse_settings, read_study
    from tailrl.config.study import Study
    from tailrl.model.download import download_inputs

    fetched = download_inputs(parse_settings(Study, study) if study.lstrip().startswith("{") else read_study(study))
    print(f"on this machine: {', '.join(fetched)}" if fetched else "nothing to download: the study needs no network")


def across(
    study: StudyFiles,
    results: Annotated[Path, Option(help="the folder that holds the studies' results folders")],
    out: Annotated[Path, Option(help="what to write, without its ending: OUT.md, OUT.csv, OUT.svg")],
) -> None:
    """Compare studies with the same arms: score, kept mass, mismatch."""
    from tailrl.config.load import read_study
    from tailrl.report.study import write_across

    write_across([read_study(path) for path in study], results, out)


def card(
    run: Annotated[Path, Argument(metavar="RUN", help="the folder of a finished run", show_default=False)],
    evaluation: Annotated[Path, Option(help="the evaluation of the run's arm: eval/ARM.json")],
) -> None:
    """Write the model card of a trained policy again, with its scores."""
    from tailrl.evaluation.model_card import write_card

    print(write_card(run, evaluation))


def claims(
    results: Annotated[Path, Argument(metavar="FOLDER", help="published results: docs/results", show_default=False)],
) -> None:
    """Print the verdict on every claim by published results, as docs/claims.md has them."""
    from tailrl.report.study import claims_page, read_shown

    if not (shown := read_shown([results])):
        raise StudyError(f"{results}: holds no study with a claims.csv, in <study>/ or <study>/tables/")
    print(claims_page(shown, results.parent), end="")


def metrics() -> None:
    """Print the table of all metrics, as the site has it."""
    from tailrl.report.metrics import metrics_page

    print(metrics_page(), end="")


def diagnose(
    logs: Annotated[
        list[str],
        Argument(
            metavar="LOGS...",
            help="files or folders of a run's logs; or its curves: a W&B export, a W&B run's file or address, "
            "trainer_state.json, metrics as JSON lines, TensorBoard's CSV, verl's console",
            show_default=False,
        ),
    ],
    out: Annotated[Path | None, Option(help="a file for the whole page, such as page.html")] = None,
    tokenizer: Annotated[
        Path | None, Option(help="tokenizer.json, or a model's folder: the page then shows the tokens' texts")
    ] = None,
    columns: Annotated[
        str | None,
        Option(
            metavar="ROLE=NAME,...",
            help="the file's own names: sampler=NAME,trainer=NAME,mask=NAME, ...; names that are not given are the "
            "known ones",
        ),
    ] = None,
) -> None:
    """Say what causes the mismatch in the logs of any framework, and what to do."""
    _check_folders(out)
    from tailrl.curves.history import read_all, read_folders

    if histories := read_all(logs):
        _tell_curves(histories, out)
        return
    from tailrl.diagnosis.diagnosis import diagnose_parts
    from tailrl.diagnosis.folders import NoLogError
    from tailrl.diagnosis.formats import parse_columns
    from tailrl.diagnosis.left_out import LeftOut
    from tailrl.diagnosis.page import html_page, terminal_page
    from tailrl.diagnosis.progress import read_with_progress
    from tailrl.pages.explorer import read_tokenizer, with_texts

    chosen = parse_columns(columns) if columns is not None else None
    texts = read_tokenizer(tokenizer) if tokenizer else None
    left_out = LeftOut()
    try:
        diagnosis = diagnose_parts(read_with_progress([Path(log) for log in logs], left_out, chosen), left_out)
    except NoLogError:
        if not (histories := read_folders(map(Path, logs))):
            raise
        _tell_curves(histories, out)
        return
    print(terminal_page(diagnosis, out), end="")
    if out is not None:
        if texts:
            diagnosis = replace(diagnosis, responses=with_texts(diagnosis.responses, texts))
        with writing(out):
            out.write_text(html_page(diagnosis), encoding="utf-8")


def demo(
    out: Annotated[Path, Option(metavar="FILE", help="for the page")] = Path("tailrl-demo.html"),
    browser: Annotated[bool, Option("--open/--no-open", help="open the page, where there is a browser")] = True,
) -> None:
    """Diagnose a log that comes along, of a real vLLM run, and open the page."""
    _check_folders(out)
    from tailrl.diagnosis.demo import LOG, WHAT_IT_IS, opened
    from tailrl.diagnosis.diagnosis import diagnose as diagnosed
    from tailrl.diagnosis.page import html_page, terminal_page

    print(WHAT_IT_IS)
    diagnosis = diagnosed(LOG)
    print(terminal_page(diagnosis, out), end="")
    with writing(out):
        out.write_text(html_page(diagnosis, "The demo: diagnosis of a log", WHAT_IT_IS), encoding="utf-8")
    if browser:
        opened(out)


def _tell_curves(histories: "list[History]", out: Path | None) -> None:
    """Prints what curves say; writes the page, of one run's file or of several."""
    from tailrl.curves.page import curves_html, curves_text
    from tailrl.curves.reading import read_curves, together

    reading = read_curves(together(histories))
    print(curves_text(reading, out), end="")
    if out is not None:
        with writing(out):
            out.write_text(curves_html(reading), encoding="utf-8")


def _check_folders(*files: Path | None) -> None:
    """Raises StudyError where a file could not be written in the end, before work is lost."""
    for path in filter(None, files):
        if not path.absolute().parent.is_dir():
            raise StudyError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise StudyError(f"{path}: is a folder, and a file is to be written")


def probe(
    model: Annotated[
        str, Argument(metavar="MODEL", help="a Hugging Face folder or a name on the hub", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", help="JSONL with `prompt`, or text with one a line; else a set that comes along"),
    ] = None,
    engine: Annotated[str, Option(help="vllm, transformers or exact")] = "vllm",
    dtype: Annotated[str | None, Option(help="of the engine; else bfloat16, and float32 for exact")] = None,
    trainer_dtype: Annotated[
        str, Option(help="of the trainer: float32 or bfloat16; auto: bfloat16 on a GPU, float32 on a CPU")
    ] = "auto",
    kv_cache_dtype: Annotated[str, Option(help="of vLLM's keys and values: auto, fp8_e4m3 or fp8_e5m2")] = "auto",
    quantization: Annotated[str | None, Option(help="of vLLM's linear layers: int8, int4 or fp8")] = None,
    group_size: Annotated[int | None, Option(metavar="N", help="inputs to a scale of int4: 32, 64 or 128")] = None,
    temperature: Annotated[float, Option(help="divides both sides' logits")] = 1.0,
    top_p: Annotated[float, Option(help="the engine samples from the fewest tokens with this mass")] = 1.0,
    max_new_tokens: Annotated[
        int | None,
        Option(parser=tokens, metavar="N", help="tokens of a response; else 64, or what the model has room for"),
    ] = None,
    samples: Annotated[int, Option(parser=units, metavar="N", help="responses; the prompts take turns")] = 64,
    seed: Annotated[int, Option(parser=whole_number, metavar="N", help="of the responses")] = 0,
    out: Annotated[Path | None, Option(metavar="FILE", help="for the whole page, such as page.html")] = None,
    log: Annotated[
        Path | None, Option(metavar="FILE", help="for the tokens: .jsonl or .parquet, which `tailrl diagnose` reads")
    ] = None,
) -> None:
    """Measure the mismatch of a model: an engine samples, the trainer scores."""
    from tailrl.config.load import validated
    from tailrl.config.probe import ProbeSettings
    from tailrl.runtime.devices import take

    dtype = dtype or ("float32" if engine == "exact" else "bfloat16")
    formats = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    given = {
        "sampler": {"engine": engine, "group_size": group_size, **formats},
        **{"trainer_dtype": trainer_dtype, "temperature": temperature, "top_p": top_p},
        **{"max_new_tokens": max_new_tokens, "samples": samples, "seed": seed},
    }
    settings = validated(ProbeSettings, given, "probe")
    _check_folders(out, log)
    take(1)
    from tailrl.diagnosis.log_files import check_log_name, write_log
    from tailrl.diagnosis.page import terminal_page
    from tailrl.planning.fits import check_sampling
    from tailrl.probes.model.page import diagnose_probe, probe_page
    from tailrl.probes.model.probe import probe_model

    if log is not None:
        check_log_name(log)
    check_sampling(settings.sampler, Path(model))
    probed = probe_model(model, settings, prompts)
    if log is not None:
        write_log(probed.rows, log)
    diagnosis = diagnose_probe(probed)
    print(terminal_page(diagnosis, out), end="")
    if out is not None:
        with writing(out):
            out.write_text(probe_page(probed, diagnosis), encoding="utf-8")


def watch(
    folder: Annotated[
        Path,
        Argument(
            metavar="FOLDER",
            help="the folder of a running training's logs of tokens and of its metrics, or one file of them",
            show_default=False,
        ),
    ],
    once: Annotated[bool, Option("--once", help="judge the steps that are there, and end")] = False,
    as_json: Annotated[bool, Option("--json", help="a line of JSON a step")] = False,
    every: Annotated[float, Option(metavar="SECONDS", help="between two looks", min=0.05)] = 2.0,
    idle: Annotated[
        float | None, Option(metavar="SECONDS", help="end when nothing new came for so long; else by Ctrl-C", min=0)
    ] = None,
    stop: Annotated[bool, Option("--stop", help="end at the first step with an alarm")] = False,
    exact: Annotated[
        bool, Option("--exact", help="the engine computes with the trainer's own bits: equal columns are no alarm")
    ] = False,
    without: Annotated[list[str] | None, Option(metavar="ALARM", help="leave this alarm out; once for each")] = None,
) -> None:
    """Follow the logs of a running training, and raise alarms.

    Ends with 1 after an alarm, and with 2 without any step.
    """
    from tailrl.watch.alarms import check_names
    from tailrl.watch.follow import watch as follow

    check_names(without or ())
    seconds_idle = math.inf if idle is None else idle
    code = follow(folder, once, as_json, every, seconds_idle, stop, exact, tuple(without or ()), _line)
    if code:
        raise Exit(code)


def _line(text: str) -> None:
    """Prints at once, so that another program can read along."""
    print(text, flush=True)


def mirror(results: Folder) -> None:
    """Send a study's runs to a W&B server, without those that it has."""
    from tailrl.tracking.wandb_mirror import mirror as mirror_runs

    mirror_runs(results)


def dashboard(results: Folder) -> None:
    """Make a study's workspace and report on a W&B server, and send what it lacks."""
    from tailrl.tracking.wandb_dashboard import make_dashboard

    make_dashboard(results)


def unlock() -> None:
    """Remove the lock that a killed Snakemake left in this folder, and no other lock."""
    from tailrl.runtime.snakemake_lock import remove_stale_lock

    remove_stale_lock(Path.cwd())


HELP_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Study": (check, plan, schema, metrics, download, unlock),
    "Results": (demo, diagnose, watch, probe, across, card, claims, mirror, dashboard),
}
"""The help's groups of commands, in order."""
