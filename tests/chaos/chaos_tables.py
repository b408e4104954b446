"""The tables of docs/reliability.md, from the rows of kills and of planted faults.

python tests/chaos/chaos_tables.py docs/results                                # prints them
python tests/chaos/chaos_tables.py docs/results --into docs/reliability.md     # writes them into the page
"""

import argparse
import csv
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kills import AIMS, TWO_JOBS
from rows import EQUAL, Struck, read

COLUMNS = ("everything", "Snakemake", "one job", TWO_JOBS)


def table(struck: Sequence[Struck]) -> str:
    """How many kills of each kind, who died, and what followed, as Markdown: a line a kind and engine."""
    lines = [
        "| aim | engine | kills | everything | Snakemake alone | one job | two jobs | left half-written | runs that "
        "went on from a state | as undisturbed |",
        "| --- | --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    engines = sorted({row.engine for row in struck})
    order = [*dict.fromkeys(AIMS), *sorted({row.aim for row in struck} - set(AIMS))]
    for aim in order:
        for engine in engines:
            if rows := [row for row in struck if (row.aim, row.engine) == (aim, engine)]:
                lines.append(f"| {aim} | {engine} | {_cells(rows)} |")
    return "\n".join([*lines, f"| all | | {_cells(struck)} |"])


def _cells(rows: Sequence[Struck]) -> str:
    died = Counter(_died(row) for row in rows)
    cells = [len(rows), *(died[column] for column in COLUMNS), sum(row.half_written for row in rows)]
    settled = [row for row in rows if row.followed]
    equal = sum(row.followed == EQUAL for row in settled)
    cells.append(sum(row.interrupted for row in settled if row.followed == EQUAL))
    return " | ".join(map(str, cells)) + f" | {equal} of {len(settled)}"


def _died(row: Struck) -> str:
    if row.killed in COLUMNS:
        return row.killed
    return TWO_JOBS if " + " in row.killed else "one job"


def provenance_line(struck: Sequence[Struck]) -> str:
    """A line an engine: how many kills and studies, on which commits, machines and seeds, in how many minutes."""
    parts = []
    for engine in sorted({row.engine for row in struck}):
        rows = [row for row in struck if row.engine == engine]
        minutes = max(row.seconds for row in rows) / 60
        commits, machines = (sorted({getattr(row, name) for row in rows}) for name in ("commit", "hardware"))
        studies = len({row.study for row in rows if row.followed == EQUAL})
        seeds = ", ".join(sorted({str(row.seed) for row in rows}))
        parts.append(
            f"- {engine}: {len(rows)} kills in {minutes:.0f} minutes; {studies} studies finished as undisturbed. Commit"
            f" {', '.join(commits)}, seed {seeds}, {', '.join(machines)}."
        )
    return "\n".join(parts)


def faults_table(rows: Sequence[Mapping[str, object]]) -> str:
    """What caught each planted fault, and after how many kills, as Markdown."""
    lines = ["| fault | caught by | after kills |", "| --- | --- | --: |"]
    return "\n".join(lines + [f"| {row['fault']} | {row['caught_by'] or 'nothing'} | {row['kills']} |" for row in rows])


def tables(results: Path) -> dict[str, str]:
    """Both tables by the name of their file in a folder of published results."""
    struck = read(results / "chaos.csv")
    with (results / "planted.csv").open(newline="", encoding="utf-8") as file:
        planted = faults_table(list(csv.DictReader(file)))
    return {"chaos.csv": f"{table(struck)}\n\n{provenance_line(struck)}", "planted.csv": planted}


def put(page: str, name: str, text: str) -> str:
    """The page with the block that is made from the file of this name."""
    begin, end = f"<!-- made from {name} -->\n", f"\n<!-- end of {name} -->"
    found, count = re.subn(f"(?s)(?<={re.escape(begin)}).*(?={re.escape(end)})", lambda _: text, page)
    if count != 1:
        raise ValueError(f"the page has {count} blocks between {begin!r} and {end!r}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("results", type=Path, help="the folder with chaos.csv and planted.csv")
    parser.add_argument("--into", type=Path, help="the page to write them into")
    arguments = parser.parse_args()
    made = tables(arguments.results)
    print("\n\n".join(made.values()))
    if arguments.into:
        page = arguments.into.read_text(encoding="utf-8")
        for name, text in made.items():
            page = put(page, name, text)
        arguments.into.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
