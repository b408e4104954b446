"""The base class of every block of a study, and unions of blocks."""

from pydantic import BaseModel, ConfigDict, Discriminator

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]*$"
"""Names of studies, arms, ablations and compared engines, which are parts of files' names."""


class Settings(BaseModel):
    """A block of a study: immutable; refuses unknown keys."""

    # Rules pass settings on as JSON, which has no infinity and no NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def told_apart_by(field: str, default: str) -> Discriminator:
    """Chooses the member of a union of tagged blocks by a field that names the tag."""

    def kind(value: object) -> object:
        return value.get(field, default) if isinstance(value, dict) else getattr(value, field, None)

    # `config.messages` lists the kinds there are.
    return Discriminator(
        kind, custom_error_type="kind", custom_error_message="another kind", custom_error_context={"field": field}
    )
