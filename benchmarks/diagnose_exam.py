"""The exam of causes: logs of known cause, which settle the rules of `tailrl diagnose` or judge them.

    python benchmarks/diagnose_exam.py settle    # makes the logs of that set and writes diagnosis/sure.yaml
    python benchmarks/diagnose_exam.py judge     # makes the others and writes docs/results/diagnose_exam/
    python benchmarks/diagnose_exam.py pretrained    # the same with SmolLM2-135M, into its folder pretrained/
    python benchmarks/diagnose_exam.py judge --only-logs    # makes the logs, and diagnoses none

Policies and logs stay in --work, so that a run goes on where it ended. diagnose_exam.yaml has the design.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import fields
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from exam_answers import answer, group_rows, left_out_rows, measured_of, publish
from exam_cases import make_log
from exam_faults import Case, Fault
from exam_models import SPECS, Spec, obtain
from exam_rules import settle
from table import show

import tailrl.diagnosis
from tailrl.diagnosis.causes import agrees, cause_words, find_faults
from tailrl.diagnosis.features import FEATURES, features
from tailrl.diagnosis.log import Log
from tailrl.runtime.seeding import derive_seed

OF_WORDS = ("text_S", "labels_S", "whole_S", "place_S", "prompt_text_S")  # of a log: no arrays
DESIGN = Path(__file__).with_name("diagnose_exam.yaml")
LARGE = -0.5
"""Of `amount`: a mistake inside a model is a large one above it."""

PARTS = ("prompt/large", "prompt/small", "precision/eight", "stale/told")
"""Parts of causes that look unlike the rest of them: large and small mistakes inside a model, formats of 8 or 4 bits,
old weights whose version or recomputed log-probs are logged."""

SURE = Path(tailrl.diagnosis.__file__).with_name("sure.yaml")


def design() -> dict[str, Any]:
    """Limits, and the faults of both sets."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def planned(spec: Spec) -> Iterator[tuple[int, str, dict[str, Any], int]]:
    """Number, truth, fault and seed of each case of a policy."""
    plan, judges = design(), spec.set == "judge"
    number = 0
    for truth, listed in plan["settle" if spec.set == "settle" else "judge"].items():
        for again in range(plan["clean_seeds"] if truth == "none" and judges else 1):
            for place, given in enumerate(listed):
                # The real engine's logs are slow to make: each stands once, and where it stands at all, whole.
                share = plan["shares"].get(truth, plan["shares"]["others"])
                drawn = derive_seed("share", spec.seed, truth, place) % 1000 < 1000 * share
                chosen = not again if "engine" in given else judges or drawn
                if chosen and _fits(spec, truth, given):
                    yield number, truth, given, derive_seed("case", spec.seed, truth, json.dumps(given), again) % 2**31
                number += 1


def _fits(spec: Spec, truth: str, given: dict[str, Any]) -> bool:
    """Whether a policy can have the fault: flips need a mixture, which vLLM does not quantise."""
    if "engine" in given and not spec.vllm:
        return False
    if "routing" in truth:
        return spec.kind == "mixture"
    return "engine" not in given or truth == "none" or spec.kind != "mixture"


def make_logs(spec: Spec, work: Path) -> None:
    """Makes the logs of a policy that are not there yet."""
    folder = work / "logs" / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    trained = None
    for number, truth, given, seed in planned(spec):
        file = folder / f"{seed}.npz"
        if file.exists():
            continue
        trained = trained or obtain(spec, work / "models" / spec.name)
        begun = time.perf_counter()
        settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
        log, floor = make_log(trained, Fault(**settings), seed, spec.responses)
        arrays = {one.name: getattr(log, one.name) for one in fields(log) if one.name not in OF_WORDS}
        np.savez(file, floor=floor, **arrays)
        print(f"{spec.name} {number} {truth} {given} {time.perf_counter() - begun:.1f} s", file=sys.stderr, flush=True)


def cases(spec: Spec, work: Path) -> Iterator[Case]:
    """The cases of a policy whose logs are made."""
    plan = design()
    groups, known = plan["groups"], {given["mistake"] for given in plan["settle"]["mistake"]}
    for number, truth, given, seed in planned(spec):
        with np.load(work / "logs" / spec.name / f"{seed}.npz", allow_pickle=False) as loaded:
            log = Log(**{name: loaded[name] for name in loaded.files if name != "floor"}, text_S=(), labels_S=())
            names = () if truth == "none" else tuple(truth.split("+"))
            causes = tuple(groups.get(name, name) for name in names)
            planted = tuple(name if name in plan["apart"] else groups.get(name, name) for name in names)
            new = truth == "mistake" and given["mistake"] not in known
            yield Case(spec.set, spec.name, number, causes, given, float(loaded["floor"]), log, planted, new)


def column_of(case: Case, cause: str, amount: float) -> str:
    """The cause, or its part of PARTS."""
    if "mistake" in case.planted:
        return PARTS[0] if amount > LARGE else PARTS[1]
    if cause == "precision" and {"weights", "cache", "kv_cache", "quantization"} & {*case.fault}:
        return PARTS[2]
    if cause == "stale" and {"version", "recomputed"} & {*case.fault.get("columns", ())}:
        return PARTS[3]
    return cause


def settle_rules(made: list[Case], out: Path) -> None:
    """Fits how sure causes are, and writes it."""
    known = cause_words()
    shapes = [name for name, said in known.items() if not said.fault]
    checks = {name: [0, 0] for name, said in known.items() if said.fault}
    columns = [*shapes, *PARTS]
    values, truths, fitted = [], [], []
    for case in made:
        measured = measured_of(case)
        faults = find_faults(measured)
        for name in faults:
            checks[name][0] += name in case.truth
            checks[name][1] += 1
        if agrees(measured.signals) or {"shift", "clipped"} & set(faults):
            continue
        found = features(measured.signals)
        values.append([found[name] for name in FEATURES])
        acting = {column_of(case, cause, found["amount"]) for cause in {*case.truth} & {*shapes} or {"unknown"}}
        truths.append([float(name in acting) for name in columns])
        fitted.append(case)
    kinds = [case.fault["mistake"] if "mistake" in case.planted else "" for case in fitted]
    models = [case.model for case in fitted]
    data, held_CK = settle(np.array(values), np.array(truths), models, kinds, columns)
    # By Laplace's rule: a check that was always right is not taken for infallible.
    rates = {name: round((right + 1) / (flags + 2), 3) for name, (right, flags) in checks.items()}
    written = {"command": "python benchmarks/diagnose_exam.py settle", "checks": rates, **data}
    out.write_text(yaml.safe_dump(written, sort_keys=False, width=120), encoding="utf-8")
    show(left_out_rows(fitted, held_CK, columns), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=("settle", "judge", "pretrained"))
    parser.add_argument("--only-logs", action="store_true", help="make the logs, and stop")
    parser.add_argument("--processes", type=int, default=2, help="policies whose logs are made at once")
    parser.add_argument("--work", type=Path, default=Path("results/diagnose_exam"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/diagnose_exam"))
    arguments = parser.parse_args()
    specs = [spec for spec in SPECS if spec.set == arguments.set]
    with ProcessPoolExecutor(arguments.processes, get_context("spawn")) as pool:
        list(pool.map(partial(make_logs, work=arguments.work), specs))
    if arguments.only_logs:
        return
    made = [case for spec in specs for case in cases(spec, arguments.work)]
    if arguments.set == "settle":
        settle_rules(made, SURE)
        return
    answers = [answer(case) for case in made]
    show(group_rows(answers), None)
    plan, folder = design(), "" if arguments.set == "judge" else arguments.set
    notes = plan["notes"].get(arguments.set, "").strip()
    publish(answers, plan["limits"], notes, plan["words"], arguments.out / folder)


if __name__ == "__main__":
    main()
