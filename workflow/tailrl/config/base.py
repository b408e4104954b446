"""The base class of every block of a study, and unions of blocks."""

import itertools
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
    model_validator,
)

from tailrl.runtime.import_path import FORM, is_import_path

LONGEST_NAME = 100
"""Characters. A study's and an arm's name together, with the date and a digest, are one name of a folder of W&B's."""

NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}$"
"""Names of studies, arms, ablations and compared engines, which are parts of files' names."""

STUDY_NAME = r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,99}(/[A-Za-z0-9][A-Za-z0-9_.+-]{0,99})?$"
"""The name of a study, or of one of its parts: <study>/<part>, as its folder of results is."""

NAME_RULE = f"at most {LONGEST_NAME} letters, digits, _ . + -"


# The largest numbers of a study. A larger one is a slip of the pen: it would fail hours later, or never end.
LARGEST_SEED = 2**32 - 1  # NumPy's generators of one number take 32 bits
MOST_SEEDS = 1000  # of one arm: each is a training run
MOST_STEPS = 10_000_000  # a year, at three seconds a step
MOST_RESPONSES = 1_000_000  # of a step or of an evaluation's problem: the largest runs have ten thousand
MOST_TOKENS = 100_000_000  # of a sequence or a micro-batch: no context holds more than ten million
MOST_PROBLEMS = 10_000_000  # of a task: the rows that a data set may have
MOST_UNITS = 1_000_000  # of a layer, a vocabulary or a machine: ten times the widest
HOTTEST = 1000.0  # temperature: logits differ by less, and are sampled evenly
LARGEST_RATE = 100.0  # of an optimizer, of a decay or a penalty: any update would destroy the policy
LARGEST_RATIO = 1e30  # of probabilities and of norms: float32 ends at 3e38
MOST_NATS = 1000.0  # exp(-1000) is 0 in float64


def _no_seed_twice(seeds: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(seeds)) != len(seeds):
        raise ValueError(f"the same seed is given twice: {list(seeds)}")
    return seeds


Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]

Seeds = Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MOST_SEEDS), AfterValidator(_no_seed_twice)]


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows, at any depth, without those of a Literal's words."""
    inner = {Literal: (), Annotated: get_args(annotation)[:1]}.get(get_origin(annotation), get_args(annotation))
    return [annotation, *(kind for part in inner for kind in _kinds(part))]


IMPORTED = "module:function"


class Settings(BaseModel):
    """A block of a study: immutable; refuses unknown keys."""

    # Rules pass settings on as JSON, which has no infinity and no NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    READS: ClassVar[Mapping[str, Mapping[str, tuple[str, ...]]]] = {}
    """For a field that names a kind: the fields that each kind reads, of those that another kind does not. A value that
    the chosen kind never reads is refused, since it would have no effect. `IMPORTED` is the kind of an import path."""
    NEEDED: ClassVar[tuple[str, ...]] = ()
    """Fields without which a kind that reads them says too little."""

    @field_validator("*", mode="before")
    @classmethod
    def _no_truth_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        # Python, and pydantic with it, takes true for 1. A Literal's words are compared with it as they are.
        if any(isinstance(part, bool) for part in (value if isinstance(value, list | tuple) else (value,))):
            kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError("needs a number, not true or false")
        return value

    @field_validator("*")
    @classmethod
    def _writable(cls, value: Any) -> Any:
        # What is written must be readable by all that reads it: text is UTF-8, and a whole number has 64 bits.
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, str) and any("\ud800" <= letter <= "\udfff" for letter in part):
                raise ValueError("is not valid Unicode")
            if isinstance(part, str) and "\0" in part:  # no file's name and no argument of a process has one
                raise ValueError("holds a NUL character")
            if isinstance(part, int) and not -(2**63) <= part < 2**63:
                raise ValueError("needs a whole number of at most 64 bits")
        return value

    @classmethod
    def unread(cls, field: str, kind: str) -> tuple[str, ...]:
        """The fields that a kind of `READS` never reads."""
        every = dict.fromkeys(itertools.chain.from_iterable(cls.READS[field].values()))
        return tuple(name for name in every if name not in cls.reads(field, kind))

    @classmethod
    def reads(cls, field: str, kind: str) -> tuple[str, ...]:
        """The fields that a kind of `READS` reads, of those that another kind does not."""
        return cls.READS[field][IMPORTED if is_import_path(kind) else kind]

    @model_validator(mode="after")
    def _with_an_effect(self) -> Self:
        for field in self.READS:
            kind = getattr(self, field)
            for name in self.unread(field, kind):
                # Settings that a job was given, or recorded, have every field: a default says nothing there.
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"{field}: {kind} does not use {name}")
            for name in self.reads(field, kind):
                if name in self.NEEDED and getattr(self, name) is None:
                    raise ValueError(f"{field}: {kind} needs {name}")
        return self


def word_or_import_path(*words: str) -> Any:
    """The type of a setting that is one of these words, or the import path of a function of the user's own."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        if not isinstance(value, str) or ":" not in value:
            return handler(value)
        if not is_import_path(value):
            raise ValueError("must be one of its words, or an import path such as my_package.my_module:my_function")
        return value

    own = {"type": "string", "pattern": FORM}
    schema = WithJsonSchema({"anyOf": [{"type": "string", "enum": list(words)}, own]})
    return Annotated[Literal[words], WrapValidator(check), schema]


def told_apart_by(field: str, default: str) -> Discriminator:
    """Chooses the member of a union of tagged blocks by a field that names the tag."""

    def kind(value: object) -> object:
        name = value.get(field, default) if isinstance(value, dict) else getattr(value, field, None)
        return IMPORTED if is_import_path(name) else name

    # `config.messages` lists the kinds there are; `config.load` merges blocks of one kind alone.
    context: dict[str, str | int | float] = {"field": field, "default": default}
    return Discriminator(
        kind, custom_error_type="kind", custom_error_message="another kind", custom_error_context=context
    )
