"""The catalogue of hypotheses: found by name, each a function and its settings in `catalogue.yaml`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any, Literal

from tailrl.artifacts.files import Record
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError
from tailrl.runtime.import_path import is_import_path, named

Kind = Literal["inputs", "model", "logits", "record"]
KINDS: tuple[Kind, ...] = ("inputs", "model", "logits", "record")
MODULES = {"inputs": "inputs", "model": "models", "logits": "logits", "record": "record"}

Value = float | str
# What the parts of a number format's name mean.
PARTS = {
    "logits": ", logits too",
    "sum": " (the log-sum-exp of float32 logits)",
    "weights": " (weights alone)",
    "stored": " (weights with the scales of compressed-tensors)",
}


class Entry(Record):
    """An entry of `catalogue.yaml`: a hypothesis and what is said of it.

    Attributes:
        kind: what it changes: the inputs, the model, the logits or the record. Changes are made in this order.
        function: its name in the kind's module; None: the entry's own name.
        values: what is tried for its number.
        fit: how the number is fitted between them; None: not at all.
        words: how it is said, with {value}.
        look: where to look.
        benign: whether it is no fault: what rounding in 16 bits gives.
        coarse: whether it is a number format so coarse that its own noise, which none repeats, hides its prediction.
        needs: what must be given to try it, if anything: an option.
        reads: "text" or "template": of the tokenizer, which a model's folder may lack; "experts": of the model.
        each: whether there is one for each of some tokens: the function gets the token's id, and gives the transform.
        order: its place among changes of its kind.
        joint: whether it is a setting of samplers that is often set with others.
    """

    kind: Kind
    function: str | None = None
    values: tuple[Value, ...] = (0.0,)
    fit: Literal["real", "whole"] | None = None
    words: str
    look: str
    benign: bool = False
    coarse: bool = False
    needs: str | None = None
    reads: Literal["text", "template", "experts"] | None = None
    each: Literal["token"] | None = None
    order: int = 0
    joint: bool = False

    @property
    def needs_forward(self) -> bool:
        """Whether the model must run once more to try it."""
        return self.kind in ("inputs", "model")


@dataclass(frozen=True)
class Hypothesis:
    """A hypothesis that can be computed. A user's own is one too, found by its import path.

    Attributes:
        name: it is known by this name.
        entry: what is said of it.
        apply: see the modules `inputs`, `models`, `logits` and `record` for the arguments of each kind.
    """

    name: str
    entry: Entry = field(compare=False)
    apply: Callable[..., Any] = field(compare=False)


@dataclass(frozen=True)
class Choice:
    """A hypothesis with a number."""

    hypothesis: Hypothesis
    value: Value

    @property
    def words(self) -> str:
        return self.hypothesis.entry.words.format(value=shown(self.value))


def shown(value: Value) -> str:
    """A number with four digits; of a format its name in words."""
    if isinstance(value, float):
        return f"{value:.4g}"
    kind, *rest = value.split("_")
    if not all(part.isdigit() or part in PARTS for part in rest):
        return value
    number = "in groups of" if kind == "int4" else "with a factor of"
    return kind + "".join(f" {number} {part}" if part.isdigit() else PARTS[part] for part in rest)


@cache
def catalogue() -> tuple[Hypothesis, ...]:
    """The hypotheses that come with the package, in the order of the file."""
    found = []
    for name, given in yaml_beside(__file__, "catalogue.yaml").items():
        entry = Entry.model_validate(given, strict=False)
        module = import_module(f"tailrl.explanation.{MODULES[entry.kind]}")
        found.append(Hypothesis(name, entry, getattr(module, entry.function or name)))
    return tuple(found)


def imported(paths: Sequence[str]) -> tuple[Hypothesis, ...]:
    """A user's own hypotheses, each by `package.module:name`; raises StudyError where there is none."""
    found = []
    for path in paths:
        if not is_import_path(path):
            raise ConfigurationError(f"--hypothesis {path}: write it as package.module:name")
        try:
            hypothesis = named(path)
        except ConfigurationError as error:
            raise ConfigurationError(f"--hypothesis {error}") from None
        if not isinstance(hypothesis, Hypothesis):
            raise ConfigurationError(f"--hypothesis {path}: is no tailrl.explanation.catalogue.Hypothesis")
        found.append(hypothesis)
    return tuple(found)
