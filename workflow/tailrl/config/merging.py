"""Mappings of settings, one over the other."""

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import Discriminator
from pydantic.fields import FieldInfo

from tailrl.config.base import Settings


def merged(configs: Iterable[Mapping[str, Any]], model: type[Settings] | None) -> dict[str, Any]:
    """One mapping of several; later ones override earlier ones, key by key.

    A block that names another kind than the block below it replaces it, since it has other keys.

    Args:
        configs: plain data.
        model: the type of the blocks, which says where blocks of several kinds stand; None where they have none alone.
    """
    whole: dict[str, Any] = {}
    for config in configs:
        for key, value in config.items():
            before, after = whole.get(key), value
            field = model.model_fields.get(key) if model else None
            if isinstance(before, Mapping) and isinstance(after, Mapping) and not _other_kind(field, before, after):
                kind = field.annotation if field else None
                block = kind if isinstance(kind, type) and issubclass(kind, Settings) else None
                after = merged((before, after), block)
            whole[key] = after
    return whole


def _other_kind(field: FieldInfo | None, before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether a block names another kind than the block below it; kinds are those of a union of tagged blocks."""
    for part in field.metadata if field else ():
        if isinstance(part, Discriminator) and part.custom_error_context:
            key = str(part.custom_error_context["field"])
            kind = before.get(key, part.custom_error_context["default"])
            return bool(after.get(key, kind) != kind)
    return False
