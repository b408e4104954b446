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
    root = DOCS / "results"
    paths = (*root.glob("*/summary.md"), *root.glob("*/*/summary.md"))
    published = {path.parent.relative_to(root).as_posix() for path in paths}
    others = {name for name in published if name.startswith("diagnose_exam") or name == "default/before"}
    assert len(published) > 50 and published - others <= DIGESTS.keys()


def test_a_study_is_published_with_the_page_over_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "results/causes/2"
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
        text = (DOCS / f"results/causes/2/{table}.csv").read_text(encoding="utf-8")
        (folder / f"tables/{table}.csv").write_text(text, encoding="utf-8")
    out = tmp_path / "published"
    assert publish.publish("causes/2", tmp_path / "results", out) == [out / "causes/2", out / "causes/pooled"]
    found = {path.relative_to(out / "causes/2").as_posix() for path in (out / "causes/2").rglob("*.*")}
    copied = {"summary.md", "policies.csv", "first_k3.csv", "evaluation.svg", "rate.md"}
    assert found == copied | {"distributions/claims.csv"}
    assert "From part 2. Not finished: 1" in (out / "causes/pooled/pooled.md").read_text(encoding="utf-8")


def test_a_study_without_a_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"results/moe: no summary\.md; `make moe` runs the study"):
        publish.publish("moe", tmp_path / "results", tmp_path)


def test_the_settings_of_a_published_study_do_not_change(tmp_path: Path) -> None:
    (tmp_path / publish.DIGESTS).write_text("study,digest\nmoe,0123456789abcdef\n", encoding="utf-8")
    with pytest.raises(StudyError, match="moe was published with other settings"):
        publish.publish("moe", tmp_path / "results", tmp_path)
