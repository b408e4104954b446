"""The README for a package index, where links into a checkout lead nowhere: they become their words."""

import re
from pathlib import Path

from setuptools import setup

RELATIVE = r"\((?!https?:)[^)\s]+\)"


def index_readme(text: str) -> str:
    """The text without images and links to files of the checkout; the links' words stay."""
    without_images = re.sub(r"!\[[^\]]*\]" + RELATIVE + r"\n*", "", text)
    return re.sub(r"\[([^\]]*)\]" + RELATIVE, r"\1", without_images)


if __name__ == "__main__":
    readme = Path(__file__).with_name("README.md").read_text(encoding="utf-8")
    setup(long_description=index_readme(readme), long_description_content_type="text/markdown")
