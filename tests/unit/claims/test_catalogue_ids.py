"""Claims, statements and questions are known by their ids; their text decides nothing."""

import re
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from claims_fixture import DVP, EXACT, MATCHED, NAIVE, NOISE, around, line_of, made, results_of

from tailrl.artifacts.claims import write_verdicts
from tailrl.artifacts.published import read_published
from tailrl.claims import catalogue
from tailrl.claims.catalogue import CATALOGUE, STATEMENTS, TEXTS, TRAINED_CLAIMS, words_of
from tailrl.claims.decide import Line, Scope, decide
from tailrl.claims.finding import nothing
from tailrl.reports.distributions import endpoints as distributions
from tailrl.reports.gradients import endpoints as gradients
from tailrl.reports.overview.all_studies import claims_page
from tailrl.reports.overview.evidence import StudyResults, read_answers, read_made_for, read_shown
from tailrl.reports.overview.verdicts import judge

DOCS = Path(__file__).parents[3] / "docs"
PUBLISHED = [row for rows in read_published(DOCS / "results", "claims").values() for row in rows]
FACTS = [
    getattr(module, name)
    for module, names in (
        (gradients, ("BIASED", "UNBIASED", "CONSTRAINED", "TRADED")),
        (distributions, ("BOUND", "SIGN", "MODE", "SECOND", "NESTED", "EQUAL")),
    )
    for name in names
]
PLANNED = {planned.claim for planned in read_made_for([DOCS / "results"]).differences}
OWN = [*(claim.id for claim in TRAINED_CLAIMS), *FACTS, *PLANNED]
ARCHIVED = ("across.", "warning.")
"""Claims of published lines alone: nothing judges them any more."""


def test_every_id_is_unique() -> None:
    every = [*OWN, *(statement.id for statement in STATEMENTS)]
    assert len(every) == len(set(every))
    for own in (*every, *CATALOGUE):
        assert re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)+", own.replace("{field}", "field")), own
    assert {own.partition(".")[0] for own in OWN} == {"dvp", "vexact", "open", "price"}
    assert {statement.id.partition(".")[0] for statement in STATEMENTS} == {"statement", "question"}


def test_every_claim_has_words_of_its_own_and_no_words_are_left_over() -> None:
    assert sorted(OWN) == sorted(claim for claim in CATALOGUE if not claim.startswith("ablation."))
    assert len({claim.text for claim in CATALOGUE.values()}) == len(CATALOGUE)


def test_the_words_of_an_ablation_are_made_from_its_field() -> None:
    assert words_of("ablation.vocabulary.rho.score") == "ablation of vocabulary.rho"
    assert words_of("ablation.estimator.as_good") == "ablation of estimator, as good within a margin"
    assert words_of("ablation.correction.*") == "ablation of correction"
    assert words_of("ablation.score") == words_of("ablation.x.unasked") == words_of("dvp.no_such_claim") == ""
    with pytest.raises(ValueError, match=r"^no claim has the id 'dvp\.no_such_claim'$"):
        unknown = CATALOGUE["dvp.score"].model_copy(update={"id": "dvp.no_such_claim"})
        decide([Line(unknown, Scope("", "", ""), nothing(()))])


def test_every_published_line_is_on_a_known_claim() -> None:
    assert len(PUBLISHED) > 1000
    assert all(words_of(row["id"]) or row["id"].startswith(ARCHIVED) for row in PUBLISHED)
    assert not any("*" in row["id"] for row in PUBLISHED)
    of_studies = {"summary", "distributions", "distributions/distributions"}
    of_studies |= {"gradient_quality", "gradient_catalogue", "early_warning"}
    for row in PUBLISHED:
        assert (row["page"] in of_studies) != row["id"].startswith(("ablation.", "across.")), row


def test_every_statement_is_decided_by_known_claims() -> None:
    fields = {claim.rpartition(".")[0] for claim in (row["id"] for row in PUBLISHED) if claim.startswith("ablation.")}
    ablated = [claim for claim in CATALOGUE if claim.startswith("ablation.")]
    known = {*CATALOGUE, *(row["id"] for row in PUBLISHED if row["id"].startswith(ARCHIVED))}
    known |= {*(claim.replace("ablation.{field}", field) for field in fields for claim in ablated)}
    for statement in STATEMENTS:
        for by in statement.by:
            assert any(fnmatchcase(claim, by) for claim in known), by
            assert words_of(by) or len(statement.by) == 1, f"{by} stands beside others, without words"


def test_a_line_on_a_claim_that_is_not_known_keeps_its_words(tmp_path: Path) -> None:
    lines = [line_of(own, claim="as it was said") for own in ("open.of_tomorrow", "dvp.score")]
    write_verdicts(tmp_path / "x" / "claims.csv", lines)
    (study,) = read_shown([tmp_path])
    assert [line.claim for line in study.claims] == ["as it was said", TEXTS["dvp.score"]]


@pytest.mark.slow
def test_other_words_change_no_verdict_and_no_matching(monkeypatch: pytest.MonkeyPatch) -> None:
    """Published tables have the old words, and pages show the new ones."""
    low, high = around(0.3, 0.05), around(0.5, 0.05)
    arms = {"a": made(NAIVE, score=low), "b": made(DVP, score=high), "c": made(EXACT, score=high)}
    results = results_of(**arms, d=made(NOISE, score=low), e=made(MATCHED, score=high))

    def published() -> list[StudyResults]:
        return read_shown([DOCS / "results"])

    def matched() -> list[tuple[str, ...]]:
        _, found = read_answers([DOCS / "results"])
        named = [(a.study.name if a.study else "", a.line.id if a.line else "") for a in found]
        return [(a.statement.id, a.claim, a.verdict, a.words, *name) for a, name in zip(found, named, strict=True)]

    decided, lines = judge(results), matched()
    page = claims_page(read_answers([DOCS / "results"])[1], DOCS)
    new = {claim: f"said otherwise, {place}" for place, claim in enumerate(TEXTS) if not claim.startswith("ablation.")}
    monkeypatch.setattr(catalogue, "TEXTS", {**TEXTS, **new})
    assert matched() == lines
    again = judge(results)
    assert [verdict.claim for verdict in again] == [new[verdict.id] for verdict in decided]
    other = claims_page(read_answers([DOCS / "results"])[1], DOCS)
    shown = {line.claim for study in published() for line in study.claims if not line.id.startswith(ARCHIVED)}
    assert f"*{TEXTS['dvp.prop4_2.bound'].replace('|', chr(92) + '|')}*" in page
    assert f"*{new['dvp.prop4_2.bound']}*" in other and f"*{new['warning.*.collapse*']}*" in other
    assert shown - set(new.values()) == {claim for claim in shown if claim.startswith("ablation of ")}
    monkeypatch.undo()
    # Written anew with today's words, nothing else differs; NaN is not equal to itself, its text is.
    assert [repr(replace(verdict, claim=words_of(verdict.id))) for verdict in again] == [
        repr(verdict) for verdict in decided
    ]
