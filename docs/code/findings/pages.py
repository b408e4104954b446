"""Write docs/findings/, docs/figures/ and the findings of README.md from the published results: `make pages`."""

import re
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from blocks import filled
from findings.figures import (
    Rows,
    dot_rows,
    draw_dots,
    draw_harm,
    draw_shape,
    harm_points,
    shape_rows,
)
from findings.flips import flip_ratios
from findings.lookups import LOOKUPS, RESULTS, ROOT, commits, rate, runs, settings_of, shown, steps
from findings.number import Number
from tailrl.artifacts.tables import Row, write_csv
from tailrl.config.load import read_yaml
from tailrl.config.results import whole_and_part
from tailrl.reports.overview.evidence import command_of
from tailrl.runtime.errors import StudyError
from tailrl.runtime.templates import renderer

TEMPLATES = Path(__file__).parent
PAGES = sorted(path.name.removesuffix(".md.j2") for path in TEMPLATES.glob("[a-z]*.md.j2"))
ITEM = re.compile(r"- |\d\. ")
Drawings = dict[str, tuple[list[Row], Callable[[Path], None]]]
"""The figures by name: the rows of the table behind each, and what draws it."""


def rendered() -> tuple[dict[str, str], Drawings]:
    """Every page by its name, README's findings as `README`, and the figures that the pages call for.

    Raises StudyError if a number that a template wants is not published.
    """
    lost = harm_points()
    drawings: Drawings = {
        "harm": (lost, lambda path: draw_harm(path, lost)),
        "shape": (shape_rows(), draw_shape),
    }

    def dots(name: str, rows: Rows, label: str = "held-out score", line: Number | None = None) -> str:
        if name in drawings:
            raise StudyError(f"two figures are called {name}")
        drawings[name] = dot_rows(rows), lambda path: draw_dots(path, rows, label, line)
        return f"../figures/{name}.svg"

    render = renderer(TEMPLATES, dots, scope, provenance, *LOOKUPS, flip_ratios)
    groups = read_yaml(TEMPLATES / "groups.yaml")
    pages = {name: _tidy(render(f"{name}.md.j2", page=name, groups=groups, at="", up="../")) for name in PAGES}
    return pages | {"README": _tidy(render("_five.md.j2", at="docs/findings/", up="docs/"))}, drawings


def scope(study: str, arm: str = "", seeds: str = "") -> str:
    """What trains on what, in one sentence; `seeds` says how many where a study has parts."""
    line = next(line for one in shown() if one.name == study for line in one.claims if line.arms)
    numbers = " or ".join(map(str, sorted(set(map(len, settings_of(study).arm_seeds().values())))))
    return (
        f"Task {line.task}; policy {line.policy}; rate {rate(study, arm)}; {steps(study, arm)} steps; "
        f"{seeds or numbers + (' seed' if numbers == '1' else ' seeds')}."
    )


def provenance(studies: Sequence[str]) -> str:
    """The pages of these studies, their runs and commits, and the commands that make them again."""
    by_whole: dict[str, list[str]] = {}
    for study in studies:
        by_whole.setdefault(whole_and_part(study)[0], []).append(study)
    return " ".join(_provenance(whole, names) for whole, names in by_whole.items())


def _provenance(whole: str, names: Sequence[str]) -> str:
    links = [f"[{whole_and_part(name)[1] or whole}](../results/{name}/summary.md)" for name in names]
    if (RESULTS / whole / "pooled/pooled.md").is_file():
        links.insert(0, f"[{whole}](../results/{whole}/pooled/pooled.md)")
    elif names != [whole]:
        links.insert(0, whole)
    made = [code for name in names for code in commits(name)]
    codes = " ".join(f"`{code}`" for code in dict.fromkeys(made))
    return f"{' '.join(links)}: {sum(map(runs, names))} runs, {codes}, `{command_of(whole)}`."


def _tidy(text: str) -> str:
    """Paragraphs and items wrapped anew, since a number may be shorter than its lookup."""
    found: list[str] = []
    paragraph: list[str] = []
    fenced = False
    for line in [*text.strip().splitlines(), ""]:
        fenced ^= line.startswith("```")
        flows = bool(line) and not fenced and not line.startswith(("`", "| ", "#", "<", "!", ">"))
        if paragraph and (not flows or ITEM.match(line)):
            deeper = "  " if ITEM.match(paragraph[0]) else ""
            words = " ".join(paragraph)
            found.append(
                textwrap.fill(words, 120, subsequent_indent=deeper, break_long_words=False, break_on_hyphens=False)
            )
            paragraph = []
        if flows:
            paragraph.append(line.strip())
        elif line or (found and found[-1]):
            found.append(line)
    return "\n".join(found).strip() + "\n"


def main() -> None:
    """Write everything."""
    pages, drawings = rendered()
    readme, findings, figures = ROOT / "README.md", ROOT / "docs/findings", ROOT / "docs/figures"
    readme.write_text(filled(readme, {"findings": pages.pop("README").strip()}), encoding="utf-8")
    findings.mkdir(exist_ok=True)
    for name, text in pages.items():
        (findings / f"{name}.md").write_text(text, encoding="utf-8")
    for name, (rows, draw) in drawings.items():
        write_csv(figures / f"{name}.csv", rows)
        draw(figures / f"{name}.svg")


if __name__ == "__main__":
    main()
