"""Planned differences of published tables that speak to a claim."""

import csv
from pathlib import Path

import pytest

from tailrl.artifacts.tables import write_csv
from tailrl.claims.finding import ALIKE, CONTRADICTED, REPRODUCED, UNDECIDED
from tailrl.reports.overview.evidence import read_answers
from tailrl.runtime.errors import StudyError

GREEDY = "vexact.a.score.greedy"


def row(arm: str, mean: float, p_holm: float, **cells: str) -> dict[str, object]:
    """A difference of an arm minus the control of the same name."""
    numbers = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "p": p_holm / 2, "n": 10, "p_holm": p_holm}
    named = {"study": "skill", "page": "pooled/pooled", "family": "harm", "arm": arm, "minus": f"{arm}_control"}
    return named | {f"difference_{name}": value for name, value in numbers.items()} | cells


def published(root: Path, table: str, rows: list[dict[str, object]], where: str, claim: str = GREEDY) -> Path:
    """Published results with this one table, and what speaks to the claim."""
    write_csv(root / "tables" / f"{table}.csv", rows)
    (root / "made_for.yaml").write_text(
        f"differences:\n  - {{claim: {claim}, study: skill, table: {table}, where: {{{where}}}}}\n"
    )
    return root


def test_a_difference_decides_in_its_claims_direction_by_its_own_p(tmp_path: Path) -> None:
    rows = [row("low", -0.2, 0.05), row("chance", -0.2, 0.051), row("high", 0.2, 0.01), row("none", 0.0, 1.0)]
    rows.append(row("other", -0.3, 0.001, family="another"))
    found = [a for a in read_answers([published(tmp_path, "comparisons", rows, "family: harm")])[1] if a.line]
    assert {a.statement.id for a in found} == {"statement.vexact.a.score"}
    verdicts = [REPRODUCED, UNDECIDED, CONTRADICTED, UNDECIDED]
    assert [a.verdict for a in found] == verdicts
    assert found[0].words == "low minus low_control: -20.0 [-30.0, -10.0] points"
    first = found[0].line
    assert first and (first.arms, first.seeds, first.effect, first.p_holm) == ("low, low_control", 10, -0.2, 0.05)
    assert first.page == tmp_path / "skill/pooled/pooled.md"


def test_an_equivalence_keeps_its_verdict(tmp_path: Path) -> None:
    rows = [row("replay", 0.0, 1.0, verdict=ALIKE)]
    for column in ("difference_p", "difference_p_holm"):
        del rows[0][column]
    published(tmp_path, "equivalence", rows, 'arm: "*play"', claim="open.own_set")
    assert [a.verdict for a in read_answers([tmp_path])[1] if a.line] == [ALIKE]


def test_what_is_not_published_is_silent_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harm")
    (tmp_path / "made_for.yaml").write_text(
        f"differences:\n  - {{claim: {GREEDY}, study: horizon, where: {{family: harm}}}}\n"
    )
    assert not any(a.line for a in read_answers([tmp_path])[1])
    published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harms")
    with pytest.raises(
        StudyError, match=r"comparisons\.csv: skill has no row with family 'harms', which made_for\.yaml"
    ):
        read_answers([tmp_path])
    published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harm", claim="dvp.no_such")
    with pytest.raises(StudyError, match=r"made_for\.yaml: no claim has the id 'dvp\.no_such'"):
        read_answers([tmp_path])


def test_every_row_that_is_meant_is_published_and_belongs_to_one_claim() -> None:
    """In our own results: a claim's lines are as many as its rows, and no difference speaks twice to a claim."""
    root = Path(__file__).parents[4] / "docs/results"
    lines = [a for a in read_answers([root])[1] if a.line and not a.line.dose and a.line.page]
    seen = [(a.statement.id, a.line.id, a.study.name, a.words) for a in lines if a.line and a.study]
    assert len(seen) == len(set(seen)) > 30
    with (root / "tables/comparisons.csv").open(newline="", encoding="utf-8") as file:
        own = [r for r in csv.DictReader(file) if r["study"] == "skill" and r["family"].endswith("greedy, minus naive")]
    dvp = [r for r in own if r["arm"].endswith("_dvp")]
    assert len(dvp) == sum(study == "skill" and claim == "dvp.score.greedy" for _, claim, study, _ in seen) == 3
