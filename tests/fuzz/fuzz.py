"""Fuzzing: damaged inputs by the million, each of which must be accepted, or refused in one sentence.

Inputs come in batches of 500, made from seed, kind and number alone. A process judges ten batches. One that dies is
a finding as well, and the batch after it goes to a new process. The input of a finding is written to
`tests/fixtures/fuzz_corpus/`, made smaller as long as it fails; the fast tests replay all that lies there.
"""

import argparse
import csv
import hashlib
import itertools
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from random import Random
from typing import Any

from oracle import Finding, judge, limited, passes_first, shrunk

ROOT = Path(__file__).parents[2]
CORPUS = ROOT / "tests" / "fixtures" / "fuzz_corpus"
SHARES = {"models": 0.05, "results": 0.05, "logs": 0.05, "studies": 0.1, "rows": 0.75}
"""Of all cases, by kind; of a million none less than 50,000. Cheap kinds get the rest: a model takes 20 ms of processor
time, a result 8, a study or a log 5, a row 0.7."""

BATCH, BATCHES = 500, 10
MEMORY = Path("/dev/shm")
"""Where the damaged files lie if it can be written: on a busy disk most of a case's time went into waiting for it."""

COLUMNS = (
    "kind",
    "seed",
    "commit",
    "cases",
    "accepted",
    "refused",
    "failed",
    "faults",
    "seconds",
    "processor",
    "slowest",
)
# Threads would add to the processor's time; pyarrow's own memory pools reserve a GiB at once.
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "MPLBACKEND": "agg"}
ENVIRONMENT = {**os.environ, **QUIET, "ARROW_DEFAULT_MEMORY_POOL": "system", "WANDB_MODE": "disabled"}
DEADLY = 30
"""Seconds of the processor after which the kernel ends a process whose case no signal reaches."""


def work(name: str, seed: int, batches: range, folder: Path) -> None:
    """Judges batches; a line of JSON on stdout for each. The path of the case in hand is in folder/case."""
    kind, there = import_module(f"fuzz_{name}").KIND, folder / name
    there.mkdir()
    kind.prepare(there)
    os.chdir(there)
    for batch in batches:
        counted, slowest, began = Counter[str](), 0.0, time.perf_counter()
        found: dict[str, tuple[str, Path]] = {}
        (folder / "case").unlink(missing_ok=True)
        made = list(itertools.islice(kind.cases(Random(f"{seed} {name} {batch}")), BATCH))
        with limited():
            for case in made:
                (folder / "case").write_text(case[0], encoding="utf-8")
                start = time.process_time()
                resource.setrlimit(resource.RLIMIT_CPU, (int(start) + DEADLY, resource.RLIM_INFINITY))
                judged = judge(kind, there, case)
                slowest = max(slowest, time.process_time() - start)
                if not isinstance(judged, Finding):
                    counted["accepted" if judged else "refused"] += 1
                    continue
                counted["failed"] += 1
                if judged.place in found:
                    continue
                content = shrunk(kind, there, case, judged.place)
                found[judged.place] = judged.words, save(name, case[0], content)
        faults = {place: {"words": words, "file": str(path)} for place, (words, path) in found.items()}
        line = {"faults": faults, "seconds": time.perf_counter() - began, "slowest": slowest, "cases": BATCH}
        print(json.dumps({"batch": batch, **counted, **line}), flush=True)


def save(kind: str, name: str, content: bytes) -> Path:
    """Keeps a case in the corpus, as kind/digest/name; returns its path there."""
    path = CORPUS / kind / hashlib.sha256(content).hexdigest()[:12] / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path.relative_to(CORPUS)


def judged_batches(kind: str, seed: int, batches: range) -> Iterator[dict[str, Any]]:
    """What processes say of these batches, with a line for each process that died."""
    while batches:
        at = MEMORY if os.access(MEMORY, os.W_OK) else None
        with tempfile.TemporaryDirectory(dir=at) as there, tempfile.TemporaryFile("w+") as said:
            folder = Path(there)
            given = [kind, str(seed), str(batches[0]), str(batches[-1]), there]
            command = [sys.executable, "-W", "ignore", __file__, "--work", *given]
            done = subprocess.run(command, stdout=subprocess.PIPE, stderr=said, text=True, env=ENVIRONMENT)
            lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')]
            yield from lines
            batches = batches[len(lines) :]
            if not batches:
                return
            said.seek(0)
            words_said = said.read()
            if not (folder / "case").is_file():
                raise SystemExit(f"{kind}: nothing could be judged:\n{words_said}")
            line = {"batch": batches[0], "cases": 1, "faults": {}, "seconds": 0.0, "slowest": 0.0}
            batches = batches[1:]
            if not passes_first(import_module(f"fuzz_{kind}").KIND, folder / kind):
                yield {**line, "refused": 1}
                continue
            name = (folder / "case").read_text(encoding="utf-8")
            file = save(kind, name, (folder / kind / name).read_bytes())
            faults = {f"ended with {done.returncode}": {"words": words_said[-3000:], "file": str(file)}}
            yield {**line, "faults": faults, "failed": 1}


def processor_seconds() -> float:
    """Processor time of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def fuzz(kind: str, seed: int, cases: int, jobs: int, end: float) -> dict[str, Any]:
    """Judges so many cases of a kind on several processes at once; prints each fault when it is first met.

    No process begins after `end`, seconds of `time.perf_counter`: the cases may be fewer then.
    """

    def judged(part: range) -> list[dict[str, Any]]:
        return list(judged_batches(kind, seed, part)) if time.perf_counter() < end else []

    batches = range(-(-cases // BATCH))
    parts = [batches[begin : begin + BATCHES] for begin in range(0, len(batches), BATCHES)]
    total, places, began = Counter[str](), dict[str, int](), time.perf_counter()
    slowest, before = 0.0, processor_seconds()
    with ThreadPoolExecutor(jobs) as pool:
        for lines in pool.map(judged, parts):
            for line in lines:
                total.update({key: line.get(key, 0) for key in ("cases", "accepted", "refused", "failed")})
                slowest = max(slowest, line["slowest"])
                for place, fault in line["faults"].items():
                    if place not in places:
                        print(
                            f"{kind}, batch {line['batch']}: {place}\n  {fault['file']}\n{fault['words']}\n", flush=True
                        )
                    places[place] = places.get(place, 0) + 1
    times = {"seconds": round(time.perf_counter() - began), "processor": round(processor_seconds() - before)}
    return {"kind": kind, "seed": seed, **total, "faults": len(places), **times, "slowest": round(slowest, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1_000_000, help="of all kinds together")
    parser.add_argument("--kinds", nargs="+", default=list(SHARES), choices=list(SHARES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at once")
    parser.add_argument("--hours", type=float, default=float("inf"), help="after these no process begins")
    parser.add_argument("--out", type=Path, help="a CSV to which a line for each kind is appended")
    parser.add_argument("--work", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        kind, seed, first, last, folder = given.work
        work(kind, int(seed), range(int(first), int(last) + 1), Path(folder))
        return
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT)
    rows, end = [], time.perf_counter() + 3600 * given.hours
    for kind in given.kinds:
        share = SHARES[kind] / sum(SHARES[name] for name in given.kinds)
        found = {"commit": commit.stdout.strip(), **fuzz(kind, given.seed, round(share * given.cases), given.jobs, end)}
        rows.append({key: found.get(key, 0) for key in COLUMNS})
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    if given.out:
        new = not given.out.is_file()
        with given.out.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerows(rows)
    if any(row["failed"] for row in rows):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
