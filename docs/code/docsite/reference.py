"""The reference: every page that is made from the code when the site is built."""

from pathlib import Path

from docsite.api import api_page
from docsite.commands import commands_page
from docsite.corrections import corrections_page
from docsite.schema import diagnosis_page, schema_page
from tailrl.reports.metrics.page import metrics_page

PAGES = tuple(f"reference/{name}.md" for name in ("study", "metrics", "cli", "api", "corrections", "diagnosis"))
"""Their places in docs/; other pages may link to them."""


def reference_pages(root: Path) -> dict[str, str]:
    """The Markdown of each page by its place in docs/."""
    made = (
        schema_page(root),
        metrics_page(),
        commands_page(),
        api_page(root),
        corrections_page(root),
        diagnosis_page(root),
    )
    return dict(zip(PAGES, made, strict=True))
