"""A first half hour on a GPU: the rows of half_hour.yaml in order, a line of a CSV file behind each, in several calls.

    python tests/gpu/half_hour.py FOLDER --list                           # rows, minutes, what no CPU executes
    python tests/gpu/half_hour.py FOLDER --rehearse                       # on two CPU cores
    python tests/gpu/half_hour.py FOLDER --wheels WHEELS --seconds 570    # on the GPU; call again until it ends with 0

`--wheels` installs a folder of wheels first, without a network and without dependencies: all that is in it. A wheel may
come in parts, NAME.whl.00, NAME.whl.01, ..., which are joined. Each row is a program of its own with a time limit. A
call starts no row that its `--seconds` have no time for. It ends with code 75 while rows are left, and the next call
goes on behind the rows of the CSV. A row that failed is not made again unless `--again` asks for it.
"""

import argparse
import csv
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PATHS = ("workflow", "workflow/scripts", "benchmarks", "tests/gpu")
UNFINISHED = 75  # EX_TEMPFAIL: call again
COLUMNS = ("row", "verdict", "seconds", "limit", "device", "last_line")
Row = Mapping[str, Any]


def rows() -> list[dict[str, Any]]:
    """The rows of half_hour.yaml."""
    listed: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return listed


def join_parts(wheels: Path, into: Path) -> list[Path]:
    """The wheels of a folder, those in parts joined in another folder; raises ValueError where a part is missing."""
    whole = sorted(wheels.glob("*.whl"))
    for first in sorted(wheels.glob("*.whl.00")):
        parts = sorted(first.parent.glob(f"{first.stem}.[0-9][0-9]"))
        if [part.suffix for part in parts] != [f".{number:02}" for number in range(len(parts))]:
            raise ValueError(f"{first.stem}: a part is missing; there are {', '.join(part.name for part in parts)}")
        joined = into / first.stem
        with joined.open("wb") as file:
            for part in parts:
                file.write(part.read_bytes())
        whole.append(joined)
    return whole


def install(wheels: Path) -> None:
    """Install all wheels of a folder into this environment."""
    with tempfile.TemporaryDirectory() as folder:
        found = join_parts(wheels, Path(folder))
        if not found:
            raise ValueError(f"{wheels}: holds no wheel")
        options = ["--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check", "--quiet"]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, *map(str, found)], check=True)


def command_of(row: Row, out: Path, rehearse: bool) -> list[str]:
    """A row's program with its arguments; empty where a CPU cannot run it."""
    words = row.get("rehearse", row["command"]) if rehearse else row["command"]
    filled = [word.replace("{out}", str(out)) for word in words]
    return [sys.executable, str(ROOT / filled[0]), *filled[1:]] if filled else []


def make(row: Row, command: Sequence[str], log: Path, rehearse: bool) -> dict[str, object]:
    """Run a row's program to its end or to its time limit; the columns of its line that this gives."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / path) for path in PATHS)}
    environment |= row.get("environment", {})
    if rehearse:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    limit = None if rehearse else 60.0 * row["minutes"]
    begun = time.monotonic()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            code = process.wait(limit)
            verdict = "done" if code == 0 else "unfinished" if code == UNFINISHED else f"failed with {code}"
        except subprocess.TimeoutExpired:
            verdict = "out of time"
            os.killpg(process.pid, 9)
            process.wait()
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    seconds = round(time.monotonic() - begun, 1)
    return {"verdict": verdict, "seconds": seconds, "last_line": " ".join(said[-1].split())[:300]}


def earlier(file: Path) -> dict[str, dict[str, str]]:
    """The lines of earlier calls by row, of each its last."""
    if not file.exists():
        return {}
    with file.open(encoding="utf-8", newline="") as opened:
        return {line["row"]: line for line in csv.DictReader(opened)}


def device(rehearse: bool) -> str:
    """The GPU's name by its driver, without importing torch; without a GPU the CPU's name."""
    if not rehearse:
        try:
            asked = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
            return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.splitlines()[0]
        except (OSError, subprocess.CalledProcessError, IndexError):
            pass
    return "CPU"


def listed() -> str:
    """The rows with their minutes, and what of each no rehearsal on a CPU executes."""
    lines = [f"{sum(row['minutes'] for row in rows())} minutes in all, estimated"]
    for row in rows():
        where = "" if row.get("rehearse", True) else "; a CPU does not run it"
        lines.append(f"{row['minutes']:>3} min  {row['name']}{where}; on a GPU alone: {', '.join(row['other'])}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("out", type=Path, help="the folder of results, from call to call")
    parser.add_argument("--wheels", type=Path, help="a folder of wheels to install first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--only", default="", metavar="PART", help="rows whose name holds this")
    parser.add_argument("--again", action="store_true", help="make rows that failed once more")
    parser.add_argument("--rehearse", action="store_true", help="what a CPU can run, with small sizes")
    parser.add_argument("--list", action="store_true", help="print the rows and end")
    options = parser.parse_args()
    if options.list:
        print(listed())
        return
    until = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    if options.wheels:
        install(options.wheels)
    file, same = options.out / "rows.csv", device(options.rehearse)
    left = []
    for number, row in enumerate(rows()):
        done = earlier(file).get(row["name"], {"verdict": "unfinished"})["verdict"]
        if options.only not in row["name"] or done == "done" or (done != "unfinished" and not options.again):
            continue
        command = command_of(row, options.out.resolve(), options.rehearse)
        if until - time.monotonic() < (0 if options.rehearse else 60 * row["minutes"]):
            left.append(row["name"])
            continue
        line = {"row": row["name"], "limit": 60 * row["minutes"], "device": same}
        if command:
            line |= make(row, command, options.out / f"logs/{number:02}.txt", options.rehearse)
        else:
            line |= {"verdict": "needs a GPU", "seconds": 0.0, "last_line": ""}
        new = not file.exists()
        with file.open("a", encoding="utf-8", newline="") as opened:
            writer = csv.DictWriter(opened, COLUMNS)
            if new:
                writer.writeheader()
            writer.writerow(line)
        print(f"{line['row']}: {line['verdict']} in {line['seconds']} s; {line['last_line']}", flush=True)
        if line["verdict"] == "unfinished":
            left.append(row["name"])
    if left:
        print(f"left: {', '.join(left)}; call again", file=sys.stderr)
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    main()
