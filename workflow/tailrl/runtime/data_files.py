"""Data in YAML beside the module that reads them: catalogues, names and words."""

from pathlib import Path
from typing import Any

import yaml


def yaml_beside(module_file: str, name: str) -> Any:
    """The content of the YAML file of this name in the folder of a module, given the module's `__file__`."""
    return yaml.safe_load(Path(module_file).with_name(name).read_text(encoding="utf-8"))
