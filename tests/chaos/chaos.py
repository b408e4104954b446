"""Kills a small study at random moments until it is finished, and compares it with one that nobody disturbed.

    python tests/chaos/chaos.py --out chaos.csv              # 100 kills, with vLLM: what `make chaos` runs
    python tests/chaos/chaos.py --kills 300 --engine exact --out chaos.csv

Each kill has an aim (`kills.AIMS`), and a round of 14 kills meets every part of a study. The script looks at the
study's processes and files until the aim is on, lets a random part of the time go by that it lasts, and strikes with
SIGKILL: everything at once (Snakemake, its jobs, W&B's processes: a power cut), Snakemake alone (its jobs go on by
themselves), one job (the kernel out of memory), or two jobs in one blow. Downloads, checkpoints and results are met
while they are being written. After a Snakemake has ended the study is started again by the one command that the README
names. A study that finishes before the kills are used up is compared and begun anew. Its runs must have learned
(`learning.py`): a wrongly restored weight shows only where weights move.

The seed fixes aims, victims and the shares of time. It cannot fix how fast the machine is. Each kill is a row at the
end of --out. Started again with the same --out, engine and seed, the script goes on: the undisturbed study is computed
again, and the kills of a study that had not finished are taken again.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import hub
from chaos_tables import table
from disturbed import Disturbed
from kills import plan
from outcome import final
from rows import EQUAL, Rows, Struck
from small_study import ENGINES, SmallStudy, end_with_the_study, make_base


def run(folder: Path, kills: int, engine: str, seed: int, out: Path | None = None) -> list[Struck]:
    """The whole of it; returns all kills of the plan, and exits where a study did not end as it should."""
    planned = plan(kills, seed)
    rows = Rows(out, planned, engine, seed)
    left = planned[len(rows.rows) :]
    if left:
        with hub.serve(make_base(folder / "base", engine)) as address:
            undisturbed = SmallStudy(folder / "undisturbed", engine, address)
            spans, expected = undisturbed.finish(), final(undisturbed.results)
            disturbed = Disturbed(undisturbed.copied(folder / "disturbed"), rows, spans, expected)
            disturbed.disturb(left)
        if not disturbed.resumed and any(row.at == "checkpoint" for row in rows.rows):
            sys.exit("training was killed beside its checkpoints, and no run has gone on from one")
        print(
            f"\n{len(left)} kills now (seed {seed}): each finished study has learned and is the same as the undisturbed"
            f" one in every file that no clock has a part in; {disturbed.resumed} runs went on from a state, all that"
            f" had one; {disturbed.kept} were finished when struck, and none was trained again"
        )
    print(f"\n{table(rows.rows)}\n")
    if failed := [row.kill for row in rows.rows if row.followed != EQUAL]:
        sys.exit(f"not as undisturbed after kills {', '.join(map(str, failed))}")
    return rows.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--engine", choices=tuple(ENGINES), default="vllm", help="exact: one that starts faster")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and the victims")
    parser.add_argument(
        "--out", type=Path, help="a CSV file, a row a kill; where it has rows already, the script goes on"
    )
    arguments = parser.parse_args()
    end_with_the_study()
    with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
        run(Path(folder), arguments.kills, arguments.engine, arguments.seed, arguments.out)


if __name__ == "__main__":
    main()
