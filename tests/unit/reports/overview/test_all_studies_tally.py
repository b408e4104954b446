"""The count of statements by verdict, on the page over all studies."""

import re
import shutil
from collections import Counter
from pathlib import Path

from claims_fixture import line_of

from tailrl.artifacts.claims import write_verdicts
from tailrl.claims.catalogue import STATEMENTS
from tailrl.claims.finding import CONTRADICTED, MIXED, NOT_SEEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.reports.overview.all_studies import write_all_studies
from tailrl.reports.overview.evidence import read_answers, verdicts_of_statements

ROOT = Path(__file__).parents[4]


def test_a_statement_counts_once_by_the_study_made_for_it(tmp_path: Path) -> None:
    """Not by each verdict that some line on it has, nor by other studies where it has its own."""
    told = {
        "stress": [("dvp.score", REPRODUCED)],
        "default": [("dvp.score", UNDECIDED)],
        "ablate_adaptive_rho": [("dvp.adaptive.score", CONTRADICTED), ("dvp.adaptive.score", UNDECIDED)],
        "collapse": [("open.dvp_or_mis.score", REPRODUCED)],
        "ablate_domain/words": [("dvp.score", CONTRADICTED)],
        "ablate_reject": [("vexact.c.r_corr", UNDECIDED), ("vexact.c.r_corr", UNTESTABLE)],
        "tim_isolated": [("vexact.b.reward", NOT_SEEN), ("vexact.b.reward", UNTESTABLE)],
        "remedies": [("vexact.c.tis", REPRODUCED), ("vexact.c.rejection", CONTRADICTED)],
    }
    for study, lines in told.items():
        path = tmp_path / "results" / study / "claims.csv"
        path.parent.mkdir(parents=True)
        write_verdicts(path, [line_of(claim, verdict=verdict, arms="a", seen="x") for claim, verdict in lines])
    shutil.copy(ROOT / "docs/results/made_for.yaml", tmp_path / "results")
    verdicts = verdicts_of_statements(read_answers([tmp_path / "results"])[1])
    seen = {name: verdicts[f"statement.{name}"] for name in (
        "dvp.score", "dvp.adaptive", "dvp.dvp_or_mis", "vexact.c", "vexact.c.r_corr", "vexact.b",
    )}  # fmt: skip
    assert seen == {
        "dvp.score": REPRODUCED,  # whatever other studies say
        "dvp.adaptive": f"{CONTRADICTED} in part",
        "dvp.dvp_or_mis": REPRODUCED,
        "vexact.c": MIXED,
        "vexact.c.r_corr": UNDECIDED,
        "vexact.b": NOT_SEEN,
    }
    assert len(verdicts) == len(STATEMENTS)
    write_all_studies([tmp_path / "results"], tmp_path)
    page = (tmp_path / "claims.md").read_text(encoding="utf-8")
    for verdict, number in Counter(verdicts.values()).items():
        assert re.search(rf"(: |, ){verdict} {number}[,.]", page.partition("## In brief")[0])
