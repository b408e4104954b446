"""What every block of a study is."""

from pydantic import BaseModel, ConfigDict, Discriminator


class Settings(BaseModel):
    """What every block of a study is: immutable, and closed to keys that it does not know."""

    # No infinity and no NaN: the rules hand settings on as JSON, which has neither.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def told_apart_by(field: str, default: str) -> Discriminator:
    """Tells the members of a union apart by a field, which has a default in YAML too."""

    def kind(value: object) -> object:
        return value.get(field, default) if isinstance(value, dict) else getattr(value, field, None)

    return Discriminator(
        kind,
        custom_error_type="kind",
        custom_error_message="needs a block of another kind",  # config.messages says which there are
        custom_error_context={"field": field},
    )
