"""The page over all studies: what speaks to a statement, what is said where nothing does, links that lead somewhere."""

import csv
import math
import re
import shutil
from collections import Counter
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from claims_fixture import line_of

from tailrl.artifacts.claims import Verdict, write_verdicts
from tailrl.artifacts.published import read_published
from tailrl.claims.catalogue import STATEMENTS, TEXTS, TRAINED_CLAIMS
from tailrl.claims.finding import CHANGES, CONTRADICTED, DEFINITION, OPEN, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.config.results import whole_and_part
from tailrl.reports.distributions.endpoints import BOUND, EQUAL, MODE, NESTED, SECOND, SIGN
from tailrl.reports.gradients.endpoints import BIASED, CONSTRAINED, TRADED, UNBIASED
from tailrl.reports.overview.all_studies import claims_page, write_all_studies
from tailrl.reports.overview.evidence import SEARCH, read_answers, read_made_for, read_shown
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[4]
RESULTS = ROOT / "docs/results"
SPOKEN = sorted(name for name in read_published(RESULTS, "policies") if "/" not in name and not name.startswith(SEARCH))
DVP_ABOVE, EXPLODES, SOONER = "dvp.score", "dvp.figure1.explosion", "dvp.figure1.collapse"
HIGHER, MIS_ABOVE = "open.dvp_or_mis.score", "dvp.mis.score"


def write_claims(path: Path, *lines: tuple[str, str, str], **cells: Any) -> None:
    """Lines of a claim's id, verdict and arms."""
    write_verdicts(
        path,
        [
            line_of(claim, verdict=verdict, arms=arms, seen=f"what {arms or 'nobody'} showed", **cells)
            for claim, verdict, arms in lines
        ],
    )


@pytest.fixture
def roots(tmp_path: Path) -> list[Path]:
    """Results at hand and published ones, both with a study called stress."""
    here, published = tmp_path / "results", tmp_path / "docs" / "results"
    write_claims(here / "stress" / "tables" / "claims.csv", (DVP_ABOVE, REPRODUCED, "dvp, naive"))
    write_claims(here / "default" / "gradients" / "claims.csv", (UNBIASED, REPRODUCED, "naive"))
    write_claims(here / "stress" / "distributions" / "claims.csv", (NESTED, CONTRADICTED, "vllm"))
    write_claims(here / "search_dose" / "tables" / "claims.csv", (DVP_ABOVE, CONTRADICTED, "of a seed or two"))
    write_claims(here / "stress" / "ablations" / "rho_claims.csv", ("ablation.vocabulary.rho.score", CHANGES, "dvp"))
    (here / "stress" / "summary.html").write_text("")
    write_claims(published / "stress" / "claims.csv", (DVP_ABOVE, UNDECIDED, "old"))
    lines = [(DVP_ABOVE, UNDECIDED, "dvp, naive"), (EXPLODES, UNTESTABLE, "naive, dvp"), (EXPLODES, UNTESTABLE, "")]
    write_claims(published / "default" / "claims.csv", *lines)
    shutil.copy(ROOT / "docs/results/made_for.yaml", published)
    return [here, published]


def test_the_nearest_results_of_a_study_speak_and_parts_of_the_default_are_studies(roots: list[Path]) -> None:
    found = {study.name: study for study in read_shown(roots)}
    assert set(found) == {"stress", "gradient_quality", "default"}
    assert [line.verdict for line in found["stress"].claims] == [REPRODUCED, CHANGES, CONTRADICTED]
    assert {line.page for line in found["default"].claims} == {None}
    assert [found[name].command for name in ("stress", "default")] == ["make stress", "make reproduce"]


def test_every_statement_has_a_verdict(roots: list[Path]) -> None:
    found = read_answers(roots)[1]
    assert {answer.statement.text for answer in found} == {statement.text for statement in STATEMENTS}
    said = {text: [a.verdict for a in found if a.statement.text.startswith(text)] for text in (
        "DVP ends above naive", "Figure 1", "Constrained policy", "By 26.55 %", "Veto", "4. Does the", "RLOO",
    )}  # fmt: skip
    assert said == {
        "DVP ends above naive": [REPRODUCED, UNDECIDED],
        "Figure 1": [UNTESTABLE],  # and not the line of a study without such arms
        "Constrained policy": [DEFINITION],
        "By 26.55 %": [UNTESTABLE],
        "Veto": [OPEN],
        "4. Does the": [CHANGES],
        "RLOO": [REPRODUCED],
    }


def test_a_line_says_which_claim_it_decides_and_where_the_rest_stands(roots: list[Path]) -> None:
    here = roots[0]
    write_claims(
        here / "remedies" / "claims.csv", (HIGHER, REPRODUCED, "dvp, mis"), (MIS_ABOVE, UNDECIDED, "mis, naive")
    )
    (here / "stress" / "distributions" / "distributions.md").write_text("")
    page = claims_page(read_answers(roots)[1], here)
    assert '\n| <a id="statement.dvp.score"></a>DVP ends above naive | ' in page
    rows = [line.removesuffix(" |").split(" | ") for line in page.splitlines() if line.startswith("| ")]
    said = {re.sub(r'^\| |<a id="[a-z0-9_.]*"></a>', "", row[0]): row[1:] for row in rows}
    seen = "what dvp, naive showed"
    both = f"**{REPRODUCED}**, **{UNDECIDED}**"
    page_of = "[stress](stress/summary.html)"
    assert said["DVP ends above naive"] == [f"**{REPRODUCED}**", both, seen, page_of, "`make stress`"]
    against = said[f"Missing there: DVP against MIS *{TEXTS[HIGHER]}*"]
    assert against == ["", f"**{REPRODUCED}**", "what dvp, mis showed", "remedies", "`make remedies`"]
    assert said[f"*{TEXTS[MIS_ABOVE]}*"][:2] == ["", f"**{UNDECIDED}**"]
    (nested,) = [row for text, row in said.items() if text.startswith("Safe set")]
    assert nested[3] == "[stress](stress/distributions/distributions.md)"
    (definition,) = [row for text, row in said.items() if text.startswith("Constrained policy")]
    assert definition[3:] == ["", "`make test`"]


def test_a_statements_own_study_speaks_first() -> None:
    """Among the published ones."""
    found = read_answers([ROOT / "docs" / "results"])[1]
    led = 0
    for statement, claim in dict.fromkeys((answer.statement, answer.claim) for answer in found):
        lines = [a for a in found if (a.statement, a.claim) == (statement, claim)]
        own = [a.study.command == a.command for a in lines if a.study]
        assert own == sorted(own, reverse=True), statement.text
        led += any(own) and not all(own)
    assert led > 5


def test_every_claim_speaks_to_a_statement_and_every_statement_can_be_spoken_to() -> None:
    """No claim is lost on the page, and no name in the catalogue is misspelt."""
    known = {claim.id for claim in TRAINED_CLAIMS} | {BIASED, UNBIASED, CONSTRAINED, TRADED}
    known |= {BOUND, SIGN, MODE, SECOND, NESTED, EQUAL}
    known |= {planned.claim for planned in read_made_for([RESULTS]).differences}
    named = {name for statement in STATEMENTS for name in statement.by}
    assert known <= named
    assert all(name.startswith(("ablation.", "across.", "warning.")) for name in named - known)
    for statement in STATEMENTS:
        assert statement.by or statement.held_by or statement.beyond, statement.text
        assert not statement.held_by or (ROOT / statement.held_by).is_file(), statement.held_by


def test_every_statement_that_runs_can_decide_has_one_study_that_was_made_for_it() -> None:
    known = read_made_for([ROOT / "docs" / "results"])
    named = Counter(statement for own in known.made_for.values() for statement in own)
    assert set(named.values()) == {1}
    assert {*named, *known.alone} <= {statement.id for statement in STATEMENTS}
    archived = {s.id for s in STATEMENTS if any(name.startswith("warning.") for name in s.by)}
    assert {statement.id for statement in STATEMENTS if statement.by} - archived <= set(named)
    files = {path.stem for path in (ROOT / "studies").glob("*.yaml")}
    files |= {"default", "distributions", "figure1", "optimum"}
    assert {*known.made_for} | {whole_and_part(study)[0] for study in known.alone.values()} <= files


def test_a_wrong_word_about_studies_is_named(tmp_path: Path) -> None:
    (tmp_path / "made_for.yaml").write_text("made: {}\n")
    with pytest.raises(StudyError, match=r"made_for.yaml: .*made"):
        read_answers([tmp_path])


def test_the_page_and_its_lines(roots: list[Path], tmp_path: Path) -> None:
    out = tmp_path / "results" / "paper"
    write_all_studies(roots, out)
    with (out / "statements.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(read_answers(roots)[1])
    text = (out / "claims.md").read_text(encoding="utf-8")
    assert text == claims_page(read_answers(roots)[1], out)
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    assert "../stress/summary.html" in targets and all((out / target).is_file() for target in targets)


def test_what_results_say_is_text(tmp_path: Path) -> None:
    """Cells of a table, the name of a folder: none brings HTML or loads an image."""
    hostile = '<script>alert("1")</script> ![x](http://a/b.png)'
    folder = tmp_path / "results" / 'x" onload="alert(1)'
    write_claims(folder / "claims.csv", (DVP_ABOVE, hostile, hostile))
    write_all_studies([tmp_path / "results"], tmp_path)
    claims = (tmp_path / "claims.md").read_text(encoding="utf-8")
    assert "<script" not in claims and "![" not in claims
    assert '&lt;script>alert("1")&lt;/script> !\\[x](http://a/b.png)' in claims


def test_lines_that_decide_nothing_are_counted(tmp_path: Path) -> None:
    """Where another line on the same claim decides: the reader sees how often there was nothing to see."""
    for name, verdicts in (("a", (REPRODUCED, UNTESTABLE)), ("b", (UNTESTABLE,)), ("c", (UNTESTABLE, UNTESTABLE))):
        write_claims(tmp_path / name / "claims.csv", *((DVP_ABOVE, v, f"arm{i}") for i, v in enumerate(verdicts)))
    found = [a for a in read_answers([tmp_path])[1] if a.statement.id == "statement.dvp.score"]
    assert [a.verdict for a in found] == [REPRODUCED, UNTESTABLE]
    assert found[1].words == "4 lines more, of a, b, c: nothing to test"
    assert found[1].made_by == "", "no one command makes them"
    write_claims(tmp_path / "d" / "claims.csv", ("warning.k3.collapse", REPRODUCED, "stale"))
    write_claims(tmp_path / "e" / "claims.csv", ("warning.gradient_norm.collapse", UNTESTABLE, "stale"))
    metrics = [a for a in read_answers([tmp_path])[1] if a.statement.id == "question.7"]
    assert [(a.study.name, a.verdict) for a in metrics if a.study] == [("d", REPRODUCED), ("e", UNTESTABLE)]


def test_a_line_of_the_same_runs_says_so(tmp_path: Path) -> None:
    """Two studies may share runs to the bit; lines that merely lack an interval do not."""
    for name, low in (("stress", 0.1), ("remedies", 0.1), ("other", 0.2), ("x", math.nan), ("y", math.nan)):
        write_claims(tmp_path / name / "claims.csv", (DVP_ABOVE, REPRODUCED, "dvp"), low=low)
    shutil.copy(ROOT / "docs/results/made_for.yaml", tmp_path)
    found = {
        a.study.name: a.words
        for a in read_answers([tmp_path])[1]
        if a.statement.id == "statement.dvp.score" and a.study
    }
    again = {name for name, words in found.items() if words.endswith("(the same runs as in stress)")}
    assert again == {"remedies"} and len(found) == 5


def test_equal_shares_of_runs_are_not_the_same_runs(tmp_path: Path) -> None:
    """Five of five against none of five has one interval, whichever runs they are."""
    for name in ("stress", "other"):
        write_claims(tmp_path / name / "claims.csv", (SOONER, REPRODUCED, "a, b"), low=0.1, unit="share of runs")
    found = [a.words for a in read_answers([tmp_path])[1] if a.line and a.line.id == SOONER]
    assert len(found) == 2 and not any("same runs" in words for words in found)


def test_an_archive_has_no_command(tmp_path: Path) -> None:
    write_claims(tmp_path / "early_warning" / "claims.csv", ("warning.k3.collapse", REPRODUCED, "stale, collapse"))
    (study,) = read_shown([tmp_path])
    assert study.command == "make early_warning"
    (tmp_path / "made_for.yaml").write_text("archives: [early_warning]\n")
    (study,) = read_shown([tmp_path])
    assert study.command == ""


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "claims.csv").write_text("id,claim,verdict\na,b,c\n")
    with pytest.raises(StudyError, match=r"claims.csv: a line has no source"):
        read_shown([tmp_path])
    write_claims(tmp_path / "x" / "claims.csv", (DVP_ABOVE, REPRODUCED, "dvp"))
    with (tmp_path / "x" / "claims.csv").open("a") as file:
        file.write("," * len(fields(Verdict)) + "\n")
    with pytest.raises(StudyError, match=r"claims.csv: a line has more cells than the header"):
        read_shown([tmp_path])
    assert read_shown([tmp_path / "nothing"]) == []


def test_the_committed_table_is_that_of_the_published_results() -> None:
    """`tailrl claims docs/results > docs/claims.md` makes it anew."""
    docs = ROOT / "docs"
    assert (docs / "claims.md").read_text(encoding="utf-8") == claims_page(read_answers([docs / "results"])[1], docs)


@pytest.mark.parametrize("study", SPOKEN)
def test_a_published_study_speaks_of_every_claim(study: str) -> None:
    """One that was published before a claim was made says nothing of it, although its runs may."""
    rows = read_published(RESULTS, "claims")[study]
    said = {row["id"]: row["endpoint"] for row in rows if row["page"] == "summary"}
    assert said == {claim.id: claim.endpoint for claim in TRAINED_CLAIMS}
