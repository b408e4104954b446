"""Mappings of settings, one over the other."""

from collections.abc import Iterable, Mapping
from typing import Any, get_args, get_origin

from tailrl.config.base import Kinds, Settings


def merged(configs: Iterable[Mapping[str, Any]], model: Any) -> dict[str, Any]:
    """One mapping of several; later ones override earlier ones, key by key.

    A block that names another kind than the block below it replaces it, since it has other keys.

    Args:
        configs: plain data.
        model: the type of these blocks, as an annotation has it; None where it is not known.
    """
    whole: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            before, after = whole.get(key), value
            inner = _type_under(model, key)
            if isinstance(before, Mapping) and isinstance(after, Mapping) and not _other_kind(inner, before, after):
                after = merged((before, after), inner)
            whole[key] = after
    return whole


def _type_under(model: Any, key: str) -> Any:
    """The type of what stands under a key of a block, or of a mapping of blocks, without its `| None`."""
    if get_origin(model) is dict:
        return get_args(model)[1]
    if not isinstance(model, type) or not issubclass(model, Settings) or key not in model.model_fields:
        return None
    annotation = model.model_fields[key].annotation
    options = [option for option in get_args(annotation) if option is not type(None)]
    return options[0] if type(None) in get_args(annotation) and len(options) == 1 else annotation


def _other_kind(model: Any, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a block names another kind than the block below it."""
    if not isinstance(model, type) or not issubclass(model, Kinds):
        return False
    # Two import paths are two kinds.
    return model.TOLD_BY in after and after[model.TOLD_BY] != before.get(model.TOLD_BY, model.USUAL)
