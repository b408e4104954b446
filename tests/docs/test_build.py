"""The built site: strictly, without a word to another host, and in a real browser with the network cut.

Screenshots stay in $PAGES where it is set, to be looked at.
"""

import os
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from matplotlib.image import imread

ROOT = Path(__file__).parents[2]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((path for path in map(shutil.which, BROWSERS) if path), None)
HOST = re.compile(r"(?:https?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE)
IN_STYLE = re.compile(r"(?:url\(|@import)\s*['\"]?((?:https?:)?//[^'\")\s]+)", re.IGNORECASE)
IN_SCRIPT = re.compile(r"(?:https?:|(?<=['\"`]))//[a-z0-9-]+(?:\.[a-z0-9-]+)+", re.IGNORECASE)
LOADED = {"src", "srcset", "poster", "data", "action", "xlink:href"}
RELATIONS = {"stylesheet", "icon", "preconnect", "preload", "prefetch", "dns-prefetch", "manifest", "modulepreload"}
NEVER_ASKED = {
    "https://unpkg.com": 'class="mermaid"',
    "https://api.github.com": 'data-md-component="source"',
    "https://bit.ly": "",  # in the words of a warning
}
"""Hosts in the theme's script, and what a page would need for the script to ask them. unpkg.com also has a stand-in for
ResizeObserver, which every browser since 2020 has."""

pytestmark = pytest.mark.slow


class Asked(HTMLParser):
    """Other hosts that a page would load something from."""

    def __init__(self) -> None:
        super().__init__()
        self.hosts: list[str] = []
        self.inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.inside = tag
        named = {name: value or "" for name, value in attrs}
        loads = [value for name, value in named.items() if name in LOADED]
        if tag == "link" and RELATIONS & set(named.get("rel", "").split()):
            loads.append(named.get("href", ""))
        if tag == "meta" and named.get("http-equiv", "").lower() == "refresh":
            loads.append(named.get("content", ""))
        self.hosts += [host for value in loads for host in HOST.findall(value)]
        self.hosts += IN_STYLE.findall(named.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.inside == "style":
            self.hosts += IN_STYLE.findall(data)
        if self.inside == "script":
            self.hosts += IN_SCRIPT.findall(data)


def hosts(path: Path) -> set[str]:
    """Other hosts that a file of the site would make a browser ask."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".html", ".svg"):
        page = Asked()
        page.feed(text)
        return set(page.hosts)
    if path.suffix == ".css":
        return set(IN_STYLE.findall(text))
    # Comments name authors, and names of XML's kinds look like addresses.
    words = re.sub(r"/\*.*?\*/|\"https?://www\.w3\.org/[^\"]*\"", "", text, flags=re.DOTALL)
    return set(IN_SCRIPT.findall(words))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, as `make docs` builds it."""
    pytest.importorskip("mkdocs", reason="`make docs` installs it")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", out]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return out


def test_no_page_asks_another_host(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(pages) > 100
    files = [path for kind in ("html", "svg", "css", "js") for path in site.rglob(f"*.{kind}")]
    asked = {path.relative_to(site).as_posix(): found for path in files if (found := hosts(path) - NEVER_ASKED.keys())}
    # The index of the search is a script that holds the pages' text.
    asked.pop("search/search_index.js", None)
    assert asked == {}
    for host, needed in NEVER_ASKED.items():
        assert not [path for path, text in pages.items() if needed and needed in text], host


def test_the_site_reads_pages_as_a_code_host_does(site: Path) -> None:
    """Each page has as many items, rows, code blocks and quotes as in CommonMark."""
    reader = MarkdownIt("commonmark", {"html": True}).enable("table")
    tags = ("li", "tr", "pre", "blockquote", "h1", "h2", "h3")
    differ = {}
    for path in [*(ROOT / "docs").rglob("*.md"), ROOT / "CONTRIBUTING.md"]:
        inside = path.is_relative_to(ROOT / "docs")
        place = path.relative_to(ROOT / "docs").as_posix() if inside else "source/CONTRIBUTING.md"
        if place.startswith("code/") or place == "claims.md":  # whose table in brief is another one
            continue
        page = site / re.sub(r"README$", "index", place.removesuffix(".md"))
        shown = page.with_name(f"{page.name}.html").read_text(encoding="utf-8")
        shown = shown.split("<article")[1].split("</article>")[0]
        # The figures of a study, which only the site draws, have a heading at the page's end.
        shown = shown.split('<h2 id="figures"')[0]
        meant = reader.render(path.read_text(encoding="utf-8"))
        counts = [[len(re.findall(rf"<{tag}[ >]", text)) for tag in tags] for text in (shown, meant)]
        if counts[0] != counts[1]:
            differ[place] = dict(zip(tags, zip(*counts, strict=True), strict=True))
    assert differ == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<img src="https://example.org/a.png">'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example.org/css">'),
        ("a.html", '<p style="background: url(https://example.org/a.png)">'),
        ("a.html", '<style>@import "https://example.org/a.css";</style>'),
        ("a.html", '<script>fetch("https://example.org")</script>'),
        ("a.css", "p { background: url('https://example.org/a.png') }"),
        ("a.js", 'import("https://example.org/a.js")'),
        ("a.js", "/* no */ import('//example.org/a.js')"),
    ],
)
def test_another_host_would_be_found(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    assert len(hosts(tmp_path / name)) == 1


def test_a_link_to_another_host_is_no_load(tmp_path: Path) -> None:
    page = tmp_path / "a.html"
    page.write_text('<a href="https://arxiv.org/abs/2512.23087">x</a><link rel="next" href="b.html">', encoding="utf-8")
    assert hosts(page) == set()


def browse(page: str, profile: Path, *arguments: str) -> tuple[str, list[str]]:
    """What the browser prints, and what the page says on its console; every name of a host is unknown to it."""
    if CHROMIUM is None:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)}")
    ended = subprocess.run(
        [
            *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"),
            *("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-dev-shm-usage", f"--user-data-dir={profile}"),
            *("--virtual-time-budget=20000", *arguments, page),
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    return ended.stdout, [line for line in ended.stderr.splitlines() if "CONSOLE" in line]


def test_search_works_on_pages_opened_as_files(site: Path, tmp_path: Path) -> None:
    page = (site / "reference" / "corrections.html").as_uri()
    printed, console = browse(f"{page}?q=geometric", tmp_path, "--dump-dom")
    assert console == []
    assert "md-search-result__item" in printed


def test_the_filters_of_the_claims(site: Path, tmp_path: Path) -> None:
    """A verdict is chosen; without the script the table is whole."""
    text = (site / "claims.html").read_text(encoding="utf-8")
    assert "hidden" not in text[text.index('class="claims"') : text.index("</table>")]
    choose = """<script>addEventListener("load", () => {
      const select = document.querySelector(".table-filters select[name=verdict]");
      select.value = "contradicted";
      select.dispatchEvent(new Event("change", { bubbles: true }));
      const rows = [...document.querySelectorAll(".claims tbody tr")];
      const shown = rows.filter(row => !row.hidden);
      document.documentElement.dataset.seen = [
        rows.length, shown.length, shown.every(row => row.cells[3].textContent == "contradicted"),
        document.querySelectorAll(".table-filters select").length].join(" ");
    })</script></body>"""
    page = site / "chosen.html"
    page.write_text(text.replace("</body>", choose), encoding="utf-8")
    printed, console = browse(page.as_uri(), tmp_path, "--dump-dom")
    page.unlink()
    assert console == []
    found = re.search(r'data-seen="(\d+) (\d+) (\w+) (\d)"', printed)
    assert found, printed[:300]
    assert 0 < int(found[2]) < int(found[1]) and found[3] == "true" and found[4] == "3"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_figure_is_as_light_as_its_page(site: Path, scheme: str, tmp_path: Path) -> None:
    """Beside a corner of the home page's figure, which is drawn on white, and within it."""
    measure = """<script>addEventListener("load", () => {
      const box = document.querySelector(".md-typeset img[src$='.svg']").getBoundingClientRect();
      document.documentElement.dataset.seen = [Math.round(box.left), Math.round(box.top)].join(" ");
    })</script></body>"""
    page = site / "figure.html"
    page.write_text((site / "index.html").read_text(encoding="utf-8").replace("</body>", measure), encoding="utf-8")
    look = ("--window-size=1440,3000", f"--blink-settings=preferredColorScheme={int(scheme == 'light')}")
    printed, _ = browse(page.as_uri(), tmp_path / "a", *look, "--dump-dom")
    browse(page.as_uri(), tmp_path / "b", *look, f"--screenshot={tmp_path / 'shot.png'}")
    page.unlink()
    found = re.search(r'data-seen="(\d+) (\d+)"', printed)
    assert found, printed[:300]
    left, top = int(found[1]), int(found[2])
    shot = imread(tmp_path / "shot.png")
    beside, inside = (shot[top + 6, left + shift, :3].mean() for shift in (-6, 6))
    assert abs(beside - inside) < 0.05
    assert (inside > 0.5) == (scheme == "light")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 390])
def test_a_page_fits(site: Path, width: int, scheme: str, tmp_path: Path) -> None:
    """A window cannot be as narrow as a phone: a frame in it can."""
    measure = """<script>addEventListener("load", () => parent.postMessage([document.documentElement.scrollWidth,
      document.body.dataset.mdColorScheme].join(" "), "*"))</script></body>"""
    text = (site / "claims.html").read_text(encoding="utf-8")
    (site / "measured.html").write_text(text.replace("</body>", measure), encoding="utf-8")
    frame = site / "frame.html"
    frame.write_text(
        """<!doctype html><body style="margin: 0"><script>
        addEventListener("message", event => { document.documentElement.dataset.seen = event.data; });
        </script>"""
        f'<iframe src="measured.html" style="border: 0; width: {width}px; height: 1200px"></iframe>',
        encoding="utf-8",
    )
    look = (f"--window-size={width if width > 500 else 500},1200",)
    look += (f"--blink-settings=preferredColorScheme={int(scheme == 'light')}",)
    printed, _ = browse(frame.as_uri(), tmp_path / "a", *look, "--dump-dom")
    found = re.search(r'data-seen="(\d+) (\w+)"', printed)
    assert found, printed[:300]
    assert int(found[1]) <= width
    assert found[2] == {"light": "default", "dark": "slate"}[scheme]
    shot = Path(os.environ.get("PAGES", tmp_path)) / f"site{width}{scheme}.png"
    shot.parent.mkdir(parents=True, exist_ok=True)
    browse(frame.as_uri(), tmp_path / "b", *look, f"--screenshot={shot}")
    assert shot.stat().st_size > 20_000
