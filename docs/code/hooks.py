"""What MkDocs calls while it builds the site. The work is in docsite/."""

import re
import shutil
from pathlib import Path
from typing import Any

from docsite.claims import with_table
from docsite.drawn import figure_files, with_figures
from docsite.lists import indented
from docsite.mathml import Formulas
from docsite.nav import expanded
from docsite.outside import FOLDER, outside_pages, relinked
from docsite.reference import reference_pages

ROOT = Path(__file__).resolve().parents[2]
UNSEARCHED = ("results/", f"{FOLDER}/", "claims.md")
"""Pages whose words would bury the others in the search."""


def on_config(config: Any) -> Any:
    """Add the formulas to Markdown, and watch the code while pages are served."""
    config.markdown_extensions.append(Formulas())
    config.watch += [str(ROOT / "docs/code"), str(ROOT / "workflow/tailrl")]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made from the code, and those of files outside docs/; then complete the navigation."""
    from mkdocs.structure.files import File

    made = reference_pages(ROOT)
    texts = {f"docs/{file.src_uri}": file.content_string for file in files.documentation_pages()}
    texts |= {f"docs/{place}": text for place, text in made.items()}
    made |= outside_pages(texts, ROOT, always=("CONTRIBUTING.md",))
    for place, text in made.items():
        files.append(File.generated(config, place, content=text))
    for place, content in figure_files().items():
        files.append(File.generated(config, place, content=content))
    config.nav = expanded(config.nav, {file.src_uri: file.content_string for file in files.documentation_pages()})
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:  # noqa: ARG001
    """Lead links to files outside docs/ to their pages; read lists and <details> as code hosts do."""
    place = page.file.src_uri
    if place.startswith(UNSEARCHED):
        page.meta["search"] = {"exclude": True}
    markdown = with_figures(markdown, place)
    markdown = indented(markdown)
    if place.startswith(f"{FOLDER}/"):
        return markdown
    if place == "claims.md":
        page.meta["hide"] = ["toc"]  # its table needs the width
    markdown = relinked(markdown, f"docs/{place}", place, ROOT).replace("<details>", '<details markdown="1">')
    return with_table(markdown, ROOT) if place == "claims.md" else markdown


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001
    """Name the theme's search for screen readers, and the footer's pages by their titles, which it escapes twice."""
    output = re.sub(r'aria-label="[^"]*"', lambda label: label[0].replace("&amp;amp;", "&amp;"), output)
    return output.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="search"')


def on_post_build(config: Any) -> None:
    """Remove what the theme brings for the search of other languages."""
    shutil.rmtree(Path(config.site_dir) / "assets/javascripts/lunr")
