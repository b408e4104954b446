"""The exam of causes: logs of known cause, which settle the rules of `tailrl diagnose` or judge them.

    python benchmarks/diagnose_exam.py settle    # makes the logs of that set and writes diagnosis/sure.yaml
    python benchmarks/diagnose_exam.py judge     # makes the others and writes docs/results/diagnose_exam/
    python benchmarks/diagnose_exam.py pretrained    # the same with SmolLM2-135M, into its folder pretrained/

Policies and logs stay in --work, so that a run goes on where it ended. diagnose_exam.yaml has the design.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from exam_answers import answer, group_rows, measured_of, publish
from exam_cases import Case, Fault, make_log
from exam_models import SPECS, Spec, obtain
from exam_rules import settle
from table import show

import tailrl.diagnosis
from tailrl.diagnosis.causes import agrees, cause_words, find_faults
from tailrl.diagnosis.features import FEATURES, features
from tailrl.diagnosis.log import Log
from tailrl.runtime.seeding import derive_seed

DESIGN = Path(__file__).with_name("diagnose_exam.yaml")
SURE = Path(tailrl.diagnosis.__file__).with_name("sure.yaml")


def design() -> dict[str, Any]:
    """Limits, and the faults of both sets."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def cases(which: str, work: Path, names: list[str]) -> Iterator[Case]:
    """The cases of a set, made where they are not there yet."""
    for spec in SPECS:
        if spec.set == which and (not names or spec.name in names):
            yield from _of_model(spec, which, work)


def _faults(spec: Spec) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Truth, fault and repeat of each case of a policy."""
    plan = design()
    for truth, listed in plan[spec.faults].items():
        for again in range(plan["clean_seeds"] if truth == "none" and spec.faults != "settle" else 1):
            for given in listed:
                # The real engine's logs are slow to make, and its clean one stands once.
                if "engine" not in given or (spec.vllm and not again):
                    yield truth, given, again


def _of_model(spec: Spec, which: str, work: Path) -> Iterator[Case]:
    folder = work / "logs" / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    trained, groups = None, design()["groups"]
    for number, (truth, given, again) in enumerate(_faults(spec)):
        if ("flips" in given and spec.kind != "mixture") or number % spec.every:
            continue
        seed = derive_seed("case", spec.seed, truth, json.dumps(given), again) % 2**31
        file = folder / f"{seed}.npz"
        if not file.exists():
            trained = trained or obtain(spec, work / "models" / spec.name)
            begun = time.perf_counter()
            settings: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}
            fault = Fault(**settings)
            log, floor = make_log(trained, fault, seed, spec.responses)
            arrays = {one.name: getattr(log, one.name) for one in fields(log) if one.name != "text_S"}
            np.savez(file, floor=floor, **arrays)
            seconds = time.perf_counter() - begun
            print(f"{spec.name} {number} {truth} {given} {seconds:.1f} s", file=sys.stderr)
        with np.load(file, allow_pickle=False) as loaded:
            log = Log(**{name: loaded[name] for name in loaded.files if name != "floor"}, text_S=())
            planted = () if truth == "none" else tuple(groups.get(name, name) for name in truth.split("+"))
            yield Case(which, spec.name, number, planted, given, float(loaded["floor"]), log)


def settle_rules(made: list[Case], out: Path) -> None:
    """Fits how sure causes are, and writes it."""
    known = cause_words()
    shapes = [name for name, said in known.items() if not said.fault]
    checks = {name: [0, 0] for name, said in known.items() if said.fault}
    values, truths, models = [], [], []
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
        acting = {*case.truth} & {*shapes} or {"unknown"}
        truths.append([float(name in acting) for name in shapes])
        models.append(case.model)
    data, _ = settle(np.array(values), np.array(truths), models, shapes)
    # By Laplace's rule: a check that was always right is not taken for infallible.
    rates = {name: round((right + 1) / (flags + 2), 3) for name, (right, flags) in checks.items()}
    written = {"command": "python benchmarks/diagnose_exam.py settle", "checks": rates, **data}
    out.write_text(yaml.safe_dump(written, sort_keys=False, width=120), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=("settle", "judge", "pretrained"))
    parser.add_argument("models", nargs="*", help="make the logs of these models, and stop")
    parser.add_argument("--work", type=Path, default=Path("results/diagnose_exam"))
    parser.add_argument("--out", type=Path, default=Path("docs/results/diagnose_exam"))
    arguments = parser.parse_args()
    made = list(cases(arguments.set, arguments.work, arguments.models))
    if arguments.models:
        return
    if arguments.set == "settle":
        settle_rules(made, SURE)
    answers = [answer(case) for case in made]
    show(group_rows(answers), None)
    if arguments.set == "settle":
        for one in answers:
            if not one.right:
                print(one.case.model, one.truth, one.case.fault, [(c.name, round(c.sure, 2)) for c in one.causes])
    else:
        plan, folder = design(), "" if arguments.set == "judge" else arguments.set
        notes = plan["notes"].get(arguments.set, "").strip()
        publish(answers, plan["limits"], notes, plan["words"], arguments.out / folder)


if __name__ == "__main__":
    main()
