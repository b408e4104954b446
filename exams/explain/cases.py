"""Explains a folder of logs of known cause, and says what is named and what it takes.

    python workflow/scripts/smollm2.py results/models/smollm2
    python -m exams.explain.cases FOLDER --model results/models/smollm2 --out docs/results/explain_cases.csv

cases.yaml beside this file has the logs' names and faults; a log that the folder lacks is left out. The prompts are
those of the folder's logs that have any. Each log has a process of its own, whose processor time and memory are its
row's. Rows of other cases stay in the CSV. `--case NAME` takes one case.
"""

import argparse
import csv
import json
import resource
import sys
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import yaml
from table import show, write_csv

CASES = Path(__file__).with_name("cases.yaml")
WITHIN = 0.1  # of a planted number: the named one's error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="with the logs of cases.yaml")
    parser.add_argument("--model", required=True, help="the folder that workflow/scripts/smollm2.py wrote")
    parser.add_argument("--prompts", type=Path, help="a file of prompts, instead of those of the folder's logs")
    parser.add_argument("--tokens", type=int, default=1000, help="of a log that are computed at most")
    parser.add_argument("--case", action="append", help="a case's name; all if not said")
    parser.add_argument("--out", type=Path, help="CSV with a row a case")
    arguments = parser.parse_args()
    cases: dict[str, dict[str, Any]] = yaml.safe_load(CASES.read_text(encoding="utf-8"))
    chosen = {name: case for name, case in cases.items() if not arguments.case or name in arguments.case}
    present = {name: case for name, case in chosen.items() if (arguments.folder / name).exists()}
    if not present:
        sys.exit(f"{arguments.folder}: has none of {', '.join(chosen) or ', '.join(cases)}")
    prompts = arguments.prompts or write_prompts(arguments.folder, Path("results/explain_cases/prompts.jsonl"))
    rows = _rows(arguments.out)
    for name, case in present.items():
        # A process of its own: its processor time and its memory are this log's.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            job = pool.submit(answer, arguments.folder / name, case, arguments.model, prompts, arguments.tokens)
            row = job.result()
        rows[name] = {"case": name, **row}
        print(json.dumps(rows[name], ensure_ascii=False), file=sys.stderr, flush=True)
        if arguments.out:
            write_csv([rows[one] for one in cases if one in rows], arguments.out)
    show([rows[name] for name in present], None)


def write_prompts(folder: Path, file: Path) -> Path:
    """Writes the prompts of the folder's logs that have their ids, each once; returns the file."""
    from tailrl.diagnosis.tables import read_table
    from tailrl.explanation.sequences import read

    prompts: dict[tuple[int, ...], None] = {}
    for log in sorted(folder.glob("c*/")):
        for response in read(read_table(str(log))).responses:
            if response.whole_T is not None and response.place_T is not None:
                prompts.setdefault(tuple(response.whole_T[: int(response.place_T[0])].tolist()))
    if not prompts:
        sys.exit(f"{folder}: no log has its prompts' ids; give --prompts FILE")
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"prompt_ids": list(ids)}) + "\n" for ids in prompts)
    file.write_text("".join(lines), encoding="utf-8")
    return file


def answer(log: Path, case: Mapping[str, Any], model: str, prompts: Path, tokens: int) -> dict[str, Any]:
    """What is said of a log, whether that is what was planted, and what it took."""
    from tailrl.explanation.explanation import explain
    from tailrl.explanation.page import verdict

    began, used = time.perf_counter(), time.process_time()
    explanation = explain(str(log), model, prompts=prompts, tokens=tokens)
    cpu, elapsed = time.process_time() - used, time.perf_counter() - began
    named = {side: _named(explanation.own(side)) for side in ("sampler", "trainer")}
    named["both"] = _named(explanation.shared)
    findings = [finding.name for finding in explanation.findings]
    is_right = (
        all(is_near(named[side], case.get(side, {})) for side in named)
        and findings == case.get("findings", [])
        and explanation.pinned_side == case.get("pinned", "")
        and explanation.code == case.get("code", 1)
    )
    said = [f"{side}: {_shown(values)}" for side, values in named.items() if values]
    said += findings + ([f"pinned {explanation.pinned_side}"] if explanation.pinned_side else [])
    side = explanation.trainer if "trainer" in case else explanation.sampler
    return {
        "planted": case["planted"],
        "named": "; ".join(said),
        "right": int(is_right),
        "nats_before": round(side.before, 4),
        "nats_after": round(side.after, 4),
        "tokens": explanation.tokens,
        "hypotheses": explanation.tried,
        "cpu_seconds": round(cpu),
        "seconds": round(elapsed),
        "memory_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000,
        "verdict": verdict(explanation)[0],
    }


def _named(world: Any) -> dict[str, Any]:
    return {choice.hypothesis.name: choice.value for choice in world}


def _shown(values: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) and value else f"{name} {value or ''}".strip()
        for name, value in values.items()
    )


def is_near(named: Mapping[str, Any], planted: Mapping[str, Any]) -> bool:
    """Whether the same hypotheses are named, with numbers within WITHIN of the planted ones."""
    if named.keys() != planted.keys():
        return False
    return all(
        abs(named[name] - value) <= WITHIN * abs(value)
        if isinstance(value, float | int) and isinstance(named[name], float)
        else str(named[name]) == str(value)
        for name, value in planted.items()
    )


def _rows(out: Path | None) -> dict[str, dict[str, Any]]:
    """The rows that a CSV has, by case."""
    if out is None or not out.exists():
        return {}
    with out.open(encoding="utf-8", newline="") as file:
        return {row["case"]: dict(row) for row in csv.DictReader(file)}


if __name__ == "__main__":
    main()
