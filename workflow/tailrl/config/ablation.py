"""The block of an ablation: it varies one field of base arms."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tailrl.config.base import LARGEST_RATIO, Settings

Real = Annotated[float, Field(le=LARGEST_RATIO)]  # the arm's own field may allow less
Whole = Annotated[int, Field(le=2**63 - 1)]  # likewise


class Ablation(Settings):
    """One or more base arms, one of their fields, and the values that it takes."""

    base: str | Annotated[tuple[str, ...], Field(min_length=1)] = Field(
        description="the base arm's name; a list: each of these arms with each value"
    )
    field: str = Field(description="dotted path of the field, such as vocabulary.rho")
    values: tuple[str | Real | Whole | bool | None, ...] = Field(min_length=1, description="the values it takes")
    contrast: tuple[str, str] | None = Field(
        None,
        description="two of the base arms: tests if the field changes the difference of their scores, first arm minus "
        "second, at each value against the first value",
    )
    margin: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="non-inferiority: how much lower a value's score may be than the base arm's (than the first "
        "value's, if the base arm's is not listed); 0.05 tests if the interval of the change lies above -5 points",
    )

    @model_validator(mode="after")
    def _contrasted(self) -> Self:
        if self.contrast is None:
            return self
        for arm in self.contrast:
            if arm not in self.bases:
                raise ValueError(f"contrast: {arm!r} is none of the base arms")
        if self.contrast[0] == self.contrast[1] or len(self.values) < 2:
            raise ValueError("contrast: needs two different base arms and two values")
        return self

    @property
    def bases(self) -> tuple[str, ...]:
        """The names of the base arms."""
        return (self.base,) if isinstance(self.base, str) else self.base
