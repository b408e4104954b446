"""What the trained policy computes in and keeps: bfloat16 over float32 weights, and layers that are computed twice."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ranks_fixture import on_ranks
from step_fixture import DVP, make_rollouts, run_of, samples_of
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from transformers import PreTrainedModel

from tailrl.config.jobs import Run
from tailrl.model.policy import named_weights
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.training import scorer
from tailrl.training.optimizer import make_optimizer, optimizer_step
from tailrl.training.placement import is_sharded, place
from tailrl.training.samples import Sample
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

ARM = {"vocabulary": DVP}
"""All seven responses in one micro-batch, or in five."""
ONE, FIVE = run_of(ARM, token_budget=10_000), run_of(ARM)


def gradients_of(model: PreTrainedModel, run: Run) -> tuple[float, dict[str, Tensor]]:
    """The loss, and every parameter's gradient, whole."""
    loss, _ = accumulate_gradients(model, samples_of(*make_rollouts(), run), make_scorer(run), Stopwatch())
    return loss, {name: distributed.whole(p.grad).clone() for name, p in model.named_parameters() if p.grad is not None}


# --- dtype -----------------------------------------------------------------------------------------------


def half(run: Run) -> Run:
    return run.model_copy(update={"training": run.training.model_copy(update={"dtype": "bfloat16"})})


def placed(model: PreTrainedModel, run: Run) -> dict[str, Any]:
    """The gradient of the model where it is trained, and what the weights are before and after an update."""
    place(model, run.training)
    optimizer = make_optimizer(model, run.training)
    before = {name: weight.clone() for name, weight in named_weights(model)}
    loss, gradients = gradients_of(model, run)
    optimizer_step(model, optimizer, 1.0)
    state = optimizer.state_dict()["state"][0]
    return {
        "sharded": is_sharded(model),
        "loss": loss,
        "gradients": gradients,
        "before": before,
        "after": dict(named_weights(model)),
        "state": {name: distributed.whole(tensor) for name, tensor in state.items()},
    }


def test_bfloat16_is_the_gradient_at_rounded_weights_on_exact_ones(model: PreTrainedModel, tmp_path: Path) -> None:
    """Of one micro-batch to the bit: the oracle is the model with its parameters cast, which nothing shards."""
    (found,) = on_ranks(1, tmp_path, placed, copy.deepcopy(model), half(ONE))
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.bfloat16()
    loss, gradients = gradients_of(rounded, ONE)
    assert found["loss"] == loss and found["sharded"]
    assert found["gradients"].keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == torch.bfloat16 and found["gradients"][name].dtype == torch.float32
        assert torch.equal(found["gradients"][name], gradient.float()), name
    for name, weight in named_weights(model):
        assert torch.equal(found["before"][name], weight), name
        moved = found["after"][name] - weight
        assert moved.dtype == torch.float32 and 0 < moved.abs().max() < 2e-3, name
        assert not torch.equal(found["after"][name], found["after"][name].bfloat16().float()), name
    assert {tensor.dtype for tensor in found["state"].values()} == {torch.float32}


def test_micro_batches_and_ranks_add_up_in_float32(model: PreTrainedModel, tmp_path: Path) -> None:
    """Five micro-batches on two ranks and on one: sums of the same bfloat16 gradients."""
    expected, *others = [
        result for count in (1, 2) for result in on_ranks(count, tmp_path, placed, copy.deepcopy(model), half(FIVE))
    ]
    assert len(others) == 2
    for found in others:
        assert found["loss"] == expected["loss"]
        for name, gradient in expected["gradients"].items():
            scale = gradient.abs().max().item()
            torch.testing.assert_close(found["gradients"][name], gradient, rtol=0, atol=1e-6 * scale)


# --- activation checkpointing ----------------------------------------------------------------------------


def test_recomputed_activations_are_the_same_and_not_stored(model: PreTrainedModel) -> None:
    kept, results = [], []
    for again in (False, True):
        run, own = run_of(ARM, activation_checkpointing=again), copy.deepcopy(model)
        place(own, run.training)
        sizes: list[int] = []

        def pack(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            results.append(gradients_of(own, run))
        kept.append(sum(sizes))
        assert not is_sharded(own)
    assert results[0][0] == results[1][0]
    for name, gradient in results[0][1].items():
        assert torch.equal(results[1][1][name], gradient), name
    assert kept[1] < kept[0] / 2


# --- what cannot be placed -------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [{"dtype": "bfloat16"}, {"activation_checkpointing": True}])
def test_a_model_without_named_layers_stays_whole(model: PreTrainedModel, training: dict[str, Any]) -> None:
    model._no_split_modules = None
    place(model, run_of({}).training)
    assert not is_sharded(model)
    with pytest.raises(
        StudyError, match=r"^LlamaForCausalLM does not name its layers: it can be trained by one process"
    ):
        place(model, run_of({}, **training).training)


# --- what FSDP sees of a forward ----------------------------------------------------------------------------


def with_logits(sample: Sample, vocabulary: int) -> Sample:
    """With the sampler's logits of each token, as centering needs them."""
    logits = tuple(np.zeros(vocabulary, np.float32) for _ in sample.rollout.tokens)
    return replace(sample, rollout=replace(sample.rollout, logits_sampler_KV=logits))


@pytest.mark.parametrize("centering", ["none", "full"])
def test_fsdp_gets_the_tensors_themselves(
    model: PreTrainedModel, centering: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Older versions of it look into no dataclass."""
    seen: list[tuple[Any, ...]] = []

    def as_forward(_: object, function: Callable[[], tuple[Any, ...]]) -> tuple[Any, ...]:
        seen.append(function())
        return seen[-1]

    run = run_of({"correction": {"centering": centering}})
    samples = samples_of(*make_rollouts(), run)
    if centering == "full":
        vocabulary = model.config.vocab_size
        samples = [with_logits(sample, vocabulary) for sample in samples]
    monkeypatch.setattr(scorer, "as_forward", as_forward)
    scored = make_scorer(run)(model, samples)
    logprobs, centre_T = scored.logprobs, scored.expected_T
    (given,) = seen
    assert all(isinstance(part, torch.Tensor) for part in given[:-1]) and given[0] is logprobs.logp_T
    assert given[-1] is centre_T and (centre_T is None) == (centering == "none")
