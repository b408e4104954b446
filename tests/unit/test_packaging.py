"""What a package index and a wheel get."""

import re
import runpy
import tomllib
from pathlib import Path

from tailrl.runtime.extras import extras

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
LINK = r"\]\((?!https?:)[^)]*\)"


def test_the_readme_of_an_index_has_no_link_into_a_checkout() -> None:
    """It would lead nowhere there; the words stay."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = runpy.run_path(str(ROOT / "setup.py"))["index_readme"](readme)
    assert re.search(LINK, readme) and not re.search(LINK, shown) and "![" not in shown
    assert "[arXiv 2512.23087](https://arxiv.org/abs/2512.23087)" in shown
    assert "the results are bit-identical." in " ".join(shown.split())


def test_every_file_that_the_package_reads_is_in_the_wheel() -> None:
    """By the patterns of package-data, for all files but code."""
    package = ROOT / "workflow" / "tailrl"
    listed = {
        file for pattern in PROJECT["tool"]["setuptools"]["package-data"]["tailrl"] for file in package.glob(pattern)
    }
    others = {file for file in package.rglob("*.*") if file.suffix not in (".py", ".pyc", ".so") and file.is_file()}
    assert others == listed


def test_each_extra_has_its_row() -> None:
    page = (ROOT / "docs/how-to/install.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)
    assert sorted(rows) == sorted(PROJECT["project"]["optional-dependencies"]) == sorted(extras())
