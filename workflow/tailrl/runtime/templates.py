"""Pages from jinja2 templates: HTML, where every value is escaped, and Markdown, where a value brings no HTML."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_eval_context
from jinja2.nodes import EvalContext
from markupsafe import escape

BAR = "\\|"
"""A bar within a cell of a table in Markdown."""


def renderer(folders: Path | Sequence[Path], *functions: Callable[..., object]) -> Callable[..., str]:
    """A function that renders a template by its name, with values by theirs.

    A template is HTML where its name ends with .html.j2, and else Markdown.

    Args:
        folders: where the templates lie; the first folder that has one counts.
        functions: what the templates call, by the functions' own names.
    """
    environment = Environment(
        loader=FileSystemLoader(folders),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        finalize=_finalize,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["flow"] = flow
    environment.globals |= {function.__name__: function for function in (header, row, *functions)}

    def render(name: str, /, **values: object) -> str:
        return environment.get_template(name).render(values)

    return render


def flow(text: str) -> str:
    """A paragraph of Markdown on one line: a template may wrap it."""
    return re.sub(r"\s*\n\s*", " ", text.strip()) + "\n"


def header(*names: str) -> str:
    """The first two lines of a table in Markdown."""
    return f"{row(*names)}\n{row(*['---'] * len(names))}"


def row(*cells: object) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(' '.join(inert(cell).splitlines()).replace('|', BAR) for cell in cells)} |"


def inert(value: object) -> str:
    """Text for a page in Markdown without HTML and images, which whoever reads the page would load.

    Other marks stay, and anchors that are linked to, <a id="..."></a>.
    """
    tagless = re.sub(r'(<a id="[\w.]+"></a>)|<(?=[a-zA-Z/!?])', lambda found: found[1] or escape("<"), str(value))
    return tagless.replace("![", "!\\[")


@pass_eval_context
def _finalize(context: EvalContext, value: object) -> object:
    """What jinja2 does to each value before it stands in a page. In HTML, autoescape does all that is needed."""
    return value if context.autoescape else inert(value)
