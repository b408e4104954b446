"""The exam of causes: logs of known cause, which settle the rules of `tailrl diagnose` or judge them.

    python benchmarks/diagnose_exam.py settle    # makes the logs of that set and writes diagnosis/sure.json
    python benchmarks/diagnose_exam.py judge     # makes the others and writes docs/results/diagnose_exam/

Policies and logs stay in --work, so that a run goes on where it ended. diagnose_exam.yaml has the design.
"""

import argparse
import pickle
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from exam_cases import Fault, make_log
from exam_models import SPECS, Spec, obtain

from tailrl.diagnosis.log import LoggedRow
from tailrl.runtime.seeding import derive_seed

DESIGN = Path(__file__).with_name("diagnose_exam.yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """A log with its truth: the planted causes, none for a clean log."""

    set: str
    model: str
    number: int
    truth: tuple[str, ...]
    fault: dict[str, Any]
    floor: float
    rows: list[LoggedRow]


def design() -> dict[str, Any]:
    """Limits, and the faults of both sets."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def cases(which: str, work: Path, names: list[str]) -> Iterator[Case]:
    """The cases of a set, made where they are not there yet."""
    plan = design()
    faults = [
        (() if truth == "none" else tuple(truth.split("+")), given)
        for truth, listed in plan[which].items()
        for given in listed * (plan["clean_seeds"] if (truth, which) == ("none", "judge") else 1)
    ]
    for spec in SPECS:
        if spec.judge == (which == "judge") and (not names or spec.name in names):
            yield from _of_model(spec, which, faults, work)


def _of_model(spec: Spec, which: str, faults: list[tuple[tuple[str, ...], dict[str, Any]]], work: Path) -> Iterator[Case]:
    folder = work / "logs" / spec.name
    folder.mkdir(parents=True, exist_ok=True)
    trained = None
    for number, (truth, given) in enumerate(faults):
        if ("flips" in given and spec.kind != "mixture") or number % spec.every:
            continue
        file = folder / f"{number}.pickle"
        if not file.exists():
            trained = trained or obtain(spec, work / "models" / spec.name)
            begun = time.perf_counter()
            fault = Fault(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()})
            rows, floor = make_log(trained, fault, derive_seed("case", spec.seed, number) % 2**31, spec.responses)
            file.write_bytes(pickle.dumps(Case(which, spec.name, number, truth, given, floor, rows)))
            seconds = time.perf_counter() - begun
            print(f"{spec.name} {number} {'+'.join(truth) or 'none'} {given} {seconds:.1f} s", file=sys.stderr)
        made: Case = pickle.loads(file.read_bytes())
        yield made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("set", choices=("settle", "judge"))
    parser.add_argument("models", nargs="*", help="only these")
    parser.add_argument("--work", type=Path, default=Path("results/diagnose_exam"))
    arguments = parser.parse_args()
    found = list(cases(arguments.set, arguments.work, arguments.models))
    print(len(found))


if __name__ == "__main__":
    main()
