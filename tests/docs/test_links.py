"""Every relative link and anchor of the repository's Markdown leads somewhere, as a code host follows it."""

import posixpath
import subprocess
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

from docsite.links import anchors, is_elsewhere, links, replaced
from docsite.reference import PAGES, reference_pages

ROOT = Path(__file__).parents[2]
MADE = {f"docs/{page}" for page in PAGES}
"""Pages that are made when the site is built; pages of docs/ may link to them, the README may not."""


@cache
def found_anchors(path: str) -> set[str]:
    """The anchors of a Markdown file, or of a page that is made."""
    if path in MADE:
        return anchors(reference_pages(ROOT)[path.removeprefix("docs/")])
    return anchors((ROOT / path).read_text(encoding="utf-8"))


def broken(path: str, text: str) -> list[str]:
    """What is wrong with each link of a Markdown file that leads nowhere."""
    wrong = []
    for _, _, link in links(text):
        if is_elsewhere(link):
            continue
        target, _, anchor = unquote(link).partition("#")
        to = posixpath.normpath(posixpath.join(posixpath.dirname(path), target)) if target else path
        made = to in MADE and path.startswith("docs/")
        if not made and (to.startswith("..") or not (ROOT / to).exists()):
            wrong.append(f"{path}: {link}: there is no {to}")
        elif anchor and to.endswith(".md") and anchor not in found_anchors(to) and to != path:
            wrong.append(f"{path}: {link}: {to} has no such heading")
        elif anchor and to == path and anchor not in anchors(text):
            wrong.append(f"{path}: {link}: this page has no such heading")
    return wrong


def markdown_files() -> list[str]:
    """Every Markdown file of the project, by its path."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({path for path in listed if (ROOT / path).is_file()})


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="which files are the project's, git knows")
def test_every_link_and_anchor_leads_somewhere() -> None:
    files = markdown_files()
    assert len(files) > 50
    wrong = [line for path in files for line in broken(path, (ROOT / path).read_text(encoding="utf-8"))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("README.md", "[x](nowhere.md)"),
        ("README.md", "![x](docs/nowhere.svg)"),
        ("README.md", "[x](docs/reference/api.md)"),
        ("README.md", "[x]: nowhere.md"),
        ("README.md", '<img src="nowhere.svg" alt="x">'),
        ("docs/architecture.md", "[x](#nothing)"),
        ("docs/architecture.md", "[x](../CONTRIBUTING.md#nothing)"),
        ("docs/architecture.md", "[x](reference/cli.md#nothing)"),
        ("docs/architecture.md", "[x](../../elsewhere.md)"),
    ],
)
def test_a_link_that_leads_nowhere_is_found(path: str, text: str) -> None:
    assert len(broken(path, text)) == 1


def test_what_is_no_link_is_left_alone() -> None:
    text = "`[x](a.md)` <!-- [x](a.md) -->\n\n```md\n[x](a.md)\n```\n\n[`x`](b.md) [y](c_(d).md 'no')\n"
    assert [target for _, _, target in links(text)] == ["b.md"]
    assert broken("README.md", "[x](https://example.org/nowhere) [y](mailto:a@b) [z](#one)\n\n# One") == []
    assert replaced(text, lambda target: f"../{target}") == text.replace("(b.md)", "(../b.md)")


def test_anchors_are_those_of_a_code_host() -> None:
    page = "# A `b_c` & *d*: (e)\n\n## Same\n\n## Same\n\n```\n# no\n```\n\n"
    page += '<a id="y"></a>\n\n## [Link](z.md)!\n'
    assert anchors(page) == {"a-b_c--d-e", "same", "same-1", "y", "link"}
