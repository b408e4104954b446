"""The navigation: mkdocs.yml's, with `*` in place of pages that it need not name."""

import posixpath
from collections.abc import Collection, Iterable, Sequence
from typing import Any


def expanded(nav: Sequence[Any], pages: Collection[str]) -> list[Any]:
    """The navigation with each `folder/*` replaced by those pages of the folder that are not named, in order.

    Pages that are not written yet are left out.

    Args:
        nav: entries of mkdocs.yml: a page, {title: page}, or {title: entries}.
        pages: all pages, relative to docs/.
    """
    return _expanded(nav, pages, sorted(set(pages) - set(_named(nav))))


def _named(nav: Sequence[Any]) -> Iterable[str]:
    for entry in nav:
        if isinstance(entry, dict):
            for own in entry.values():
                yield from _named(own if isinstance(own, list) else [own])
        else:
            yield entry


def _expanded(nav: Sequence[Any], pages: Collection[str], left: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            ((title, own),) = entry.items()
            inside = _expanded(own if isinstance(own, list) else [own], pages, left)
            found += [{title: inside if isinstance(own, list) else own}] if inside else []
        elif entry.endswith("*"):
            found += [page for page in left if posixpath.dirname(page) == posixpath.dirname(entry)]
        elif entry in pages:
            found.append(entry)
    return found
