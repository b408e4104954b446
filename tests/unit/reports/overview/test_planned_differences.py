"""Planned differences of published tables that speak to a claim."""

import csv
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tailrl.artifacts.published import read_published
from tailrl.artifacts.tables import write_csv
from tailrl.claims.catalogue import CATALOGUE
from tailrl.claims.decide import decide_published
from tailrl.claims.finding import ALIKE, CONTRADICTED, NOT_SEEN, REPRODUCED, UNDECIDED
from tailrl.reports.overview.evidence import read_answers, read_made_for
from tailrl.runtime.errors import StudyError
from tailrl.stats.tests import Difference

GREEDY = "vexact.a.score.greedy.matched"
ROOT = Path(__file__).parents[4] / "docs/results"


def row(arm: str, mean: float, p_holm: float, **cells: str) -> dict[str, object]:
    """A difference of an arm minus the control of the same name."""
    numbers = {"mean": mean, "low": mean - 0.1, "high": mean + 0.1, "p": p_holm / 2, "n": 10, "p_holm": p_holm}
    named = {"study": "skill", "page": "pooled/pooled", "family": "harm", "arm": arm, "minus": f"{arm}_control"}
    return named | {f"difference_{name}": value for name, value in numbers.items()} | cells


def published(
    root: Path, table: str, rows: list[dict[str, object]], where: str, claim: str = GREEDY, more: str = ""
) -> Path:
    """Published results with this one table, and what speaks to the claim."""
    write_csv(root / "tables" / f"{table}.csv", rows)
    (root / "made_for.yaml").write_text(
        f"differences:\n  - {{claim: {claim}, study: skill, table: {table}, where: {{{where}}}{more}}}\n"
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


def test_a_difference_of_exactly_zero_was_not_seen(tmp_path: Path) -> None:
    rows = [row("same", 0.0, 1.0, difference_low="0", difference_high="0")]
    assert [
        a.verdict for a in read_answers([published(tmp_path, "comparisons", rows, "family: harm")])[1] if a.line
    ] == [NOT_SEEN]


def test_before_all_units_have_run_nothing_is_decided(tmp_path: Path) -> None:
    root = published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harm", more=", units: 11")
    (found,) = [a for a in read_answers([root])[1] if a.line]
    assert found.verdict == UNDECIDED
    assert found.words == "10 of 11 so far, low minus low_control: -20.0 [-30.0, -10.0] points"
    root = published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harm", more=", units: 10")
    assert [a.verdict for a in read_answers([root])[1] if a.line] == [REPRODUCED]


def test_a_single_unit_has_no_line(tmp_path: Path) -> None:
    alone = row("low", -0.2, 0.01) | {f"difference_{name}": "" for name in ("low", "high", "p", "p_holm")}
    root = published(tmp_path, "comparisons", [alone, row("high", 0.2, 0.01)], "family: harm")
    assert [a.verdict for a in read_answers([root])[1] if a.line] == [CONTRADICTED]


def test_what_is_not_published_is_silent(tmp_path: Path) -> None:
    published(tmp_path, "comparisons", [row("low", -0.2, 0.01)], "family: harm")
    (tmp_path / "made_for.yaml").write_text(
        f"differences:\n  - {{claim: {GREEDY}, study: horizon, where: {{family: harm}}}}\n"
    )
    assert not any(a.line for a in read_answers([tmp_path])[1])


@pytest.mark.parametrize(
    ("where", "claim", "more", "message"),
    [
        (
            "family: harms",
            GREEDY,
            "",
            r"comparisons\.csv: skill has no row with family 'harms', which made_for\.yaml names",
        ),
        ("family: harm", "dvp.no_such", "", r"made_for\.yaml: no claim has the id 'dvp\.no_such'"),
        ("famly: '*'", GREEDY, "", r"comparisons\.csv: has no column 'famly', which made_for\.yaml names for vexact"),
        ("family: harm", GREEDY, ", column: change", r"has no column 'change_mean'"),
        ("family: harm", GREEDY, ", arms: [first]", r"has no column 'first'"),
        ("family: harm", GREEDY, ", beside: ' of {cause}'", r"comparisons\.csv: skill: 'cause', which"),
        ("arm: bad", GREEDY, "", r"comparisons\.csv: skill: could not convert string to float: 'much', which"),
    ],
)
def test_what_is_not_there_is_named(tmp_path: Path, where: str, claim: str, more: str, message: str) -> None:
    rows = [row("low", -0.2, 0.01), row("bad", -0.2, 0.01, family="", difference_mean="much")]
    with pytest.raises(StudyError, match=message):
        read_answers([published(tmp_path, "comparisons", rows, where, claim, more)])


def test_a_claim_without_a_direction_needs_an_outcome() -> None:
    difference = Difference(-0.2, -0.3, -0.1, 0.01, 10)
    with pytest.raises(ValueError, match=r"^open\.own_set has no direction"):
        decide_published(CATALOGUE["open.own_set"], ["a", "b"], difference, 0.01, "a minus b")
    assert decide_published(CATALOGUE["open.own_set"], ["a", "b"], difference, 0.01, "a", ALIKE).verdict == ALIKE


def test_our_own_planned_differences_are_published_and_speak_once() -> None:
    for planned in read_made_for([ROOT]).differences:
        assert read_published(ROOT, planned.table).get(planned.study), planned
    lines = [
        a
        for a in read_answers([ROOT])[1]
        if a.line and a.line.id in {p.claim for p in read_made_for([ROOT]).differences}
    ]
    seen = [(a.statement.id, a.line.id, a.study.name, a.words) for a in lines if a.line and a.study]
    assert len(seen) == len(set(seen)) > 50
    with (ROOT / "tables/comparisons.csv").open(newline="", encoding="utf-8") as file:
        own = [r for r in csv.DictReader(file) if r["study"] == "skill" and r["family"].endswith("greedy, minus naive")]
    dvp = [r for r in own if fnmatchcase(r["arm"], "*_dvp")]
    assert len(dvp) == sum(study == "skill" and claim == "dvp.score.greedy" for _, claim, study, _ in seen) == 3
