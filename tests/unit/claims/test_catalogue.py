"""The catalogue of claims: a new entry is judged, one that fits nothing is refused, and published tables follow it.

What each endpoint measures is held to independent numbers in test_study.py and test_endpoints.py.
"""

import ast
import itertools
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from claims_fixture import DVP, NAIVE, around, made, results_of
from parsed import nodes_of
from pydantic import ValidationError

from tailrl.artifacts.published import read_published
from tailrl.claims import finding as finding_module
from tailrl.claims.catalogue import CATALOGUE, SEVERAL, TEXTS, TRAINED_CLAIMS, Claim, claims_of
from tailrl.claims.decide import TESTED, Line, Scope, decide
from tailrl.claims.finding import (
    ASIDE,
    CHANGES,
    CONTRADICTED,
    MEASURED,
    NOT_SEEN,
    REPRODUCED,
    UNDECIDED,
    UNTESTABLE,
    Finding,
    fact,
    nothing,
)
from tailrl.config.arm_kinds import KINDS
from tailrl.reports.mismatch.run_numbers import LOGARITHMS, NUMBERS
from tailrl.reports.overview.verdicts import MEASURES, judge

ROOT = Path(__file__).parents[3]
PUBLISHED = read_published(ROOT / "docs/results", "claims").values()
NAN = math.nan

ENTRY = """
open.shorter.score:
  text: Naive ends above DVP
  source: open question
  endpoint: "Held-out avg@k of naive minus that of DVP, over seeds (Welch): above 0."
  needs: naive arm beside a DVP arm under the same mismatch
  measure: score
  arms: [naive, mismatched]
  against: [dvp]
  unit: share of samples
"""


# --- an entry ----------------------------------------------------------------------------------------


def test_a_claim_is_added_by_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    (claim,) = claims_of(yaml.safe_load(ENTRY))
    monkeypatch.setitem(TEXTS, claim.id, claim.text)
    low, high = around(0.3, 0.05), around(0.5, 0.05)
    lines = [
        judge(results_of(a=made(NAIVE, score=naive), b=made(DVP, score=dvp)), [claim])
        for naive, dvp in ((high, low), (low, high))
    ]
    assert [(line.claim, line.verdict, line.arms) for (line,) in lines] == [
        ("Naive ends above DVP", REPRODUCED, "a, b"),
        ("Naive ends above DVP", CONTRADICTED, "a, b"),
    ]
    ((line,),) = lines[:1]
    assert (line.id, line.unit, line.endpoint) == (claim.id, claim.unit, claim.endpoint)
    (alone,) = judge(results_of(a=made(NAIVE)), [claim])
    assert alone.seen == "the study has no naive arm beside a DVP arm under the same mismatch"


@pytest.mark.parametrize(
    "change", [{"rule": "guess"}, {"direction": "sideways"}, {"colour": "red"}, {"unit": None}, {"limit": "high"}]
)
def test_an_invalid_entry_is_refused(change: dict[str, Any]) -> None:
    entries = yaml.safe_load(ENTRY)
    entries["open.shorter.score"] |= change
    with pytest.raises(ValidationError):
        list(claims_of(entries))


def test_entries_name_what_there_is_and_everything_there_is_has_an_entry() -> None:
    for claim in TRAINED_CLAIMS:
        assert claim.needs and claim.arms and {*claim.arms, *claim.against} <= KINDS.keys(), claim.id
        assert bool(claim.number) == (claim.measure in ("level", "ratio")) == bool(claim.seen), claim.id
        assert claim.measure != "ratio" or claim.number in LOGARITHMS, claim.id
        needs_limit = ("level", "alike", "explosion", "falling_while_flat")
        assert math.isnan(claim.limit) == (claim.measure not in needs_limit), claim.id
    assert {claim.measure for claim in TRAINED_CLAIMS} == MEASURES.keys()
    assert {name for claim in TRAINED_CLAIMS for name in (claim.number, claim.beside) if name} == NUMBERS.keys()
    assert {name for claim in TRAINED_CLAIMS for name in (*claim.arms, *claim.against)} == KINDS.keys()
    for claim in CATALOGUE.values():
        rules = {own.rule for own in CATALOGUE.values() if own.family == claim.family}
        assert not claim.family or len(rules) == 1, "tests of one family are of one kind"
    assert not SEVERAL.keys() & CATALOGUE.keys()


# --- the one function that decides -------------------------------------------------------------------


def line(finding: Finding, **fields: Any) -> Line:
    claim = CATALOGUE["dvp.score"].model_copy(update={"family": "", **fields})
    return Line(claim, Scope("p", "t", "d"), finding)


def with_p(p_for: float, p_against: float = NAN, **fields: Any) -> Finding:
    return Finding(("a", "b"), 3, 1.0, NAN, NAN, "seen", p_for, p_against, **fields)


def between(low: float, high: float) -> Finding:
    return Finding(("a",), 3, (low + high) / 2, low, high, "seen", 0.001, 0.001)


@pytest.mark.parametrize(
    ("rule", "finding", "verdict"),
    [
        ("directed", with_p(0.025, 0.975), REPRODUCED),
        ("directed", with_p(0.0251, 0.9749), UNDECIDED),
        ("directed", with_p(0.975, 0.025), CONTRADICTED),
        ("directed", with_p(NAN), UNDECIDED),
        ("directed", with_p(0.001, holds=False), UNDECIDED),
        ("change", with_p(0.025), CHANGES),
        ("change", with_p(0.026), UNDECIDED),
        ("refutes", with_p(0.025), CONTRADICTED),
        ("refutes", with_p(0.5), UNDECIDED),
        ("told", with_p(0.001, 0.999), MEASURED),
        ("told", nothing(("a",)), UNTESTABLE),
        ("directed", with_p(0.025, 0.975, events=1), REPRODUCED),
        ("directed", with_p(NAN, events=0), NOT_SEEN),
        ("change", with_p(NAN, events=0), NOT_SEEN),
        ("fact", fact(("a",), 3, 1.0, "seen", None), NOT_SEEN),
        ("fact", fact(("a",), 3, NAN, "seen", None), UNTESTABLE),
        ("directed", nothing(("a",)), UNTESTABLE),
        ("fact", replace(fact(("a",), 3, 1.0, "seen", None), premise=False), ASIDE),
        ("fact", with_p(0.9, holds=True), REPRODUCED),
        ("fact", with_p(0.001, holds=False), CONTRADICTED),
        ("fact", with_p(0.001), UNDECIDED),
        ("above", between(2.5, 9.0), REPRODUCED),
        ("above", between(2.0, 9.0), UNDECIDED),
        ("above", between(-1.0, 1.9), CONTRADICTED),
        ("above", between(NAN, NAN), UNDECIDED),
    ],
)
def test_each_rule(rule: str, finding: Finding, verdict: str) -> None:
    (found,) = decide([line(finding, rule=rule, limit=2.0)])
    assert found.verdict == verdict
    assert math.isnan(found.p) == math.isnan(found.p_holm) == (rule not in TESTED or math.isnan(finding.p_for))


def test_families_are_corrected_separately_and_untestable_lines_can_count() -> None:
    lines = [
        line(with_p(0.01, 0.99), family="one"),
        line(with_p(0.01, 0.99)),
        line(with_p(0.02, 0.98), family="one"),
        line(with_p(0.5, events=0), family="one"),
        line(with_p(0.001, 0.999), family="one", rule="told"),
    ]
    first, alone, second, untestable, told = decide(lines)
    assert [(v.p, v.p_holm) for v in (first, alone, second)] == [
        (0.02, pytest.approx(0.06)),
        (0.02, 0.02),
        (0.04, pytest.approx(0.08)),
    ]
    assert [v.verdict for v in (first, alone, second)] == [UNDECIDED, REPRODUCED, UNDECIDED]
    assert all(math.isnan(p) for v in (untestable, told) for p in (v.p, v.p_holm))


def test_outcomes_are_decided_in_one_module() -> None:
    """Only `decide` makes verdicts and gives outcomes; other modules may compare a verdict with one."""
    outcomes = {name for name, value in vars(finding_module).items() if name.isupper() and isinstance(value, str)}
    assert len(outcomes) == 13
    makers, givers = set(), set()
    for file in sorted((ROOT / "workflow" / "tailrl").rglob("*.py")):
        if file.parent.name in ("diagnosis", "curves"):  # they judge logs, not claims
            continue
        nodes = nodes_of(file)
        compared = {id(name) for node in nodes if isinstance(node, ast.Compare) for name in ast.walk(node)}
        compared |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
        imported = {
            name.name
            for node in nodes
            if isinstance(node, ast.ImportFrom) and node.module == finding_module.__name__
            for name in node.names
        }
        for node in nodes:
            made = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Verdict"
            if made or (isinstance(node, ast.keyword) and node.arg in ("seen", "verdict")):
                makers.add(file.name)
            if isinstance(node, ast.Name) and node.id in outcomes & imported and id(node) not in compared:
                givers.add(file.name)
    assert makers == {"decide.py"}
    assert givers == {"decide.py"}


# --- published tables --------------------------------------------------------------------------------


def number(text: str) -> float:
    return float(text) if text else NAN


def outcome_of(row: Mapping[str, str], claim: Claim) -> set[str]:
    """The outcomes that a published line may have, by the rule and the numbers beside it."""
    shown, opposite = TESTED.get(claim.rule, (REPRODUCED, CONTRADICTED))
    if claim.rule == "told":
        return {MEASURED}
    if claim.rule not in TESTED:
        return {shown, opposite, UNDECIDED} if not row["p_holm"] else set()
    if not number(row["p_holm"]) <= 0.05:
        return {UNDECIDED}
    if claim.rule != "directed" or claim.measure not in ("score", "survival", "ratio", "level", ""):
        return {shown, opposite} - {UNDECIDED}
    reference = claim.limit if claim.measure == "level" else float(claim.measure == "ratio")
    above = number(row["effect"]) > reference
    return {shown} if claim.direction == "either" or above == (claim.direction == "above") else {opposite}


def unlike(catalogue: Mapping[str, Claim]) -> set[str]:
    """The claims of which published lines do not follow: by rule, by direction, or by Holm's correction over a family.

    Of an ablation a line shows the largest of several changes, so that its family cannot be seen.
    """
    found = set()
    for lines in (lines for study in PUBLISHED for _, lines in itertools.groupby(study, key=lambda row: row["page"])):
        rows = [(catalogue[row["id"]], row) for row in lines if row["id"] in catalogue]
        decided = [(claim, row) for claim, row in rows if row["verdict"] not in (UNTESTABLE, NOT_SEEN, "premise fails")]
        found |= {claim.id for claim, row in decided if row["verdict"] not in outcome_of(row, claim)}
        for family in {claim.family or claim.id for claim, _ in rows}:
            own = [(claim.id, row) for claim, row in rows if (claim.family or claim.id) == family]
            tests = [(number(row["p"]), number(row["p_holm"])) for _, row in own if row["p"]]
            # Holm takes the smallest p as often as there are tests.
            if tests and min(tests)[1] != pytest.approx(min(1.0, len(tests) * min(tests)[0]), rel=1e-6):
                found |= {claim for claim, _ in own}
    return found


def test_published_lines_follow_the_catalogue() -> None:
    assert unlike(CATALOGUE) == set()


@pytest.mark.parametrize(
    ("claim", "change"),
    [
        ("dvp.score", {"family": "a family of its own"}),
        ("vexact.a.score", {"family": "score"}),
        ("dvp.prop4_3.mode", {"family": ""}),
        ("dvp.score", {"rule": "change"}),
        ("dvp.prop4_3.mode", {"rule": "directed"}),
        ("vexact.b.k3", {"rule": "told"}),
        ("price.remedies", {"rule": "fact"}),
        ("dvp.prop5_5.bound", {"rule": "fact"}),
        ("vexact.zero_mismatch.k3", {"rule": "directed"}),
        ("vexact.a.score", {"direction": "above"}),
        ("dvp.small_kl", {"limit": 1.0}),
    ],
)
def test_a_wrong_rule_family_direction_or_limit_is_seen(claim: str, change: dict[str, Any]) -> None:
    assert claim in unlike({**CATALOGUE, claim: CATALOGUE[claim].model_copy(update=change)})
