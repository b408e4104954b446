"""docs/metrics.md is the catalogue's."""

import difflib
import re
from pathlib import Path

from tailrl.report.metrics import ALIASES, metrics_page
from tailrl.tracking.metrics import METRICS, VERIFICATION

DOCS = Path(__file__).parents[3] / "docs"


def test_the_page_is_made_from_the_catalogue() -> None:
    found = (DOCS / "metrics.md").read_text(encoding="utf-8")
    diff = "\n".join(difflib.unified_diff(found.splitlines(), metrics_page().splitlines(), lineterm=""))
    assert not diff, f"run `tailrl metrics > docs/metrics.md`\n{diff}"


def test_every_metric_has_a_line_and_every_link_a_file() -> None:
    page = metrics_page().split("## Names in other frameworks")[0]
    assert re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) == [*METRICS, *VERIFICATION]
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) == len(METRICS) + len(VERIFICATION)
    assert all((DOCS / link).is_file() for link in links)


def test_every_alias_has_a_line() -> None:
    page = metrics_page().split("## Names in other frameworks")[1]
    lines = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    expected = [(framework, name, alias["ours"]) for framework, of in ALIASES.items() for name, alias in of.items()]
    assert lines == expected
