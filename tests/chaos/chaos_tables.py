"""The tables of kills and of planted faults: in brief for docs/reliability.md, and whole for the scripts.

`make pages` writes the brief ones into the page.
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
    cells = [len(rows), *(died[column] for column in COLUMNS)]
    return " | ".join(map(str, cells)) + f" | {_followed(rows)}"


def _followed(rows: Sequence[Struck]) -> str:
    """What was half-written, the runs that went on, and how many kills ended as undisturbed: three cells."""
    settled = [row for row in rows if row.followed]
    equal = [row for row in settled if row.followed == EQUAL]
    half_written = sum(row.half_written for row in rows)
    went_on = sum(row.interrupted for row in equal)
    return f"{half_written} | {went_on} | {len(equal)} of {len(settled)}"


def _died(row: Struck) -> str:
    if row.killed in COLUMNS:
        return row.killed
    return TWO_JOBS if " + " in row.killed else "one job"


def engines_table(struck: Sequence[Struck]) -> str:
    """How many kills, in how many minutes, and what followed, as Markdown: a line an engine."""
    lines = [
        "| engine | kills | minutes | left half-written | runs that went on from a state | as undisturbed |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for engine in sorted({row.engine for row in struck}):
        rows = [row for row in struck if row.engine == engine]
        minutes = max(row.seconds for row in rows) / 60
        lines.append(f"| {engine} | {len(rows)} | {minutes:.0f} | {_followed(rows)} |")
    return "\n".join(lines)


def faults_table(rows: Sequence[Mapping[str, object]]) -> str:
    """What caught each planted fault, and after how many kills, as Markdown."""
    lines = ["| fault | caught by | after kills |", "| --- | --- | --: |"]
    for row in rows:
        caught_by = row["caught_by"] or "nothing"
        # No kills: a test alone has caught it.
        end = f"{caught_by} | {row['kills']} |" if row["kills"] else f"`{caught_by}` | |"
        lines.append(f"| {row['fault']} | {end}")
    return "\n".join(lines)


def faults_sentence(rows: Sequence[Mapping[str, object]]) -> str:
    """How many planted faults were caught, by what, and after how many kills at most."""
    faults = [row for row in rows if row["caught_by"]]
    struck = [int(str(row["kills"])) for row in faults if row["kills"]]
    unharmed = [int(str(row["kills"])) for row in rows if not row["caught_by"]]
    return (
        f"Of {len(faults)} faults ([planted.csv](results/planted.csv)) a test caught {len(faults) - len(struck)}, and "
        f"kills the other {len(struck)}, after\n{max(struck)} kills at most. A study without a fault passed "
        f"{unharmed[0]}."
    )


def tables(results: Path) -> dict[str, str]:
    """The blocks of the page by the name of their file in a folder of published results."""
    struck = read(results / "chaos.csv")
    with (results / "planted.csv").open(newline="", encoding="utf-8") as file:
        planted = faults_sentence(list(csv.DictReader(file)))
    return {"chaos.csv": engines_table(struck), "planted.csv": planted}


def main() -> None:
    PAGE.write_text(filled(PAGE, tables(PAGE.parent / "results")), encoding="utf-8")


if __name__ == "__main__":
    main()
