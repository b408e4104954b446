"""The page of metrics, docs/reference/metrics.md of the site."""

import os
import re
from pathlib import Path

from tailrl.reports.metrics.page import ALIASES, metrics_page
from tailrl.tracking.metrics import CURRICULUM, METRICS, ROUTING, VERIFICATION

REFERENCE = Path(__file__).parents[4] / "docs" / "reference"


def test_every_metric_has_a_line_and_every_link_a_file() -> None:
    page = metrics_page().split("## Names in other frameworks")[0]
    assert re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE) == [*METRICS, *VERIFICATION, *ROUTING, *CURRICULUM]
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert len(links) == len(METRICS) + len(VERIFICATION) + len(ROUTING) + len(CURRICULUM)
    assert all(Path(os.path.normpath(REFERENCE / link)).is_file() for link in links)


def test_every_alias_has_a_line() -> None:
    page = metrics_page().split("## Names in other frameworks")[1]
    lines = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \| `([^`]+)` \|", page, re.MULTILINE)
    expected = [(framework, name, alias["ours"]) for framework, of in ALIASES.items() for name, alias in of.items()]
    assert lines == expected
