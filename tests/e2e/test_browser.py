"""The pages in a real browser, headless Chromium, at the width of a desktop and of a phone.

Screenshots stay in $PAGES where it is set, to be looked at.
"""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from bad_results import STUDY, write_small

from tailrl.report.study import CAPTIONS, write_paper, write_report

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason=f"no browser here: none of {', '.join(BROWSERS)}"),
]

MEASURE = """<script>
const widths = [...document.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect().width);
const small = [...document.querySelectorAll("p, td, th, li, figcaption")]
  .filter(one => one.textContent.trim() && parseFloat(getComputedStyle(one).fontSize) < 12).length;
parent.postMessage([document.documentElement.scrollWidth, Math.min(...widths), small].join(" "), "*");
</script>"""

SCREEN = """<script>
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
const colour = getComputedStyle(row.querySelector(".mark")).fill;
const links = document.querySelectorAll('a[href$=".csv"]').length;
const seen = { on, off, type, links, bottom, colour, wide: document.documentElement.scrollWidth,
  tip: document.getElementById("tip").innerText, buttons: document.querySelectorAll(".keys button").length };
parent.postMessage(JSON.stringify(seen), "*");
</script>"""

FRAME = """<!doctype html><body style="margin: 0"><script>
addEventListener("message", event => {{ document.documentElement.dataset.seen = event.data; }});
</script><iframe src="{}" style="border: 0; width: {}px; height: 3000px"></iframe>"""
"""A window cannot be as narrow as a phone: a frame in it can."""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page over the published studies."""
    out = tmp_path_factory.mktemp("paper")
    write_paper([ROOT / "docs" / "results"], CAPTIONS, out)
    return out / "index.html"


def browse(page: Path, width: int, profile: Path, *arguments: str) -> tuple[str, list[str]]:
    """What the browser prints, and what the page says on its console."""
    assert CHROMIUM is not None
    ended = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
            *(f"--user-data-dir={profile}", f"--window-size={width},3000", *arguments, page.as_uri()),
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_over_all_studies_fits_and_is_legible(page: Path, width: int, tmp_path: Path) -> None:
    measured = page.with_name(f"measured{width}.html")
    measured.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{MEASURE}</body>"), encoding="utf-8")
    frame = page.with_name(f"frame{width}.html")
    frame.write_text(FRAME.format(measured.name, width), encoding="utf-8")
    printed, console = browse(frame, 1440, tmp_path, "--virtual-time-budget=5000", "--dump-dom")
    assert console == []
    found = re.search(r'data-seen="([\d.]+) ([\d.]+) (\d+)"', printed)
    assert found, printed[:200]
    scroll, figure, small = map(float, found.groups())
    assert scroll <= width  # figures and tables scroll by themselves, the page does not
    assert figure >= 600  # their type, 7 to 8 pt at 648 px, is then at its own size
    assert small == 0
    shot = Path(os.environ.get("PAGES", tmp_path)) / f"page{width}.png"
    shot.parent.mkdir(parents=True, exist_ok=True)
    browse(page, width, tmp_path, f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000


@pytest.mark.parametrize("width", [1440, 390])
@pytest.mark.parametrize("dark", [False, True])
def test_the_first_screen_answers_to_pointer_and_switches(width: int, dark: bool, tmp_path: Path) -> None:
    write_small(tmp_path)
    write_report(STUDY, tmp_path, tmp_path)
    page = tmp_path / "summary.html"
    measured = tmp_path / "measured.html"
    measured.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{SCREEN}</body>"), encoding="utf-8")
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(measured.name, width), encoding="utf-8")
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    printed, console = browse(frame, 1440, tmp_path / "profile", "--virtual-time-budget=5000", "--dump-dom", *scheme)
    assert console == []
    found = re.search(r'data-seen="([^"]+)"', printed)
    assert found, printed[:200]
    seen = json.loads(html.unescape(found[1]))
    assert (seen["on"], seen["off"], seen["buttons"]) == ("inline", "none", 2)
    assert "tables/claims.csv" in page.read_text(encoding="utf-8")
    assert seen["links"] == 0, "in a frame, as in Snakemake's report, a link to a table leads nowhere"
    assert seen["wide"] <= width and seen["type"] >= 12
    assert seen["tip"].split() == ["step", "1", "a", "0.5", "b", "0.5"]
    assert width == 390 or seen["bottom"] < 900, "the chart of scores is on the first screen"
    light = {False: "rgb(2, 76, 171)", True: "rgb(87, 121, 243)"}
    assert seen["colour"] == light[dark]


def test_an_error_on_the_console_would_be_seen(tmp_path: Path) -> None:
    page = tmp_path / "wrong.html"
    page.write_text("<!doctype html><script>nothing.here()</script>", encoding="utf-8")
    _, console = browse(page, 390, tmp_path / "profile", "--dump-dom")
    assert any("nothing is not defined" in line for line in console)
