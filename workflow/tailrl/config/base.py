"""The base class of every block of a study, and unions of blocks."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar, get_args, get_origin

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WithJsonSchema,
    WrapValidator,
    field_validator,
)
from pydantic_core import CoreSchema, core_schema

from tailrl.runtime.import_path import FORM, is_import_path

Value = TypeVar("Value")

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


Text = Annotated[str, Field(coerce_numbers_to_str=True)]
"""Text that YAML may take for a number: the name 1 of a part, a threshold of 1e-6."""

Seed = Annotated[int, Field(ge=0, le=LARGEST_SEED)]

Seeds = Annotated[tuple[Seed, ...], Field(min_length=1, max_length=MOST_SEEDS), AfterValidator(_no_seed_twice)]


def _kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows, at any depth, without those of a Literal's words."""
    inner = {Literal: (), Annotated: get_args(annotation)[:1]}.get(get_origin(annotation), get_args(annotation))
    return [annotation, *(kind for part in inner for kind in _kinds(part))]


IMPORTED = "module:function"
"""The kind of a block that names code of the user's own."""


class Settings(BaseModel):
    """A block of a study: immutable; refuses unknown keys."""

    # Rules pass settings on as JSON, which has no infinity and no NaN.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

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


def _plain(options: dict[str, Any]) -> dict[str, Any]:
    try:
        json.dumps(options, allow_nan=False, ensure_ascii=False).encode()
    except (TypeError, ValueError):
        raise ValueError("needs plain data: numbers, text, true, false, null, lists and blocks of these") from None
    return options


Options = Annotated[dict[str, Any], BeforeValidator(_plain)]
"""Settings of a user's own code, which travel as JSON."""


class Kinds(Settings):
    """A block that has one form for each kind: its subclasses, told apart by the word, or import path, of one field.

    A field of this type takes any of them, and so does `model_validate`. `Vocabulary(rule="top_k", k=5)` is a `TopK`.
    """

    TOLD_BY: ClassVar[str]
    """The field that names the kind: a Literal of one word, or the text of an import path."""
    USUAL: ClassVar[str]
    """The kind of a block that names none."""
    WHOLE_BEFORE: ClassVar[bool] = False
    """Whether earlier versions recorded the fields of all kinds: then a default of another kind's field is left out."""

    def __new__(cls, /, **settings: Any) -> Self:
        return super().__new__(cls.kind_of(settings) or cls)

    def _setting(self, name: str, otherwise: Value) -> Value:
        """A setting that only some forms have; this value where the form has none."""
        found: Value = getattr(self, name, otherwise)
        return found

    @classmethod
    def kinds(cls) -> dict[str, type[Self]]:
        """The forms by their words; one by import path is `IMPORTED`. A form itself has itself alone."""
        if of_these := cls.__subclasses__():
            forms = {word: form for kind in of_these for word, form in kind.kinds().items()}
            return dict(sorted(forms.items(), key=lambda form: form[0] == IMPORTED))
        words = get_args(cls.model_fields[cls.TOLD_BY].annotation)
        return {words[0] if words else IMPORTED: cls}

    @classmethod
    def whole(cls) -> type["Kinds"]:
        """The type of all the forms, of which this is one."""
        return next(above for above in cls.__mro__ if Kinds in above.__bases__)

    @classmethod
    def word_of(cls, block: object) -> object:
        """The kind that plain settings, or a block, name."""
        word = block.get(cls.TOLD_BY, cls.USUAL) if isinstance(block, Mapping) else getattr(block, cls.TOLD_BY, None)
        return IMPORTED if is_import_path(word) else word

    @classmethod
    def kind_of(cls, block: object) -> type[Self] | None:
        """The form that plain settings, or a block, name; None where there is none."""
        word = cls.word_of(block)
        return cls.kinds().get(word) if isinstance(word, str) else None

    @classmethod
    def _of_one_kind(cls, block: Any) -> Any:
        """Plain settings of one form; raises ValueError for a setting that another form alone has."""
        form = cls.kind_of(block)
        if form is None or not isinstance(block, Mapping):
            return block
        fitting = dict(block)
        for name in [name for name in block if name not in form.model_fields]:
            defaults = [
                other.model_fields[name].get_default(call_default_factory=True)
                for other in cls.kinds().values()
                if name in other.model_fields
            ]
            # Python takes true for 1.
            usual = any(type(block[name]) is type(default) and block[name] == default for default in (None, *defaults))
            if defaults and not (cls.WHOLE_BEFORE and usual):
                raise ValueError(f"{cls.TOLD_BY}: {block.get(cls.TOLD_BY, cls.USUAL)} does not use {name}")
            if defaults:
                del fitting[name]
        return fitting

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        if not cls.__subclasses__():
            return handler(source)
        forms = {word: handler.generate_schema(form) for word, form in cls.kinds().items()}
        # `config.messages` lists the kinds there are.
        context: dict[str, str | int | float] = {"field": cls.TOLD_BY}
        union = core_schema.tagged_union_schema(
            forms,
            cls.word_of,
            custom_error_type="kind",
            custom_error_message="another kind",
            custom_error_context=context,
        )
        return core_schema.no_info_before_validator_function(cls._of_one_kind, union)

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        # Those above take the new form too.
        for above in cls.__mro__[1:]:
            if issubclass(above, Kinds) and above is not Kinds:
                above.model_rebuild(force=True)
