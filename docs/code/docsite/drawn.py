"""The figures of pages of results, which the site's build draws from docs/results/tables."""

from collections.abc import Mapping
from functools import cache
from pathlib import PurePosixPath

from published_figures import Place, every_figure
from tailrl.reports.axes import svg_of
from tailrl.reports.figures import caption

WORDS = {"pooled": "The parts of the study together.", "ablation": caption("ablation")}
"""The captions of figures that a report shows by another name, or none."""


@cache
def figure_files() -> Mapping[str, str]:
    """Each figure's text by its place below docs/."""
    return {_file(place): svg_of(draw()) for place, draw in every_figure().items()}


def with_figures(markdown: str, page: str) -> str:
    """The page, below docs/, with the figures of its study at its end."""
    own = [place for place in every_figure() if f"results/{place.study}/{place.page}.md" == page]
    if not own:
        return markdown
    parts = [markdown, "## Figures"]
    for place in own:
        words = WORDS.get(place.name) or caption(place.name)
        parts += [f"![{place.name} of {place.study}]({PurePosixPath(_file(place)).name})", " ".join(words.split())]
    return "\n\n".join(parts) + "\n"


def _file(place: Place) -> str:
    page = PurePosixPath(place.page)
    return f"results/{place.study}/{page.parent / f'{page.name}-{place.name}.svg'}"
