"""What is published of a study, and that the settings of a published study have not changed since."""

from pathlib import Path

import pytest
from pages_fixture import DOCS

import publish
from tailrl.artifacts.evaluation import Samples, write_samples
from tailrl.artifacts.published import read_published, write_table
from tailrl.artifacts.tables import write_csv
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems

DIGESTS = publish.digests(DOCS / "results")


@pytest.mark.parametrize("study", DIGESTS)
def test_a_study_that_ran_says_what_it_said(study: str) -> None:
    assert publish.digest(study) == DIGESTS[study]


def test_every_study_with_a_summary_has_a_digest() -> None:
    root = DOCS / "results"
    paths = (*root.glob("*/summary.md"), *root.glob("*/*/summary.md"))
    published = {path.parent.relative_to(root).as_posix() for path in paths}
    others = {name for name in published if name.startswith("diagnose_exam")}
    assert len(published) > 50 and published - others <= DIGESTS.keys()


def test_a_study_is_published_with_the_page_over_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "results/causes/2"
    names = ("summary.md", "summary.html", "tables/other.csv", "figures/evaluation.svg", "across.csv")
    for name in (*names, "ablations/rate.md", "ablations/rate.html", "distributions/a.html"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("", encoding="utf-8")
    for table in ("policies", "first_k3"):
        rows = read_published(DOCS / "results", table)["causes/2"]
        write_csv(folder / f"tables/{table}.csv", [{key: row[key] for key in row if key != "page"} for row in rows])
    write_csv(folder / "ablations/rate.csv", [{"base": "dvp", "arm": "dvp+rate=1"}])
    write_csv(folder / "ablations/rate_claims.csv", [{"id": "ablation.rate"}])
    write_csv(folder / "distributions/claims.csv", [{"id": "nested"}])
    out = tmp_path / "published"
    write_table(out, "policies", {"causes/1": [], "moe": [{"page": "summary", "arm": "naive", "seed": "007"}]})
    assert publish.publish("causes/2", tmp_path / "results", out) == [out / "causes/2", out / "causes/pooled"]
    pages = {path.relative_to(out).as_posix() for path in out.rglob("*.*") if path.parent.name != "tables"}
    assert pages == {"causes/2/summary.md", "causes/2/rate.md", "causes/pooled/pooled.md"}
    page = (out / "causes/pooled/pooled.md").read_text(encoding="utf-8")
    assert "From part 2. Not finished: 1" in page and "pooled.svg" not in page
    policies = read_published(out, "policies")
    assert list(policies) == ["causes/2", "moe"] and policies["moe"][0]["seed"] == "007"
    assert policies["causes/2"] == read_published(DOCS / "results", "policies")["causes/2"]
    claims = read_published(out, "claims")["causes/2"]
    assert [(row["page"], row["id"]) for row in claims] == [
        ("distributions/distributions", "nested"),
        ("rate", "ablation.rate"),
    ]
    assert read_published(out, "ablations") == {"causes/2": [{"page": "rate", "base": "dvp", "arm": "dvp+rate=1"}]}
    assert read_published(out, "measures")["causes"]
    write_csv(folder / "tables/policies.csv", [row | {"avg_mean": "0.25"} for row in policies["causes/2"]])
    publish.publish("causes/2", tmp_path / "results", out)
    assert {row["avg_mean"] for row in read_published(out, "policies")["causes/2"]} == {"0.25"}
    assert read_published(out, "policies")["moe"] == policies["moe"]


def test_a_study_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"results/moe: no summary\.md; `make moe` runs the study"):
        publish.publish("moe", tmp_path / "results", tmp_path)


def test_the_settings_of_a_published_study_do_not_change(tmp_path: Path) -> None:
    (tmp_path / publish.DIGESTS).write_text("study,digest\nmoe,0123456789abcdef\n", encoding="utf-8")
    with pytest.raises(StudyError, match="moe was published with other settings"):
        publish.publish("moe", tmp_path / "results", tmp_path)


def test_different_right_answers_are_counted_where_a_problem_has_several(tmp_path: Path) -> None:
    """Two seeds of two problems; by hand 2 and 0 different ones of 3 and 0 right, and 1 and 1 of 1 and 2."""
    problems = [Problem(letters, f"{letters}\n", letters, compared="initials") for letters in ("k b", "o b")]
    write_problems(problems, tmp_path / "data/evaluation.jsonl")
    king, kite, oak, wrong = (f"\\boxed{{{line}}}" for line in ("king bread", "kite bush", "oak bird", "bread king"))
    spaced = king.replace(" ", "  ")
    samples = [
        Samples(seed=1, id="k b", answer="k b", responses=[king, kite, spaced]),
        Samples(seed=1, id="o b", answer="o b", responses=[wrong, king, ""]),
        Samples(seed=2, id="k b", answer="k b", responses=[kite, wrong, wrong]),
        Samples(seed=2, id="o b", answer="o b", responses=[oak, oak, wrong]),
        Samples(seed=2, step=40, id="o b", answer="o b", responses=[oak, oak, oak]),
    ]
    write_samples(tmp_path / "eval/naive.samples.jsonl", samples)
    (row,) = publish.distinct_answers(tmp_path)
    assert (row["page"], row["arm"], row["right"], row["distinct_mean"]) == ("summary", "naive", "1.5", "1")
    write_problems([Problem("k b", "k b\n", "king bread", compared="text")], tmp_path / "data/evaluation.jsonl")
    assert publish.distinct_answers(tmp_path) == []
