"""What MkDocs calls while it builds the site. The work is in docsite/."""

import re
import shutil
from pathlib import Path
from typing import Any

from docsite.claims import with_table
from docsite.drawn import figure_files, with_figures
from docsite.lists import indented
from docsite.llms import llms_text, sections
from docsite.mathml import Formulas
from docsite.nav import expanded
from docsite.outside import FOLDER, outside_pages, relinked
from docsite.reference import reference_pages

ROOT = Path(__file__).resolve().parents[2]
UNSEARCHED = ("results/", f"{FOLDER}/", "claims.md")
"""Pages whose words would bury the others in the search."""


TEXTS: dict[str, str] = {}
"""The Markdown of every page of this build, by its place."""
PAGES: list[Any] = []
"""The pages of this build's navigation, in its order."""


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
    TEXTS[place] = markdown
    if place.startswith(f"{FOLDER}/"):
        return markdown
    if place == "claims.md":
        page.meta["hide"] = ["toc"]  # its table needs the width
    markdown = relinked(markdown, f"docs/{place}", place, ROOT)
    TEXTS[place] = markdown
    markdown = markdown.replace("<details>", '<details markdown="1">')
    return with_table(markdown, ROOT) if place == "claims.md" else markdown


def on_nav(nav: Any, config: Any, files: Any) -> None:  # noqa: ARG001
    """Note the pages, for llms.txt; each has its title and its text later."""
    PAGES[:] = nav.pages


def on_post_page(output: str, page: Any, config: Any) -> str:  # noqa: ARG001
    """Name the theme's search for screen readers, and the footer's pages by their titles, which it escapes twice."""
    output = re.sub(r'aria-label="[^"]*"', lambda label: label[0].replace("&amp;amp;", "&amp;"), output)
    return output.replace('data-md-component="search" role="dialog"', 'data-md-component="search" role="search"')


def on_post_build(config: Any) -> None:
    """Write every page as Markdown beside it, and llms.txt; remove the theme's search of other languages."""
    site = Path(config.site_dir)
    shutil.rmtree(site / "assets/javascripts/lunr")
    for place, text in TEXTS.items():
        (site / place).parent.mkdir(parents=True, exist_ok=True)
        (site / place).write_text(text, encoding="utf-8")
    index = llms_text(config.site_name, config.site_description, sections(PAGES))
    (site / "llms.txt").write_text(index, encoding="utf-8")
    TEXTS.clear()
