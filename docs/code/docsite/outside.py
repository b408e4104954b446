"""Pages for files that lie outside docs/ and that a page links to: the site needs no code host.

Paths are relative to the repository, places to docs/.
"""

import posixpath
from collections.abc import Iterable, Mapping
from pathlib import Path

from docsite.links import is_elsewhere, links, replaced

FOLDER = "source"
"""Their place in the site."""

DOCS, CODE = "docs/", "docs/code/"
LANGUAGES = {"py": "python", "yml": "yaml", "sh": "bash", "js": "javascript", "ipynb": "json", "patch": "diff"}


def place_of(path: str, root: Path) -> str | None:
    """The place in the site of a file or folder of the repository; None if there is none of that path."""
    if path.startswith(DOCS) and not path.startswith(CODE):
        return path.removeprefix(DOCS)
    if path.startswith("..") or not (root / path).exists():
        return None
    if (root / path).is_dir():
        return f"{FOLDER}/{path}/index.md"
    return f"{FOLDER}/{path}" + ("" if path.endswith(".md") else ".md")


def relinked(text: str, path: str, place: str, root: Path) -> str:
    """The Markdown of the file at `path`, with links as they must be at `place`."""

    def change(target: str) -> str:
        linked, hash_, anchor = target.partition("#")
        found = place_of(_path(path, linked), root) if linked and not is_elsewhere(target) else None
        return target if found is None else posixpath.relpath(found, posixpath.dirname(place) or ".") + hash_ + anchor

    return replaced(text, change)


def outside_pages(texts: Mapping[str, str], root: Path, always: Iterable[str] = ()) -> dict[str, str]:
    """The Markdown of a page for each file outside docs/ that is linked, by its place.

    Args:
        texts: the Markdown of each page of docs/, by its path.
        root: the repository.
        always: paths that get a page though no page links to them.
    """
    asked = [*always, *(linked for path, text in texts.items() for linked in _linked(path, text))]
    found: dict[str, str] = {}
    while asked:
        path = asked.pop()
        place = place_of(path, root)
        if place is None or not place.startswith(f"{FOLDER}/") or place in found:
            continue
        found[place] = _shown(path, place, root)
        if path.endswith(".md"):
            asked += _linked(path, (root / path).read_text(encoding="utf-8"))
    return found


def _path(at: str, target: str) -> str:
    return posixpath.normpath(posixpath.join(posixpath.dirname(at), target))


def _linked(path: str, text: str) -> list[str]:
    """The paths that a Markdown file links to."""
    targets = (target.partition("#")[0] for _, _, target in links(text) if not is_elsewhere(target))
    return [_path(path, target) for target in targets if target]


def _shown(path: str, place: str, root: Path) -> str:
    """The Markdown that shows a file, or the names in a folder."""
    if (root / path).is_dir():
        names = sorted(child.name for child in (root / path).iterdir() if not child.name.startswith((".", "__")))
        return f"# `{path}/`\n\n" + "".join(f"- `{name}`\n" for name in names)
    text = (root / path).read_text(encoding="utf-8")
    if path.endswith(".md"):
        return relinked(text, path, place, root)
    ending = path.rpartition(".")[2]
    return f'# `{path}`\n\n~~~~~~{{.{LANGUAGES.get(ending, ending)} linenums="1"}}\n{text}\n~~~~~~\n'
