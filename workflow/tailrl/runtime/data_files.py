"""Data in YAML beside the module that reads them: catalogues, names and words."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import yaml

if TYPE_CHECKING:
    from pydantic import BaseModel

ModelT = TypeVar("ModelT", bound="BaseModel")


def yaml_beside(module_file: str, name: str) -> Any:
    """The content of the YAML file of this name in the folder of a module, given the module's `__file__`."""
    return yaml.safe_load(Path(module_file).with_name(name).read_text(encoding="utf-8"))


def models_beside(module_file: str, name: str, kind: type[ModelT]) -> dict[str, ModelT]:
    """The entries of such a file by their names, each as a model of one kind; raises pydantic's ValidationError."""
    return {key: kind.model_validate(entry) for key, entry in yaml_beside(module_file, name).items()}
