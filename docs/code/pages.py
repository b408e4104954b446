"""All that is made of the docs, but their findings: blocks of pages, a page and figures.

`make pages` writes them, from published files and from the package's own code.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

import my_k3
import performance
import performance_figures
import published_figures
import sizes
import which_remedy
from blocks import filled
from model_families_table import families
from verl_study_table import comparison

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs/how-to"

BLOCKS: Mapping[Path, Mapping[str, Callable[[], str]]] = {
    ROOT / "README.md": {"my_k3.yaml": lambda: my_k3.rows_table("docs/")},
    ROOT / "docs/index.md": {"my_k3.yaml": lambda: my_k3.rows_table("")},
    HOW_TO / "gpu.md": {"the studies' plans": sizes.studies, "plans of larger policies": sizes.sizes},
    HOW_TO / "which-remedy.md": {"advice.yaml": which_remedy.rules_table, "replay.yaml": which_remedy.lines},
    HOW_TO / "your-data.md": {"families.csv": families},
    HOW_TO / "verl-study.md": {"verl_study.csv": comparison},
}
"""The pages with blocks, and what makes each block, by the name that its marks have."""


def text(page: Path) -> str:
    """A page of `BLOCKS` with its blocks made anew."""
    return filled(page, {name: make() for name, make in BLOCKS[page].items()})


def main() -> None:
    """Write everything."""
    for page in BLOCKS:
        page.write_text(text(page), encoding="utf-8")
    performance.PAGE.write_text(performance.page(), encoding="utf-8")
    performance_figures.draw(performance_figures.FIGURES)
    published_figures.draw_shown(published_figures.FIGURES)


if __name__ == "__main__":
    main()
