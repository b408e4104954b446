"""The navigation: mkdocs.yml's, with `*` in place of pages that it need not name."""

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from docsite.links import links


def expanded(nav: Sequence[Any], texts: Mapping[str, str]) -> list[Any]:
    """The navigation with each `folder/*` replaced by those pages of the folder that are not named.

    They come in the order in which the folder's index links to them, then by name.

    Args:
        nav: entries of mkdocs.yml: a page, {title: page}, or {title: entries}.
        texts: the Markdown of all pages, by their place in docs/.
    """
    return _expanded(nav, sorted(set(texts) - set(_named(nav)), key=lambda page: (_rank(page, texts), page)))


def _rank(page: str, texts: Mapping[str, str]) -> int:
    """Where the index of the page's folder links to it; far behind where it does not."""
    folder, name = posixpath.split(page)
    linked = (target.partition("#")[0] for _, _, target in links(texts.get(posixpath.join(folder, "index.md"), "")))
    return next((at for at, target in enumerate(linked) if target == name), len(texts) * 100)


def _named(nav: Sequence[Any]) -> Iterable[str]:
    for entry in nav:
        if isinstance(entry, dict):
            for own in entry.values():
                yield from _named(own if isinstance(own, list) else [own])
        else:
            yield entry


def _expanded(nav: Sequence[Any], left: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, own),) = entry.items()
            inside = _expanded(own, left) if isinstance(own, list) else own
            found += [{title: inside}] if inside else []
        elif entry.endswith("*"):
            found += [page for page in left if posixpath.dirname(page) == posixpath.dirname(entry)]
        else:
            found.append(entry)
    return found
