"""Plants each fault of slips.py, which a test must catch, and each of faults.py in a small study that is killed.

    python tests/chaos/planted.py --out docs/results/planted.csv          # all faults: what `make planted` runs
    python tests/chaos/planted.py --faults "no moment is restored"

A fault of slips.py stands in a copy of the checkout, where its own test must fail; without a fault all these pass.

The study of the others ends with its training, on the exact engine, and each kill strikes that
(`kills.TRAINING_AIMS`). It is let finish after every third kill, and compared. One study without a fault, which must
pass all kills, goes first. A row says after how many kills the harness has caught the fault. The script ends with 1
where a fault was not caught.
"""

import argparse
import csv
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain
from pathlib import Path
from typing import Any

import hub
import slips
from chaos_tables import faults_table
from disturbed import Disturbed
from faults import FAULTS, SWITCH, plant
from kills import TRAINING_AIMS, plan
from outcome import final
from rows import Rows, commit
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
        fault: its name in SLIPS or FAULTS, or NONE.
        caught_by: the test that failed, or the sentence that the harness ended with, without the names of runs; empty:
            the fault was not seen.
        kills: how many there had been; None where a test catches it.
        commit: of the code; a plus marks changes that are not committed.
        seed: of the plan, if there is one.
    """

    fault: str
    caught_by: str
    kills: int | None
    commit: str
    seed: int | None


def run_slips(folder: Path, names: Sequence[str]) -> Iterator[Caught]:
    """A row for each fault of SLIPS."""
    for name, failed in slips.caught(folder, names):
        yield Caught(name, slips.SLIPS[name].test.rpartition("/")[2] if failed else "", None, commit(), None)


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
    every = [*slips.SLIPS, *FAULTS]
    parser.add_argument("--faults", nargs="+", choices=every, default=every, metavar="NAME")
    parser.add_argument("--seed", type=int, default=SEED, help="of the kills")
    parser.add_argument("--out", type=Path, help="a CSV file, written anew, a row a fault")
    arguments = parser.parse_args()
    end_with_the_study()
    killed = [name for name in arguments.faults if name in FAULTS]
    tested = [name for name in arguments.faults if name in slips.SLIPS]
    found = []
    with (
        tempfile.TemporaryDirectory(prefix="chaos-") as study,
        tempfile.TemporaryDirectory(prefix="slips-") as checkout,
    ):
        rows = run_slips(Path(checkout), tested) if tested else iter(())
        for row in chain(rows, run_faults(Path(study), [NONE, *killed], arguments.seed) if killed else ()):
            found.append(row)
            print(f"{row}\n", flush=True)
            if arguments.out:
                with arguments.out.open("w", newline="", encoding="utf-8") as file:
                    writer = csv.writer(file)
                    writer.writerow(field.name for field in fields(Caught))
                    writer.writerows(asdict(row).values() for row in found)
    print(faults_table([asdict(row) for row in found]))
    wrong = [row.fault for row in found if bool(row.caught_by) == (row.fault == NONE)]
    if wrong:
        sys.exit(f"not as it must be: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
