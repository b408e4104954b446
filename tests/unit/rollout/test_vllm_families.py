"""Families of models under the real vLLM, in one process with the trainer, which is made before and after the engine.

`benchmarks/model_families.py` measures and publishes all of them; `make families` runs it.
"""

from pathlib import Path

import pytest
import torch
from families import PACKED, tiny_config, write_family
from model_families import ORDERS, handed_over, write_policy
from torch import nn
from transformers import AutoModelForCausalLM, Olmo2ForCausalLM

from tailrl.model.policy import checkpoint_weights, named_weights
from tailrl.rollout.vllm.classes import classes_put_back, give_classes
from tailrl.rollout.vllm.experts import plain_experts

pytestmark = pytest.mark.vllm


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("family", ["olmo2", "mixtral"])  # a class that vLLM decorates; experts
def test_a_family_is_handed_over_twice_and_scored(family: str, order: str, tmp_path: Path) -> None:
    """In float32 both sides agree; the second hand-over has other weights than the first."""
    scored = handed_over(write_policy(family, tmp_path / family), order)
    assert scored.tokens > 100 and scored.k3 < 1e-8 and scored.largest < 1e-3


# --- classes ---------------------------------------------------------------------------------------------


class Compiled:
    """What vLLM's decorator adds to the bases of a class."""


def decorate(kind: type[nn.Module]) -> None:
    """As vLLM does: another base, `__init__` and `__call__`, and a mark."""
    initialise = kind.__init__

    def initialised(self: nn.Module, *arguments: object, **named: object) -> None:
        initialise(self, *arguments, **named)
        self.do_not_compile = True

    kind.__bases__ = (*kind.__bases__, Compiled)
    kind.__init__ = initialised  # type: ignore[method-assign]
    kind.__call__ = lambda self, *arguments, **named: (self.do_not_compile, self.forward(*arguments, **named))
    kind.mark = 3


@pytest.mark.parametrize("fails", [False, True])
def test_a_class_is_put_back_and_the_engines_module_keeps_its_changes(fails: bool) -> None:
    before = AutoModelForCausalLM.from_config(tiny_config("olmo2"))
    kind, tokens = type(before.model), torch.arange(5)[None]
    expected, bases, attributes = before(tokens).logits, kind.__bases__, dict(vars(kind))
    try:
        with classes_put_back(before) as changed:
            decorate(kind)
            engine = kind(before.config)
            if fails:
                raise ValueError("no engine")
    except ValueError:
        assert fails
    assert kind.__bases__ == bases and dict(vars(kind)) == attributes
    torch.testing.assert_close(before(tokens).logits, expected, rtol=0, atol=0)
    after = Olmo2ForCausalLM(before.config)
    assert not hasattr(after.model, "do_not_compile") and after(tokens).logits.shape == expected.shape
    give_classes(engine, changed)
    assert type(engine).__name__ == kind.__name__ and isinstance(engine, Compiled) and isinstance(engine, kind)
    compiled, output = engine(tokens)
    assert compiled and engine.mark == 3 and output.last_hidden_state.shape[-1] == before.config.hidden_size


def test_other_classes_stay_as_they_are() -> None:
    with classes_put_back(nn.Linear(2, 2)) as changed:
        nn.Linear.extra = 1
    assert changed == {} and nn.Linear.extra == 1
    del nn.Linear.extra


# --- weights ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", PACKED)
def test_an_engine_gets_what_a_checkpoint_holds(family: str, tmp_path: Path) -> None:
    """transformers' own files are the oracle: the same names, shapes and numbers, a layer at a time."""
    from safetensors.torch import load_file

    model = AutoModelForCausalLM.from_pretrained(write_family(family, tmp_path))
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(model.config)
    saved, handed = load_file(tmp_path / "model.safetensors"), dict(checkpoint_weights(skeleton, named_weights(model)))
    tied = handed.keys() - saved.keys()  # a file has a tied head once
    assert saved.keys() <= handed.keys() and all(name.endswith(("lm_head.weight", "embed_out.weight")) for name in tied)
    assert all(torch.equal(saved[name], handed[name]) for name in saved)


@pytest.mark.parametrize(
    ("family", "layers"), [("mixtral", 2), ("phimoe", 2), ("qwen3_moe", 2), ("olmoe", 2), ("dots1", 1), ("llama", 0)]
)
def test_experts_are_known_by_their_structure(family: str, layers: int) -> None:
    with torch.device("meta"):
        assert len(plain_experts(AutoModelForCausalLM.from_config(tiny_config(family)))) == layers
