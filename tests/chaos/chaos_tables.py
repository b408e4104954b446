"""The tables of docs/reliability.md, from the rows of kills and of planted faults.

`make pages` writes them into the page.
"""

import csv
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from kills import AIMS, TWO_JOBS
from rows import EQUAL, Struck, read

from blocks import filled

PAGE = Path(__file__).parents[2] / "docs/reliability.md"
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
    for row in rows:
        caught_by = row["caught_by"] or "nothing"
        # No kills: a test alone has caught it.
        end = f"{caught_by} | {row['kills']} |" if row["kills"] else f"`{caught_by}` | |"
        lines.append(f"| {row['fault']} | {end}")
    return "\n".join(lines)


def tables(results: Path) -> dict[str, str]:
    """Both tables by the name of their file in a folder of published results."""
    struck = read(results / "chaos.csv")
    with (results / "planted.csv").open(newline="", encoding="utf-8") as file:
        planted = faults_table(list(csv.DictReader(file)))
    return {"chaos.csv": f"{table(struck)}\n\n{provenance_line(struck)}", "planted.csv": planted}


def main() -> None:
    PAGE.write_text(filled(PAGE, tables(PAGE.parent / "results")), encoding="utf-8")


if __name__ == "__main__":
    main()
