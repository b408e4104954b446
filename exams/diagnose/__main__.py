"""The exam of causes: logs of known cause, which settle the rules of `tailrl diagnose` or judge them.

    python -m exams.diagnose settle    # makes the logs of that set and writes diagnosis/sure.yaml
    python -m exams.diagnose judge     # makes the others and writes docs/results/diagnose_exam/
    python -m exams.diagnose judge --only-logs    # makes the logs, and diagnoses none

Policies and logs stay in --work, so that a run goes on where it ended. design.yaml has the design.
"""

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from table import show

import tailrl.diagnosis
from exams.diagnose.answers import answer, answer_few, first_tokens, group_rows, left_out_rows, measured_of, publish
from exams.diagnose.cases import WHERE_FROM, make_log
from exams.diagnose.faults import Case, Fault
from exams.diagnose.models import SPECS, Spec, obtain
from exams.diagnose.rules import few_tokens, settle
from tailrl.diagnosis.causes import agrees, cause_words, find_faults, is_penalised
from tailrl.diagnosis.diagnosis import focus_of
from tailrl.diagnosis.features import FEATURES, features
from tailrl.diagnosis.log import Log, sound
from tailrl.diagnosis.parts import part_of
from tailrl.diagnosis.where import find_places, where_words
from tailrl.runtime.seeding import derive_seed

OF_WORDS = ("text_S", "labels_S", "whole_S", "place_S", "prompt_text_S")  # of a log: no arrays
ENGINES = {"": -1, "a": 0, "b": 1}  # the numbers that stand for a response's engine in a file
DESIGN = Path(__file__).with_name("design.yaml")
LARGE = -0.5
"""Of `amount`: a mistake inside a model is a large one above it."""

PARTS = ("prompt/large", "prompt/small", "precision/eight", "stale/told", "stale/pinned", "stale/adapter")
"""Parts of causes that look unlike the rest of them: large and small mistakes inside a model, formats of 8 or 4 bits,
old weights whose version or recomputed log-probs are logged, weights that do not arrive, an adapter left out."""

LEAST_SIXTEEN = 0.025
"""Nats: the largest median of |Δ|/(1 − p) that logs of 16 bits had on the fifth exam's policies;
SmolLM2-135M has 0.022."""

SURE = Path(tailrl.diagnosis.__file__).with_name("sure.yaml")


def design() -> dict[str, Any]:
    """Limits, and the faults of both sets."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def planned(spec: Spec) -> Iterator[tuple[int, str, dict[str, Any], int]]:
    """Number, truth, fault and seed of each case of a policy."""
    plan, judges, whole = design(), spec.set == "judge", spec.kind == "pretrained"
    number = 0
    for truth, listed in plan["pretrained" if whole else spec.set].items():
        for again in range(plan["clean_seeds"] if truth == "none" and judges else 1):
            for place, given in enumerate(listed):
                # The real engine's logs are slow to make: each stands once, and where it stands at all, whole.
                share = plan["shares"].get(truth, plan["shares"]["others"])
                drawn = derive_seed("share", spec.seed, truth, place) % 1000 < 1000 * share
                chosen = not again if "engine" in given else judges or whole or drawn
                if chosen and _fits(spec, truth, given):
                    yield number, truth, given, derive_seed("case", spec.seed, truth, json.dumps(given), again) % 2**31
                number += 1


def _fits(spec: Spec, truth: str, given: dict[str, Any]) -> bool:
    """Whether a policy can have the fault: flips need a mixture, which vLLM does not quantise, old weights a past."""
    if not spec.steps and {"age", "reused", "pinned"} & {*given}:
        return False
    if "engine" in given and not spec.vllm:
        return False
    if "routing" in truth:
        return spec.kind == "mixture"
    return "engine" not in given or truth == "none" or spec.kind != "mixture"


def make_logs(spec: Spec, work: Path, plain: bool = False) -> None:
    """Makes the logs of a policy that are not there yet; `plain`: but those of the real engine."""
    folder = work / "logs" / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    trained = None
    for number, truth, given, seed in planned(spec):
        file = folder / f"{seed}.npz"
        if file.exists() or (plain and "engine" in given):
            continue
        trained = trained or obtain(spec, work / "models" / spec.name)
        begun = time.perf_counter()
        settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        log, floor = make_log(trained, Fault(**settings), seed, spec.responses)
        arrays = {one.name: getattr(log, one.name) for one in fields(log) if one.name not in OF_WORDS}
        engine_S = np.array([ENGINES[labels.get(WHERE_FROM, "")] for labels in log.labels_S], np.int64)
        np.savez(file, floor=floor, engine_S=engine_S, **arrays)
        print(f"{spec.name} {number} {truth} {given} {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)


def cases(spec: Spec, work: Path) -> Iterator[Case]:
    """The cases of a policy whose logs are made."""
    plan = design()
    groups, known = plan["groups"], {given["mistake"] for given in plan["settle"]["mistake"]}
    for number, truth, given, seed in planned(spec):
        with np.load(work / "logs" / spec.name / f"{seed}.npz", allow_pickle=False) as loaded:
            log = _with_words(dict(loaded), spec, seed)
            floor = float(loaded["floor"])
            names = () if truth == "none" else tuple(truth.split("+"))
            causes = tuple(groups.get(name, name) for name in names)
            planted = tuple(name if name in plan["apart"] else groups.get(name, name) for name in names)
            new = truth == "mistake" and given["mistake"] not in known
            yield Case(spec.set, spec.name, number, causes, given, floor, log, planted, new)


def _with_words(arrays: dict[str, Any], spec: Spec, seed: int) -> Log:
    """The log of a file, with the engine of each response where its column has it.

    Half of the logs say how many experts the policy has.
    """
    arrays.pop("floor")
    names = {number: name for name, number in ENGINES.items()}
    experts = {"experts": "8" if spec.kind == "mixture" else "0"} if seed % 2 else {}
    labels = tuple(
        ({WHERE_FROM: names[number]} if number >= 0 else {}) | experts for number in arrays.pop("engine_S").tolist()
    )
    nothing = (None,) * len(labels)
    return Log(**arrays, text_S=nothing, labels_S=labels, whole_S=nothing, place_S=nothing, prompt_text_S=nothing)


def column_of(case: Case, cause: str, amount: float) -> str:
    """The cause, or its part of PARTS."""
    if "mistake" in case.planted:
        return PARTS[0] if amount > LARGE else PARTS[1]
    if cause == "precision" and {"weights", "cache", "kv_cache", "quantization"} & {*case.fault}:
        return PARTS[2]
    if cause == "stale":
        told = {"version", "recomputed"} & {*case.fault.get("columns", ())}
        parts = {"pinned": PARTS[4], "adapter": PARTS[5]}
        return next((part for name, part in parts.items() if name in case.planted), PARTS[3] if told else cause)
    return cause


def settle_rules(made: list[Case], out: Path) -> None:
    """Fits how sure causes are, and writes it."""
    known = cause_words()
    shapes = [name for name, said in known.items() if not (said.fault or said.by_place)]
    checks = {name: [0, 0] for name, said in known.items() if said.fault}
    places = {words.cause: [0, 0] for words in where_words().values() if words.cause} | {"penalty": [0, 0]}
    columns = [*shapes, *PARTS]
    values, truths, fitted, parts, sixteen = [], [], [], [], LEAST_SIXTEEN
    for case in made:
        measured = measured_of(case)
        faults = find_faults(measured)
        for name in faults:
            checks[name][0] += name in case.truth
            checks[name][1] += 1
        if agrees(measured.signals) or {"shift", "clipped"} & set(faults):
            continue
        focus = focus_of(find_places(part_of(case.log, sound(case.log))))
        if focus is not None and focus.cause and "mask" not in faults:
            places[focus.cause][0] += focus.cause in case.truth
            places[focus.cause][1] += 1
        if is_penalised(measured.signals):
            places["penalty"][0] += "penalty" in case.truth
            places["penalty"][1] += 1
        if "some" in case.fault:  # whose engine tells nothing of its fault
            case = of_other_engine(case)
            measured = measured_of(case)
        found = features(measured.signals)
        if of_sixteen_bits(case):
            sixteen = max(sixteen, 10 ** found["size"])
        values.append([found[name] for name in FEATURES])
        acting = {column_of(case, cause, found["amount"]) for cause in {*case.truth} & {*shapes} or {"unknown"}}
        truths.append([float(name in acting) for name in columns])
        fitted.append(case)
        parts += [
            (len(fitted) - 1, tokens, small) for tokens in design()["few"] for small in few_features(case, tokens)
        ]
    kinds = [case.fault["mistake"] if "mistake" in case.planted else "" for case in fitted]
    models = [case.model for case in fitted]
    data, held_CK = settle(np.array(values), np.array(truths), models, kinds, columns)
    few = few_tokens(np.array(values), np.array(truths), models, parts, data, columns)
    written = {
        "command": "python -m exams.diagnose settle",
        "checks": {name: laplace(*counted) for name, counted in checks.items()},
        "places": {name: laplace(*counted) for name, counted in places.items()},
        "sixteen_bits": round(math.ceil(1000 * sixteen) / 1000, 3),
        "few_tokens": round(few),
        **data,
    }
    out.write_text(yaml.safe_dump(written, sort_keys=False, width=120), encoding="utf-8")
    show(left_out_rows(fitted, held_CK, columns), None)


def of_other_engine(case: Case) -> Case:
    """The responses of the engine that has another fault, as a log of that fault."""
    causes = {"age": "stale", "context": "prompt", "temperature": "temperature"}
    is_other_S = np.array([labels.get(WHERE_FROM) == "b" for labels in case.log.labels_S])
    truth = tuple(causes[name] for name in case.fault["some"])
    return replace(case, log=part_of(case.log, is_other_S[case.log.sequence_T]), truth=truth, planted=truth)


def laplace(right: int, flags: int) -> float:
    """By Laplace's rule: a check that was always right is not taken for infallible."""
    return round((right + 1) / (flags + 2), 3)


def of_sixteen_bits(case: Case) -> bool:
    """Whether rounding in 16 bits is all that differs."""
    others = {"weights", "cache", "kv_cache", "quantization", "flips", "pruned"}
    return "precision" in case.truth and not others & {*case.fault} and "prompt" not in case.truth


def few_features(case: Case, tokens: int) -> list[list[float]]:
    """The features of a log's first responses with so many tokens; none where these agree."""
    measured = measured_of(replace(case, log=first_tokens(case.log, tokens)))
    if agrees(measured.signals):
        return []
    found = features(measured.signals)
    return [[found[name] for name in FEATURES]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=("settle", "judge"))
    parser.add_argument("--only-logs", action="store_true", help="make the logs, and stop")
    parser.add_argument("--processes", type=int, default=2, help="policies whose logs are made at once")
    parser.add_argument("--policy", default="", help="with --only-logs: of this policy alone")
    parser.add_argument("--plain", action="store_true", help="with --only-logs: none of the real engine")
    parser.add_argument("--work", type=Path, default=Path("results/diagnose_exam"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/diagnose_exam"))
    arguments = parser.parse_args()
    specs = [spec for spec in SPECS if spec.set == arguments.set and arguments.policy in ("", spec.name)]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        list(pool.map(partial(make_logs, work=arguments.work, plain=arguments.plain), specs))
    if arguments.only_logs:
        return
    made = [case for spec in specs for case in cases(spec, arguments.work)]
    if arguments.set == "settle":
        settle_rules(made, SURE)
        return
    plan = design()
    answers = [answer(case, plan["fix"]) for case in made]
    few = [(tokens, answer_few(case, tokens)) for case in made for tokens in plan["few"]]
    show(group_rows(answers), None)
    publish(answers, few, plan, arguments.out)


if __name__ == "__main__":
    main()
