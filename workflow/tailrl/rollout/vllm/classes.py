"""Classes of transformers' models stay the trainer's while vLLM serves the same family.

vLLM's Transformers backend runs transformers' own model for families that vLLM has no code for. It decorates the class
of this model in place, for torch.compile: another `__init__`, another `__call__` and one more base class. The trainer's
model is of the same class, and would lack the attributes that they need. So the class is put back once the engine has
started, and the engine's own modules get a subclass with vLLM's changes.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def classes_put_back(model: nn.Module) -> Iterator[dict[type[nn.Module], type[nn.Module]]]:
    """Undo what the block changes in the classes of a model's modules, also where the block fails.

    Args:
        model: of the family that vLLM is to serve, made beforehand.

    Yields:
        Empty at first. After the block: for each class that got other bases, a subclass with all that was changed.
    """
    kinds = {type(module) for module in model.modules()}
    before = {kind: (kind.__bases__, dict(vars(kind))) for kind in kinds}
    changed: dict[type[nn.Module], type[nn.Module]] = {}
    try:
        yield changed
    finally:
        for kind, (bases, attributes) in before.items():
            if kind.__bases__ == bases:
                continue
            added = tuple(base for base in kind.__bases__ if base not in bases)
            differing = {name: value for name, value in vars(kind).items() if attributes.get(name) is not value}
            kind.__bases__ = bases
            for name in differing:
                if name in attributes:
                    setattr(kind, name, attributes[name])
                else:
                    delattr(kind, name)
            changed[kind] = type(kind.__name__, (kind, *added), differing | {"__module__": kind.__module__})


def give_classes(model: nn.Module, changed: dict[type[nn.Module], type[nn.Module]]) -> None:
    """Make the engine's modules of changed classes members of the subclasses that `classes_put_back` made."""
    for module in model.modules():
        if type(module) in changed:
            module.__class__ = changed[type(module)]
