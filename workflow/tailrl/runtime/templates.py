"""Pages from jinja2 templates: HTML, where every value is escaped, and Markdown, where a value brings no HTML."""

import re
from collections.abc import Callable
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_eval_context
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape


def renderer(folder: Path, *functions: Callable[..., object]) -> Callable[..., str]:
    """A function that renders a template by its name, with values by theirs.

    A template is HTML where its name ends with .html.j2, and else Markdown.

    Args:
        folder: where the templates lie.
        functions: what the templates call, by the functions' own names.
    """
    environment = Environment(
        loader=FileSystemLoader(folder),
        autoescape=lambda name: bool(name and name.endswith(".html.j2")),
        finalize=_without_html,
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


def header(*names: str) -> Markup:
    """The first two lines of a table in Markdown."""
    return Markup("\n").join((row(*names), row(*["---"] * len(names))))


def row(*cells: object) -> Markup:
    """A line of a table in Markdown."""
    return Markup("| {} |").format(Markup(" | ").join(_cell(cell) for cell in cells))


def _cell(value: object) -> Markup:
    return Markup(" ".join(_inert(value).splitlines()).replace("|", "\\|"))


@pass_eval_context
def _without_html(context: EvalContext, value: object) -> object:
    """What jinja2 does to each value before it stands in a page. In HTML, autoescape does all that is needed."""
    return value if context.autoescape else _inert(value)


def _inert(value: object) -> str:
    """Text without HTML's tags and without images: whoever reads the page would load them. Other marks stay."""
    if isinstance(value, Markup):
        return value
    tagless = re.sub(r"<(?=[a-zA-Z/!?])", lambda match: escape(match[0]), str(value))
    return tagless.replace("![", "!\\[")
