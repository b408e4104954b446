"""The pages in a real browser, headless Chromium, at the width of a desktop and of a phone.

Screenshots stay in $PAGES where it is set, to be looked at.
"""

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bad_results import STUDY, write_small
from browser_fixture import browse, needs_browser, use
from diagnosis_fixture import noisy_rows

from tailrl.curves.history import Curve, History
from tailrl.curves.page import curves_html
from tailrl.curves.reading import read_curves
from tailrl.diagnosis.change import change_html, compare
from tailrl.diagnosis.diagnosis import diagnose_parts
from tailrl.diagnosis.log import pack
from tailrl.diagnosis.page import html_page
from tailrl.reports.overview.study import write_report

pytestmark = needs_browser

MEASURE = """
const widths = [...document.querySelectorAll("figure > div > svg")].map(svg => svg.getBoundingClientRect().width);
const small = [...document.querySelectorAll("p, td, th, li, figcaption")]
  .filter(one => one.textContent.trim() && parseFloat(getComputedStyle(one).fontSize) < 12).length;
parent.postMessage(JSON.stringify([document.documentElement.scrollWidth, Math.min(...widths), small]), "*");"""

SCREEN = """
const [arm, row, curves] = ["#arm-0", ".row.arm-0", "svg.curves"].map(name => document.querySelector(name));
const display = () => getComputedStyle(row).display;
const on = display();
arm.checked = false;
const off = display();
arm.checked = true;
const box = curves.getBoundingClientRect();
const place = { clientX: box.left + box.width / 2, clientY: box.top + box.height / 2 };
curves.dispatchEvent(new PointerEvent("pointermove", place));
const type = parseFloat(getComputedStyle(curves.querySelector("text")).fontSize) * box.width / 360;
const bottom = document.querySelector("#chart-score svg").getBoundingClientRect().bottom;
const colour = getComputedStyle(document.querySelector(".row.arm-0 use")).fill;
const links = document.querySelectorAll('a[href$=".csv"]').length;
const seen = { on, off, type, links, bottom, colour, wide: document.documentElement.scrollWidth,
  tip: document.getElementById("tip").innerText, buttons: document.querySelectorAll(".keys button").length };
parent.postMessage(JSON.stringify(seen), "*");"""


ANSWER = """
const verdict = document.querySelector(".verdict");
const answers = [...document.querySelectorAll(".answer li")].map(one => one.getBoundingClientRect().bottom);
const small = [...document.querySelectorAll("p, td, th, li, dt, dd, figcaption")]
  .filter(one => one.textContent.trim() && parseFloat(getComputedStyle(one).fontSize) < 12).length;
const seen = { words: verdict.innerText, bottom: verdict.getBoundingClientRect().bottom, first: answers[0], small,
  wide: document.documentElement.scrollWidth };
parent.postMessage(JSON.stringify(seen), "*");"""
PHONE = 844  # pixels of a phone's screen that is 390 wide


def diagnosis_pages() -> dict[str, str]:
    """A log with a place and causes there and elsewhere, two logs, and curves."""
    rows = noisy_rows(40, 40, 0.02)
    faulty = [replace(row, sampler_T=row.sampler_T - 1.0) if n % 8 == 0 else row for n, row in enumerate(rows)]
    before, after = (diagnose_parts([("the documented JSONL or Parquet", pack(own))]) for own in (faulty, rows))
    steps = np.arange(200.0)
    curve = Curve("a-run-with-a-name", "rollout_corr/k3_kl", steps, 1e-3 * (1 + steps))
    curves = read_curves(History("export.csv", "a W&B export", (curve,), {}))
    return {"log": html_page(before), "change": change_html(compare(before, after)), "curves": curves_html(curves)}


@pytest.mark.parametrize("width", [1440, 390])
def test_the_answer_of_a_diagnosis_is_on_the_first_screen(width: int, tmp_path: Path) -> None:
    for name, text in diagnosis_pages().items():
        folder = tmp_path / name
        folder.mkdir()
        seen, console = use(text, ANSWER, folder, width)
        assert console == [], name
        assert re.search(r"\d", seen["words"]), "the first number stands in the first line"
        assert seen["bottom"] < 0.5 * PHONE and seen["first"] < PHONE, (name, seen)
        assert seen["wide"] <= width and seen["small"] == 0, (name, seen)
        if shots := os.environ.get("PAGES"):
            page = folder / "page.html"
            page.write_text(text, encoding="utf-8")
            browse(page, width, tmp_path, f"--screenshot={shots}/{name}{width}.png")


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_answers_to_pointer_and_switches(width: int, dark: bool, tmp_path: Path) -> None:
    write_small(tmp_path)
    write_report(STUDY, tmp_path, tmp_path)
    page = (tmp_path / "summary.html").read_text(encoding="utf-8")
    seen, console = use(page, SCREEN, tmp_path, width, dark=dark)
    assert console == []
    assert (seen["on"], seen["off"], seen["buttons"]) == ("inline", "none", 2)
    assert "tables/claims.csv" in page
    assert seen["links"] == 0, "in a frame, as in Snakemake's report, a link to a table leads nowhere"
    assert seen["wide"] <= width and seen["type"] >= 12
    assert seen["tip"].split() == ["step", "1", "a", "0.5", "b", "0.5"]
    assert width == 390 or seen["bottom"] < 900, "the chart of scores is on the first screen"
    light = {False: "rgb(2, 76, 171)", True: "rgb(87, 121, 243)"}
    assert seen["colour"] == light[dark]


@pytest.mark.parametrize("width", [1440, 390])
def test_a_studys_page_fits_and_is_legible(width: int, tmp_path: Path) -> None:
    write_small(tmp_path)
    write_report(STUDY, tmp_path, tmp_path)
    page = tmp_path / "summary.html"
    (scroll, figure, small), console = use(page.read_text(encoding="utf-8"), MEASURE, tmp_path, width)
    assert console == []
    assert scroll <= width  # figures and tables scroll by themselves, the page does not
    assert figure >= 600  # their type, 7 to 8 pt at 648 px, is then at its own size
    assert small == 0
    shot = Path(os.environ.get("PAGES", tmp_path)) / f"page{width}.png"
    shot.parent.mkdir(parents=True, exist_ok=True)
    browse(page, width, tmp_path, f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000


def test_an_error_on_the_console_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><script>nothing.here()</script>", encoding="utf-8")
    _, console = browse(page, 390, tmp_path / "profile", "--dump-dom")
    assert any("nothing is not defined" in line for line in console)
