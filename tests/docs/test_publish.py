"""What is published of a study, and that the settings of a published study have not changed since."""

from pathlib import Path

import pytest
from pages_fixture import DOCS

import publish
from tailrl.runtime.errors import StudyError

DIGESTS = publish.digests(DOCS / "results")


@pytest.mark.parametrize("study", DIGESTS)
def test_a_study_that_ran_says_what_it_said(study: str) -> None:
    assert publish.digest(study) == DIGESTS[study]


def test_every_study_with_a_summary_has_a_digest() -> None:
    published = {path.parent.name for path in (DOCS / "results").glob("*/summary.md")}
    assert published - {"diagnose_exam"} <= DIGESTS.keys()


def test_a_study_is_published_with_the_page_over_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "results/causes_2"
    names = ("summary.md", "summary.html", "tables/policies.csv", "tables/other.csv", "figures/evaluation.svg")
    others = (
        "ablations/rate.md",
        "ablations/rate.html",
        "across.csv",
        "distributions/claims.csv",
        "distributions/a.html",
    )
    for name in (*names, *others):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("", encoding="utf-8")
    for table in ("policies", "first_k3"):
        text = (DOCS / f"results/causes_2/{table}.csv").read_text(encoding="utf-8")
        (folder / f"tables/{table}.csv").write_text(text, encoding="utf-8")
    out = tmp_path / "published"
    assert publish.publish("causes_2", tmp_path / "results", out) == [out / "causes_2", out / "causes_harm"]
    found = {path.relative_to(out / "causes_2").as_posix() for path in (out / "causes_2").rglob("*.*")}
    copied = {"summary.md", "policies.csv", "first_k3.csv", "evaluation.svg", "rate.md", "across.csv"}
    assert found == copied | {"distributions/claims.csv"}
    assert "From causes_2. Not finished: causes_1" in (out / "causes_harm/pooled.md").read_text(encoding="utf-8")


def test_a_study_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"results/moe: no summary\.md; `make moe` runs the study"):
        publish.publish("moe", tmp_path / "results", tmp_path)


def test_the_settings_of_a_published_study_do_not_change(tmp_path: Path) -> None:
    (tmp_path / publish.DIGESTS).write_text("study,digest\nmoe,0123456789abcdef\n", encoding="utf-8")
    with pytest.raises(StudyError, match="moe was published with other settings"):
        publish.publish("moe", tmp_path / "results", tmp_path)
