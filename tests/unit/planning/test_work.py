"""What the plan counts, against the same counted on real modules: parameters, operations, kept activations, tokens."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tailrl.config.policy import PretrainedPolicy, ScratchPolicy
from tailrl.config.training import Training
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.model.forward import PACKED_ATTENTION, hidden_states
from tailrl.planning.memory import activations
from tailrl.planning.shapes import KNOWN, Shape, shape_of
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import StudyError

SHAPES = [
    Shape(64, 2, 2, 2, 32, 192, 512, tied=True),
    Shape(96, 3, 4, 2, 32, 160, 300, tied=False),
]


def llama(shape: Shape) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.vocabulary,
            hidden_size=shape.hidden,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head,
            tie_word_embeddings=shape.tied,
            max_position_embeddings=64,
            pad_token_id=None,
            attn_implementation=PACKED_ATTENTION,
        )
    )


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model(shape: Shape) -> None:
    assert shape.parameters == parameters(llama(shape))


def test_a_known_name_has_the_parameters_of_its_model() -> None:
    config = Qwen3Config(
        vocab_size=151_936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    assert KNOWN["Qwen/Qwen3-0.6B"].parameters == parameters(model)


@pytest.mark.parametrize(("name", "billions"), [("0.6B", 0.6), ("1.7B", 1.7), ("4B", 4.0), ("8B", 8.2), ("14B", 14.8)])
def test_known_names_have_as_many_as_their_authors_say(name: str, billions: float) -> None:
    assert round(KNOWN[f"Qwen/Qwen3-{name}"].parameters / 1e9, 1) == billions


def test_the_sizes_of_a_policy(tmp_path: Path) -> None:
    scratch = ScratchPolicy(hidden_size=64, layers=3, heads=2, intermediate_size=96, vocabulary_size=512)
    assert shape_of(scratch) == Shape(64, 3, 2, 2, 32, 96, 512, tied=True)
    llama(SHAPES[1]).config.save_pretrained(tmp_path)
    assert shape_of(PretrainedPolicy(source="pretrained", path=str(tmp_path))) == SHAPES[1]
    base = PretrainedPolicy(source="pretrained", path="Qwen/Qwen3-14B-Base")
    assert shape_of(base) is KNOWN["Qwen/Qwen3-14B"]


def test_sizes_that_are_not_to_be_had(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"policy\.path: the sizes of owner/model are not known"):
        shape_of(PretrainedPolicy(source="pretrained", path="owner/model"))
    for content in ("{", "[]", json.dumps({"hidden_size": 64})):
        (tmp_path / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(StudyError, match=r"config\.json: no sizes of a decoder"):
            shape_of(PretrainedPolicy(source="pretrained", path=str(tmp_path)))


# --- tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [10, 60, 100, 151, 10_000])
def test_tokens_are_those_that_are_packed(budget: int) -> None:
    work = Work(prompts=4, group=3, prompt=20, response=12, budget=budget)
    prompts = [(place,) * 20 for place in range(4) for _ in range(3)]
    batches = [
        pack_batch([prompts[i] for i in group], [[1] * 12 for _ in group])
        for group in micro_batches(prompts, [12] * 12, budget + 3)
    ]
    assert work.sampled == sum(len(batch.targets_T) for batch in batches)
    if budget == 10_000:
        (batch,) = batches
        assert work.row == work.batch == len(batch.tokens_P)
        assert work.batch_padded == batch.packing.index_NL.numel()
    else:
        assert work.batch <= max(budget, 31)


def test_a_step_is_spread_over_devices() -> None:
    training = Training(prompts=32, group_size=8, max_new_tokens=100)
    assert work_of(training, 20, None, 8) == Work(4, 8, 20, 100, training.token_budget)
    assert work_of(training, 20, 30, 1).response == 30
    assert work_of(training, 20, 300, 1).response == 100


# --- operations and activations ----------------------------------------------------------------------


def forward(model: LlamaForCausalLM, work: Work) -> torch.Tensor:
    prompts = [[place] * work.prompt for place in range(int(work.prompts)) for _ in range(work.group)]
    batch = pack_batch(prompts, [[1] * work.response for _ in prompts])
    return hidden_states(model, batch.tokens_P, batch.packing)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_the_operations_of_a_layer(shape: Shape) -> None:
    work = Work(prompts=2, group=3, prompt=9, response=8, budget=10_000)
    with FlopCounterMode(display=False) as counter:
        forward(llama(shape), work).sum().backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # The first layer's products send their gradient on to the embedding: three of each in every layer.
    assert counted == 6 * shape.layers * shape.products * work.row


@pytest.mark.parametrize("shape", SHAPES)
def test_activations_are_those_that_autograd_keeps(shape: Shape) -> None:
    """Storages that are saved for the backward pass and are no weights, each once; the formula has a layer more."""
    work = Work(prompts=3, group=4, prompt=11, response=9, budget=10_000)
    model = llama(shape)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.dtype == torch.float32:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(model, work)
    counted = sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept.values())
    layer = activations(replace(shape, layers=1), work, False) - activations(replace(shape, layers=0), work, False)
    assert output.requires_grad
    assert counted == pytest.approx(activations(shape, work, False) - layer, rel=0.02)
