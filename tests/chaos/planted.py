"""Plants each fault of faults.py in a small study, and says after how many kills the harness has caught it.

    python tests/chaos/planted.py --out docs/results/planted.csv          # all faults: what `make planted` runs
    python tests/chaos/planted.py --faults "no moment is restored"

The study ends with its training, on the exact engine, and each kill strikes that (`kills.TRAINING_AIMS`). It is let
finish after every third kill, and compared. One study without a fault, which must pass all kills, goes first. The
script ends with 1 where a fault was not caught.
"""

import argparse
import csv
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import hub
from chaos_tables import faults_table
from disturbed import Disturbed
from faults import FAULTS, SWITCH, plant
from kills import TRAINING_AIMS, plan
from outcome import final
from rows import Rows
from small_study import TRAINING, SmallStudy, end_with_the_study, make_base

KILLS, PER_STUDY = 10, 3
"""Kills, and after how many of them a study is let finish, to be compared: so that a fault is caught early."""
SEED = 26
"""Of a plan that interrupts training and both kinds of its files within the first kills."""
NONE = "none"
"""In the table, for the study without a fault."""


@dataclass(frozen=True)
class Caught:
    """A row of the table.

    Attributes:
        fault: its name in FAULTS, or NONE.
        caught_by: the sentence that the harness ended with, without the names of runs; empty: it did not see it.
        kills: how many there had been.
        commit: of the code; a plus marks changes that are not committed.
        seed: of the plan.
    """

    fault: str
    caught_by: str
    kills: int
    commit: str
    seed: int


def run_faults(folder: Path, names: Sequence[str], seed: int) -> Iterator[Caught]:
    """A row for each fault; the undisturbed study, with all faults in its package and all off, is computed once."""
    with hub.serve(make_base(folder / "base", "exact")) as address:
        undisturbed = SmallStudy(folder / "undisturbed", "exact", address, TRAINING)
        plant(undisturbed.folder / "workflow" / "tailrl")
        spans, expected = undisturbed.finish(), final(undisturbed.results)
        for name in names:
            study = undisturbed.copied(folder / "disturbed")
            study.environment = {SWITCH: name}
            yield run_fault(name, study, spans, expected, seed)
            shutil.rmtree(study.folder)


def run_fault(
    name: str, study: SmallStudy, spans: Mapping[str, float], expected: Mapping[str, Any], seed: int
) -> Caught:
    """Strike a study with a fault until the harness ends, or all kills have been carried out."""
    planned = plan(KILLS, seed, TRAINING_AIMS)
    rows = Rows(None, planned, "exact", seed)
    disturbed, caught_by = Disturbed(study, rows, spans, expected), ""
    try:
        for first in range(0, KILLS, PER_STUDY):
            if first:
                study.begin_anew()
            disturbed.disturb(planned[first : first + PER_STUDY])
    except SystemExit as ended:
        caught_by = shortened(str(ended.code))
    return Caught(name, caught_by, len(rows.rows), rows.commit, seed)


def shortened(sentence: str) -> str:
    """The first line, each file once and without its folder: which run was struck first is chance."""
    line = sentence.partition("\n")[0]
    head, _, rest = line.partition(": ")
    if head != "not as undisturbed":
        line = re.sub(r"train/\w+/seed\d+", "a run", line)
        return re.sub(r"step \d+, though it had a state of step \d+", "an older state than its newest", line)
    names = re.findall(r"([\w.][\w. ]*?)(?: \([^)]*\))?(?:, |$)", re.sub(r"[\w.]+/", "", rest))
    return f"{head}: {', '.join(sorted(set(names)))}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument("--seed", type=int, default=SEED, help="of the kills")
    parser.add_argument("--out", type=Path, help="a CSV file, written anew, a row a fault")
    arguments = parser.parse_args()
    end_with_the_study()
    found = []
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        for row in run_faults(Path(folder), [NONE, *arguments.faults], arguments.seed):
            found.append(row)
            print(f"{row}\n", flush=True)
            if arguments.out:
                with arguments.out.open("w", newline="", encoding="utf-8") as file:
                    rows = csv.writer(file)
                    rows.writerow(field.name for field in fields(Caught))
                    rows.writerows(asdict(row).values() for row in found)
    print(faults_table([asdict(row) for row in found]))
    wrong = [row.fault for row in found if bool(row.caught_by) == (row.fault == NONE)]
    if wrong:
        sys.exit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
