"""The commands for people: one function each, whose docstring is its help."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Exit, Option

from tailrl.cli.values import tokens, units, whole_number
from tailrl.runtime.errors import ConfigurationError, writing

if TYPE_CHECKING:
    from tailrl.curves.history import History
    from tailrl.curves.names import Names
    from tailrl.diagnosis.answer import Answer
    from tailrl.diagnosis.gate import Limit

StudyFiles = Annotated[list[str], Argument(metavar="STUDY...", help="study files", show_default=False)]
Folder = Annotated[
    Path, Argument(metavar="FOLDER", help="the study's results folder, such as results/default", show_default=False)
]


def check(study: StudyFiles) -> None:
    """Check study files, and count their arms and runs."""
    from tailrl.config.load import named_alike, read_study
    from tailrl.config.source_files import own_code

    for path in study:
        found = read_study(path)
        parts = found.each()
        try:
            for part in parts.values():
                part.check_files()
        except ConfigurationError as error:
            raise ConfigurationError(f"{path}: {error}") from None
        if other := named_alike(path, found.name):
            raise ConfigurationError(
                f"{path}: name: {other} has the name {found.name!r} too, and so the same folder of results"
            )
        arms = {arm for part in parts.values() for arm in part.arm_seeds()}
        trained = [part for part in parts.values() if "report" in part.pages]
        runs = sum(len(seeds) for part in trained for seeds in part.arm_seeds().values())
        counted = (
            f"{len(arms)} arms (with ablations), {runs} runs"
            if trained
            else f"trains nothing, {', '.join(found.pages)}"
        )
        several = f"{len(parts)} parts, " if found.parts else ""
        print(f"{path}: {found.name}, {several}{counted}")
        if own := own_code([part.model_dump() for part in parts.values()]):
            print(f"{path}: not imported here, and not tried: {', '.join(own)}")


def plan(
    study: Annotated[str, Argument(metavar="STUDY", help="a study file", show_default=False)],
    gpus: Annotated[int, Option(parser=units, metavar="N", help="devices that share a job")] = 1,
    memory: Annotated[str | None, Option(help="of a device, such as 80GB; else an H100's")] = None,
    machine: Annotated[
        str | None, Option(help="4090, l40s, h100, h200 or laptop, or YAML of a device's throughputs; else an H100's")
    ] = None,
    prompt: Annotated[int, Option(parser=tokens, metavar="N", help="tokens of a prompt")] = 200,
    response: Annotated[
        int | None, Option(parser=tokens, metavar="N", help="tokens of a response; else max_new_tokens")
    ] = None,
) -> None:
    """Estimate a study's memory, time and disk; end with 1 where it does not fit."""
    from tailrl.config.load import read_study
    from tailrl.planning.machine import read_machine
    from tailrl.planning.plan import StudyPlan, plan_page

    device = read_machine(machine, memory)
    plans = [StudyPlan(part, device, gpus, prompt, response) for part in read_study(study).each().values()]
    print("\n".join(map(plan_page, plans)), end="")
    if any(plan.refusal for plan in plans):
        raise Exit(1)


def schema(
    of: Annotated[
        Literal["study", "diagnosis"],
        Argument(metavar="OF", help="study: a study file; diagnosis: `tailrl diagnose --json`"),
    ] = "study",
) -> None:
    """Print the JSON schema of a study file, or of a diagnosis."""
    if of == "diagnosis":
        from tailrl.diagnosis.record import schema as diagnosis_schema

        print(json.dumps(diagnosis_schema(), indent=2, ensure_ascii=False))
        return
    from tailrl.config.study import Study

    print(json.dumps(Study.model_json_schema(), indent=2, ensure_ascii=False))


def download(
    study: Annotated[str, Argument(metavar="STUDY", help="a study file, or JSON text of one", show_default=False)],
) -> None:
    """Fetch the data sets and the model of a study, for nodes without a network."""
    from tailrl.config.load import parse_settings, read_study
    from tailrl.config.study import Study
    from tailrl.model.download import download_inputs

    whole = parse_settings(Study, study) if study.lstrip().startswith("{") else read_study(study)
    fetched = list(dict.fromkeys(one for part in whole.each().values() for one in download_inputs(part)))
    print(f"on this machine: {', '.join(fetched)}" if fetched else "nothing to download: the study needs no network")


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
    from tailrl.reports.overview.all_studies import claims_page
    from tailrl.reports.overview.evidence import read_answers

    studies, answers = read_answers([results])
    if not studies:
        raise ConfigurationError(f"{results}: holds no study with a claims.csv, in <study>/ or <study>/tables/")
    print(claims_page(answers, results.parent), end="")


def metrics() -> None:
    """Print the table of all metrics, as the site has it."""
    from tailrl.reports.metrics.page import metrics_page

    print(metrics_page(), end="")


Largest = Annotated[
    list[str] | None,
    Option("--max", metavar="NAME=VALUE", help="a gate: end with 1 if a number is larger, 2 if that cannot be told"),
]
Least = Annotated[list[str] | None, Option("--min", metavar="NAME=VALUE", help="the same for a smaller number")]
Json = Annotated[
    str | None, Option("--json", metavar="FILE", help="a file for the answer as data; -: print that alone")
]


def diagnose(
    logs: Annotated[
        list[str],
        Argument(
            metavar="LOGS...",
            help="files or folders of a run's logs; two logs, BEFORE and AFTER, are compared; or its curves: a W&B "
            "export, a W&B run's file or address, trainer_state.json, metrics as JSON lines, TensorBoard's CSV, "
            "verl's or TRL's console",
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
            help="the file's own names: sampler=NAME,trainer=NAME,mask=NAME, ..., and of curves k3=NAME,step=NAME, "
            "...; names that are not given are the known ones",
        ),
    ] = None,
    largest: Largest = None,
    least: Least = None,
    json_file: Json = None,
    framework: Annotated[
        str | None, Option(help="whose settings come first: verl, TRL, NeMo-RL, ...; else the log's")
    ] = None,
    no_text: Annotated[bool, Option("--no-text", help="leave texts, token ids and columns' words out")] = False,
    together: Annotated[bool, Option("--together", help="two logs are one, and not compared")] = False,
) -> None:
    """Say what causes the mismatch in the logs of any framework, and what to do."""
    from tailrl.diagnosis.gate import read_limits

    _check_folders(out, _data_file(json_file))
    limits = read_limits(largest or (), least or ())
    from tailrl.curves.history import read_all, read_folders
    from tailrl.curves.reading import OF_CURVES, own_names
    from tailrl.diagnosis.folders import NoLogError
    from tailrl.diagnosis.formats import ROLES, parse_columns

    chosen = parse_columns(columns, tuple(dict.fromkeys((*ROLES, *OF_CURVES)))) if columns is not None else {}
    names = own_names(chosen)
    if histories := read_all(logs, names):
        _give(_of_curves(histories, limits, out, names), out, json_file)
        return
    of_curves = [role for role in chosen if role not in ROLES]
    try:
        if of_curves:
            raise NoLogError(f"{logs[0]}: holds no metrics over steps with the names of --columns {columns}")
        if len(logs) == 2 and not together:
            answer = _of_change(Path(logs[0]), Path(logs[1]), limits, out, chosen, no_text)
        else:
            answer = _of_log([Path(log) for log in logs], limits, out, tokenizer, chosen, framework, no_text)
    except NoLogError:
        if not (histories := read_folders(map(Path, logs), names)):
            raise
        answer = _of_curves(histories, limits, out, names)
    _give(answer, out, json_file)


def _give(answer: "Answer", out: Path | None, json_file: str | None) -> None:
    """Prints an answer, writes its page and its data, and ends with the gate's code."""
    from tailrl.diagnosis.record import as_json

    _print(answer.text, as_json(answer.record), json_file)
    if out is not None and answer.page is not None:
        with writing(out):
            out.write_text(answer.page, encoding="utf-8")
    if answer.record.exit_code:
        raise Exit(answer.record.exit_code)


def _print(text: str, data: str, json_file: str | None) -> None:
    """Prints an answer, or its data alone, and writes the data into a file that was asked for."""
    print(data if json_file == "-" else text, end="")
    if file := _data_file(json_file):
        with writing(file):
            file.write_text(data, encoding="utf-8")


def _data_file(json_file: str | None) -> Path | None:
    """The file of `--json`; None where the data are printed, or not asked for."""
    return Path(json_file) if json_file and json_file != "-" else None


def _of_log(
    logs: list[Path],
    limits: "list[Limit]",
    out: Path | None,
    tokenizer: Path | None,
    columns: dict[str, str],
    framework: str | None,
    no_text: bool,
) -> "Answer":
    from tailrl.diagnosis.answer import Answer, named_framework, without_texts, without_words
    from tailrl.diagnosis.diagnosis import diagnose_parts
    from tailrl.diagnosis.gate import judge
    from tailrl.diagnosis.left_out import LeftOut
    from tailrl.diagnosis.page import html_page, terminal_page
    from tailrl.diagnosis.readers import read_with_progress
    from tailrl.diagnosis.record import log_record
    from tailrl.page_parts.explorer import read_tokenizer, with_texts

    texts = read_tokenizer(tokenizer) if tokenizer else None
    own_framework = named_framework(framework or "")
    left_out = LeftOut()
    parts = read_with_progress(logs, left_out, columns)
    if no_text:
        parts = without_words(parts, {})
    diagnosis = replace(diagnose_parts(parts, left_out), chosen_framework=own_framework)
    judgements = judge(diagnosis.measured, limits, diagnosis.faults)
    page = None
    if out is not None:
        shown = replace(diagnosis, responses=with_texts(diagnosis.responses, texts)) if texts else diagnosis
        page = html_page(without_texts(shown) if no_text else shown, judgements=judgements)
    return Answer(terminal_page(diagnosis, out, judgements), page, log_record(diagnosis, judgements))


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
        out.write_text(html_page(diagnosis, "The demo: top-p 0.9 in the engine alone", WHAT_IT_IS), encoding="utf-8")
    print("\nThe same for logs of yours: tailrl diagnose LOGS... --out page.html")
    if browser:
        opened(out)


def _of_change(
    before: Path, after: Path, limits: "list[Limit]", out: Path | None, columns: dict[str, str], no_text: bool
) -> "Answer":
    from tailrl.diagnosis.answer import Answer, Numbered, without_words
    from tailrl.diagnosis.change import change_html, change_text, compare
    from tailrl.diagnosis.diagnosis import diagnose_parts
    from tailrl.diagnosis.gate import judge
    from tailrl.diagnosis.left_out import LeftOut
    from tailrl.diagnosis.readers import read_with_progress
    from tailrl.diagnosis.record import change_record

    found = []
    numbered: Numbered = {}
    for log in (before, after):
        left_out = LeftOut()
        parts = read_with_progress([log], left_out, columns)
        found.append(diagnose_parts(without_words(parts, numbered) if no_text else parts, left_out))
    earlier, later = found
    change = compare(earlier, later)
    judgements = judge(later.measured, limits, later.faults)
    page = change_html(change, judgements) if out else None
    return Answer(change_text(change, out, judgements), page, change_record(change, judgements))


def _of_curves(histories: "list[History]", limits: "list[Limit]", out: Path | None, names: "Names") -> "Answer":
    from tailrl.curves.gate import judge_curves
    from tailrl.curves.page import curves_html, curves_record, curves_text
    from tailrl.curves.reading import read_curves, together
    from tailrl.diagnosis.answer import Answer

    reading = read_curves(together(histories), names)
    judgements = judge_curves(reading, limits)
    page = curves_html(reading, judgements=judgements) if out else None
    return Answer(curves_text(reading, out, judgements), page, curves_record(reading, judgements))


def _check_folders(*files: Path | None) -> None:
    """Raises StudyError where a file could not be written in the end, before work is lost."""
    for path in filter(None, files):
        if not path.absolute().parent.is_dir():
            raise ConfigurationError(f"{path}: there is no folder {path.parent}")
        if path.is_dir():
            raise ConfigurationError(f"{path}: is a folder, and a file is to be written")


def probe(
    model: Annotated[
        str, Argument(metavar="MODEL", help="a Hugging Face folder or a name on the hub", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        Option(metavar="FILE", help="JSONL with `prompt`, or text with one a line; else a set that comes along"),
    ] = None,
    engine: Annotated[str, Option(help="vllm, transformers, exact, or the import path of a class")] = "vllm",
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
    experiment: Annotated[
        bool,
        Option(
            "--experiment/--no-experiment",
            help="where the sides differ by more than rounding, recompute the log under many hypotheses, as "
            "`tailrl explain` does",
        ),
    ] = True,
    largest: Largest = None,
    least: Least = None,
    json_file: Json = None,
) -> None:
    """Measure the mismatch of a model: an engine samples, the trainer scores."""
    from tailrl.config.load import validated
    from tailrl.config.probe import ProbeSettings
    from tailrl.config.sampler import SamplerSettings
    from tailrl.runtime.devices import take

    kind = SamplerSettings.kind_of({"engine": engine})
    dtype = dtype or ("float32" if kind and kind.TRAINERS_BITS else "bfloat16")
    formats = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "quantization": quantization}
    given = {
        "sampler": {"engine": engine, "group_size": group_size, **formats},
        **{"trainer_dtype": trainer_dtype, "temperature": temperature, "top_p": top_p},
        **{"max_new_tokens": max_new_tokens, "samples": samples, "seed": seed},
    }
    settings = validated(ProbeSettings, given, "probe")
    _check_folders(out, log, _data_file(json_file))
    from tailrl.diagnosis.gate import judge, read_limits

    limits = read_limits(largest or (), least or ())
    take(1)
    from tailrl.diagnosis.answer import Answer
    from tailrl.diagnosis.log_files import check_log_name, write_log
    from tailrl.diagnosis.page import terminal_page
    from tailrl.diagnosis.record import log_record
    from tailrl.explanation.explanation import explain_mismatch
    from tailrl.explanation.page import as_data as explanation_data
    from tailrl.explanation.page import markdown
    from tailrl.planning.fits import check_sampling
    from tailrl.probes.model.page import TITLE, diagnose_probe, probe_page
    from tailrl.probes.model.probe import probe_model

    if log is not None:
        check_log_name(log)
    check_sampling(settings.sampler, Path(model))
    probed = probe_model(model, settings, prompts)
    if log is not None:
        write_log(probed.rows, log)
    diagnosis = diagnose_probe(probed)
    judgements = judge(diagnosis.measured, limits)
    explanation = explain_mismatch(TITLE, probed.rows, model) if experiment else None
    section = markdown(explanation) if explanation else ""
    page = probe_page(probed, diagnosis, judgements, section) if out else None
    record = log_record(diagnosis, judgements)
    record = record.model_copy(update={"experiment": explanation and explanation_data(explanation)})
    _give(Answer(terminal_page(diagnosis, out, judgements) + section, page, record), out, json_file)


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


def explain(
    log: Annotated[
        list[str], Argument(metavar="LOG...", help="files or folders that `tailrl diagnose` reads", show_default=False)
    ],
    model: Annotated[
        str, Option(metavar="FOLDER", help="the policy that the log is of, or its name on the hub", show_default=False)
    ],
    prompts: Annotated[
        Path | None,
        Option(
            metavar="FILE",
            help="the prompts, where the log has none: JSONL with `prompt_ids` or `prompt`, or text; a line a row, or "
            "a set in which each response's is found",
        ),
    ] = None,
    other: Annotated[
        list[str] | None,
        Option(metavar="FOLDER", help="weights that a side may have: a step ago, the base model; may be repeated"),
    ] = None,
    adapter: Annotated[list[str] | None, Option(metavar="FOLDER", help="a LoRA adapter of the policy")] = None,
    hypothesis: Annotated[
        list[str] | None, Option(metavar="MODULE:NAME", help="a hypothesis of your own; may be repeated")
    ] = None,
    compare: Annotated[
        str | None,
        Option(
            metavar="vllm[=FOLDER]",
            help="where nothing reproduces the log, run vLLM too, with the model or the checkpoint in FOLDER: at which "
            "layer does it part from the model?",
        ),
    ] = None,
    tokens_scored: Annotated[
        int, Option("--tokens", parser=tokens, metavar="N", help="that are computed at most")
    ] = 1000,
    columns: Annotated[
        str | None, Option(metavar="ROLE=NAME,...", help="the file's own names, as `tailrl diagnose` takes them")
    ] = None,
    json_file: Json = None,
) -> None:
    """Recompute a log with its model, and name what reproduces it.

    Ends with 1 where a cause is named, with 2 where nothing reproduces the log, else with 0.
    """
    from tailrl.runtime.devices import take

    _check_folders(_data_file(json_file))
    take(1)
    from tailrl.diagnosis.formats import parse_columns
    from tailrl.diagnosis.readers import read_with_progress
    from tailrl.explanation.explanation import explain_parts
    from tailrl.explanation.page import as_json, text

    explanation = explain_parts(
        read_with_progress([Path(one) for one in log], columns=parse_columns(columns) if columns is not None else None),
        model,
        prompts=prompts,
        others=other or (),
        adapters=adapter or (),
        hypotheses=hypothesis or (),
        compare=compare,
        tokens=tokens_scored,
    )
    _print(text(explanation), as_json(explanation), json_file)
    if explanation.code:
        raise Exit(explanation.code)


def dashboard(results: Folder) -> None:
    """Save a study's workspace on a W&B server that has its runs, and print its address."""
    from tailrl.tracking.wandb_workspace import save_workspace

    print(save_workspace(results))


HELP_GROUPS: dict[str, tuple[Callable[..., None], ...]] = {
    "Study": (check, plan, schema, metrics, download),
    "Results": (demo, diagnose, explain, watch, probe, card, claims, dashboard),
}
"""The help's groups of commands, in order."""
