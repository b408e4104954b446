"""Filters of the site's tables, in a real browser: the script on the tables alone, for a whole site takes minutes."""

from pathlib import Path

from browser_fixture import needs_browser, use
from markdown_it import MarkdownIt

from docsite.claims import with_table
from docsite.reference import reference_pages
from tailrl.claims.catalogue import STATEMENTS

ROOT = Path(__file__).parents[2]
ASSETS = ROOT / "docs" / "assets"

pytestmark = needs_browser

USE = """
addEventListener("load", () => {
  const bar = document.querySelector(".table-filters");
  const [words, ...selects] = [...bar.querySelectorAll("input, select")];
  const rows = [...document.querySelectorAll("[data-filters] tbody tr")];
  const left = () => rows.filter(row => !row.hidden).map(row => row.innerText);
  function give(control, value) {
    control.value = value;
    control.dispatchEvent(new Event(control === words ? "input" : "change", { bubbles: true }));
    return [left(), bar.querySelector("[role=status]").textContent];
  }
  const seen = { bars: document.querySelectorAll(".table-filters").length, rows: rows.length, all: give(words, ""),
    named: [words, ...selects].map(one => [one.name, one.labels[0]?.innerText.split(/\\s/)[0]]),
    options: selects.map(one => [...one.options].map(option => option.text)) };
  seen.chosen = USES.map(([name, value]) => give([words, ...selects].find(one => one.name === name), value));
  parent.postMessage(JSON.stringify(seen), "*");
});"""


def page_of(markdown: str) -> str:
    """A page as the site has it, without its theme."""
    body = MarkdownIt("commonmark", {"html": True}).enable("table").render(markdown)
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("site.css", "filters.js"))
    head = f'<meta charset="utf-8"><style>{style}</style>'
    return f"<!doctype html><html><head>{head}</head><body>{body}<script>{script}</script></body></html>"


def used(markdown: str, uses: str, folder: Path) -> dict:
    """What the page shows after each use, (name of a control, its value)."""
    seen, console = use(page_of(markdown), USE.replace("USES", uses), folder)
    assert console == []
    assert seen["bars"] == 1 and len(seen["all"][0]) == seen["rows"], "first all rows are there"
    assert all(name == label for name, label in seen["named"])
    return seen


def test_the_filters_of_the_catalogue(tmp_path: Path) -> None:
    page = reference_pages(ROOT)["reference/corrections.md"]
    uses = (
        '[["kind", "weight"], ["framework", "openrlhf"], ["kind", ""], ["framework", ""], ["words", "SKYRL outlier"]]'
    )
    seen = used(page, uses, tmp_path)
    assert [name for name, _ in seen["named"]] == ["words", "kind", "framework"]
    kinds, frameworks = seen["options"]
    assert kinds == ["all", "KL", "forward", "loss", "mask", "none", "rejection", "vocabulary", "weight"]
    assert {"all", "none", "verl", "openrlhf", "trl"} <= set(frameworks)
    weights, both, one, everything, words = seen["chosen"]
    count = sum(row.split("\t")[1] == "weight" for row in seen["all"][0])
    assert 1 < len(weights[0]) == count and weights[1] == f"{count} remedies, {count} of {seen['rows']} rows"
    assert [row.split("\t")[0] for row in both[0]] == ["two-sided token TIS"]
    assert {*both[0]} < {*one[0]} == {row for row in seen["all"][0] if "openrlhf" in row.split("\t")[4]}
    assert everything == seen["all"]
    assert [row.split("\t")[0] for row in words[0]] == ["veto on both sides"]


def test_the_filters_of_the_claims(tmp_path: Path) -> None:
    page = with_table((ROOT / "docs" / "claims.md").read_text(encoding="utf-8"), ROOT)
    brief = page[page.index("## In brief") :].partition("</div>")[0] + "</div>\n"
    seen = used(brief, '[["verdict", "contradicted"], ["words", "no such word"]]', tmp_path)
    assert [name for name, _ in seen["named"]] == ["words", "paper", "cause", "verdict"]
    assert seen["all"][1].startswith(f"{len(STATEMENTS)} statements, ")
    contradicted, none = seen["chosen"]
    assert 0 < len(contradicted[0]) < seen["rows"]
    assert all(row.split("\t")[3] == "contradicted" for row in contradicted[0])
    assert none == [[], f"0 statements, 0 of {seen['rows']} rows"]


def test_a_table_without_a_box_has_no_filters(tmp_path: Path) -> None:
    script = "parent.postMessage(JSON.stringify(document.querySelectorAll('form').length), '*');"
    assert use(page_of("| kind |\n| --- |\n| a |\n"), script, tmp_path) == (0, [])
