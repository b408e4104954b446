"""What the plan counts, against the same counted on real modules: parameters, operations, kept activations, tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks_fixture import on_ranks
from shaped import config_of, shaped_policy
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.config.policy import PretrainedPolicy, ScratchPolicy
from tailrl.config.training import Training
from tailrl.kernels.packing import Batch, micro_batches, pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.planning.machine import Machine
from tailrl.planning.memory import activations, update_moments
from tailrl.planning.shapes import KNOWN, Shape, shape_of
from tailrl.planning.times import update_phase
from tailrl.planning.work import Work, work_of
from tailrl.runtime.errors import StudyError
from tailrl.training.placement import as_forward, place

SHAPES = [
    Shape(64, 2, 2, 2, 32, 192, 512, tied=True),
    Shape(96, 3, 4, 2, 32, 160, 300, tied=False),
    Shape(64, 2, 2, 2, 32, 96, 512, tied=True, normed=True, experts=8, chosen=2),
]


def run_of(**training: Any) -> Run:
    return parse_study({"name": "s", "arms": {"a": {}}, "training": training}).run("a")


def parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


# --- parameters --------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
def test_parameters_are_those_of_the_model(shape: Shape) -> None:
    assert shape.parameters == parameters(shaped_policy(shape, 64))


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


def test_a_mixture_has_as_many_in_all_and_for_a_token_as_its_authors_say() -> None:
    large = KNOWN["Qwen/Qwen3-30B-A3B"]
    assert round(large.parameters / 1e9, 1) == 30.5
    assert 3.3 < large.active / 1e9 < 3.4  # "3.3B"
    assert KNOWN["Qwen/Qwen3-8B"].active == KNOWN["Qwen/Qwen3-8B"].parameters


def test_many_tokens_read_every_expert_and_one_its_own() -> None:
    shape = SHAPES[2]
    assert shape.read(1) == shape.products
    assert shape.read(1000) == shape.entries(8)
    # Two tokens with 2 of 8 experts each: 28 pairs, of which the second shares 0, 1 or 2 with the first.
    distinct = (15 * 4 + 12 * 3 + 1 * 2) / 28
    assert shape.read(2) == shape.entries(distinct)


def test_the_sizes_of_a_policy(tmp_path: Path) -> None:
    scratch = ScratchPolicy(hidden_size=64, layers=3, heads=2, intermediate_size=96, vocabulary_size=512)
    assert shape_of(scratch) == Shape(64, 3, 2, 2, 32, 96, 512, tied=True)
    mixture = ScratchPolicy(experts=8, experts_per_token=3)
    assert shape_of(mixture) == Shape(128, 4, 4, 4, 32, 384, 2048, tied=True, normed=True, experts=8, chosen=3)
    config_of(SHAPES[1]).save_pretrained(tmp_path)
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


def packed(lengths: list[int], budget: int) -> list[Batch]:
    """Micro-batches of responses of these lengths to four prompts of 20 tokens, three to each."""
    prompts = [(place,) * 20 for place in range(4) for _ in range(3)]
    return [
        pack_batch([prompts[i] for i in group], [[1] * lengths[i] for i in group])
        for group in micro_batches(prompts, lengths, budget)
    ]


def test_tokens_are_those_that_are_packed() -> None:
    work = Work(prompts=4, group=3, prompt=20, response=12, budget=10_000, longest=12)
    (batch,) = packed([12] * 12, work.budget)
    assert work.sampled == work.batch_sampled == len(batch.targets_T)
    assert work.row == work.batch == len(batch.tokens_P)
    assert work.attended == batch.packing.index_NL.numel()


@pytest.mark.parametrize("budget", [10, 60, 100, 151, 10_000])
def test_no_micro_batch_of_ragged_lengths_is_larger_and_the_largest_is_nearly_full(budget: int) -> None:
    lengths = [1, 23, 12, 8, 2, 20, 17, 11, 5, 16, 22, 7]
    work = Work(prompts=4, group=3, prompt=20, response=12, budget=budget, longest=23)
    assert sum(lengths) == work.sampled
    batches = packed(lengths, budget)
    largest = max(len(batch.tokens_P) for batch in batches)
    assert 0.85 * work.batch <= largest <= work.batch
    assert max(batch.packing.index_NL.numel() for batch in batches) <= 1.2 * work.attended


def test_a_step_is_spread_over_devices() -> None:
    training = Training(prompts=32, group_size=8, max_new_tokens=100)
    assert work_of(training, 20, None, 8) == Work(4, 8, 20, 100, training.token_budget, 100)
    ragged = work_of(training, 20, 30, 1)
    assert (ragged.response, ragged.longest, ragged.padded) == (30, 100, 79)
    assert work_of(training, 20, 300, 1).response == 100


# --- operations and activations ----------------------------------------------------------------------


def forward(model: PreTrainedModel, work: Work) -> torch.Tensor:
    prompts = [[place] * work.prompt for place in range(int(work.prompts)) for _ in range(work.group)]
    batch = pack_batch(prompts, [[1] * work.response for _ in prompts])
    return hidden_states(model, batch.tokens_P, batch.packing)


@pytest.mark.parametrize("shape", SHAPES)
def test_products_are_the_operations_of_a_layer(shape: Shape) -> None:
    work = Work(prompts=2, group=3, prompt=9, response=8, budget=10_000, longest=8)
    model = shaped_policy(shape, 64)
    if shape.experts:
        model.set_experts_implementation("eager")  # the counter does not know the grouped product
    with FlopCounterMode(display=False) as counter:
        forward(model, work).sum().backward()
    counted = sum(count for op, count in counter.get_flop_counts()["Global"].items() if "mm" in str(op))
    # The first layer's products send their gradient on to the embedding: three of each in every layer.
    assert counted == 6 * shape.layers * shape.products * work.row


def test_attention_has_two_products_forward_and_five_backward() -> None:
    """As torch counts its flash kernels, of which the causal mask leaves a half."""
    shape, work = SHAPES[0], Work(prompts=1, group=1, prompt=60, response=5, budget=10_000, longest=5)
    sizes = (1, shape.heads, work.prompt + work.response, shape.head)
    counted = sdpa_flop_count(sizes, sizes, sizes), sdpa_backward_flop_count(sizes, sizes, sizes, sizes)
    products = 6 * shape.layers * shape.products * work.row + 8 * shape.embedding * work.sampled
    bare, run = Machine(gpu=False, matmul=1.0, train_share=1.0, passes=0.0), run_of()
    assert update_phase(shape, run, work, bare, 1).seconds - products == shape.layers * sum(counted) / 2


LONG = Work(prompts=1, group=1, prompt=64, response=8128, budget=16_384, longest=8128)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("work", [Work(prompts=3, group=4, prompt=11, response=9, budget=10_000, longest=9), LONG])
def test_activations_are_those_that_autograd_keeps(shape: Shape, work: Work) -> None:
    """Storages that are saved for the backward pass and are no weights, each once."""
    model = shaped_policy(shape, 64)
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in weights and tensor.dtype == torch.float32:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward(model, work)
    counted = sum(tensor.untyped_storage().nbytes() // 4 for tensor in kept.values())
    assert output.requires_grad
    assert counted == pytest.approx(activations(shape, work, False)[0], rel=0.02)


# --- FSDP2's buffers ---------------------------------------------------------------------------------


def allocated(shape: Shape) -> tuple[list[int], list[int]]:
    """Bytes of every buffer that a forward and backward in bfloat16 gather into, and that they reduce in and into."""
    taken: dict[type, list[int]] = {DefaultAllGather: [], DefaultReduceScatter: []}
    for kind, sizes in taken.items():

        def allocate(_: object, size: list[int], *, sizes: list[int] = sizes, **how: Any) -> torch.Tensor:
            buffer = torch.empty(*size, **how)
            sizes.append(buffer.nbytes)
            return buffer

        kind.allocate = allocate  # in a process of its own
    model = shaped_policy(shape, 64)
    place(model, Training(dtype="bfloat16"))
    batch = pack_batch([[1, 2, 3]], [[4, 5, 6]])
    whole = as_forward(model, lambda: hidden_states(model, batch.tokens_P, batch.packing) @ head_weight(model).T)
    whole.sum().backward()
    return taken[DefaultAllGather], taken[DefaultReduceScatter]


@pytest.mark.parametrize(("shape", "devices"), [(SHAPES[0], 1), (SHAPES[1], 2)])
def test_buffers_are_those_that_sharding_allocates(shape: Shape, devices: int, tmp_path: Path) -> None:
    (gathered, reduced), *_ = on_ranks(devices, tmp_path, allocated, shape)
    run = run_of(dtype="bfloat16")
    _, layer, root = update_moments(shape, run, Work(1, 1, 3, 3, 100, 3), Machine(), devices)
    head = 2 * shape.embedding
    divided = {1: 4, 2: 0}[devices]  # a rank alone divides in a tensor of its own
    assert root["gradients at work"] == 2 * head + sum(reduced[-2:]) + divided * shape.root
    assert layer["gradients at work"] == head + 2 * shape.layer + sum(reduced[:2]) + divided * shape.layer
    if devices > 1:
        assert set(gathered) == {2 * shape.layer, 2 * shape.root}
        assert layer["weights at work"] == 2 * sum(set(gathered)), "each into a buffer, and from there into weights"
    else:
        assert not gathered
        assert layer["weights at work"] == 2 * (shape.layer + shape.root)
