"""Plants in weights, ropes, windows and arithmetic, made by config.json, by the loader or by torch itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from explanation_fixture import load, make_policy, predicted, prompts_of, rescored, rows_of, sampled, with_config
from moe_fixture import mixture
from torch.overrides import TorchFunctionMode
from transformers import AutoTokenizer

from tailrl.explanation.catalogue import Choice, Entry, Hypothesis, catalogue
from tailrl.explanation.explanation import explain
from tailrl.explanation.scorer import Scorer
from tailrl.model.policy import save_policy
from tailrl.runtime.errors import StudyError

COUNT, TOKENS = 8, 24
slow = pytest.mark.slow
LONG = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.5] * 8,
    "original_max_position_embeddings": 256,
    "factor": 2.0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


def prompts(folder: Path) -> list[list[int]]:
    return prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), COUNT)


class Tf32(TorchFunctionMode):
    """Linear layers of inputs and weights with 10 bits of mantissa, by NumPy's frexp."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            args = (*(shortened(one) for one in args[:2]), *args[2:])
        return function(*args, **(kwargs or {}))


def shortened(numbers: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = np.frexp(numbers.detach().numpy().astype(np.float64))
    return torch.from_numpy(np.ldexp(np.round(mantissa * 2**11) / 2**11, exponent).astype(np.float32))


def configured(to: dict[str, Any], now: dict[str, Any] | None = None) -> Callable[[Path, Path], tuple[Path, Any]]:
    """The policy, with `now` in its config.json, and a sampler of the same weights whose config.json says `to`."""

    def made(folder: Path, tmp_path: Path) -> tuple[Path, Any]:
        right = with_config(folder, tmp_path / "right", **(now or {}))
        return right, load(with_config(right, tmp_path / "other", **to))

    return made


PLANTS = {
    "yarn": ("rope_type", "yarn_4", configured({"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}})),
    "llama3 ignored": ("rope_type", "default", configured(
        {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 32}})),
    "long factors": ("longrope", "long", configured(
        {"rope_parameters": LONG | {"short_factor": LONG["long_factor"]}}, {"rope_parameters": LONG})),
    "no window": ("window_missing", 0.0, configured(
        {"sliding_window": None},
        {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 8})),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_what_another_config_computes_is_what_the_hypothesis_says(name: str, folder: Path, tmp_path: Path) -> None:
    hypothesis, value, made = PLANTS[name]
    right, sampler = made(folder, tmp_path)
    asked = prompts(folder)[:3]
    responses, planted = sampled(sampler, asked, TOKENS)
    planted_T = np.concatenate(planted)
    assert np.abs(planted_T - predicted(right, asked, responses)).mean() > 0.01, "the plant does something"
    assert np.abs(planted_T - predicted(right, asked, responses, (hypothesis, value))).max() < 1e-3


@slow
@pytest.mark.parametrize("name", PLANTS)
def test_another_config_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    hypothesis, value, made = PLANTS[name]
    right, sampler = made(folder, tmp_path)
    asked = prompts(folder)
    responses, planted = sampled(sampler, asked, TOKENS)
    found = explain(rows_of(asked, responses, planted, rescored(load(right), asked, responses)), right, tokens=150)
    assert [(one.hypothesis.name, one.value) for one in found.own("sampler")] == [(hypothesis, value)]


def test_tf32_is_told_from_other_roundings_and_is_no_fault(folder: Path) -> None:
    asked = prompts(folder)
    with Tf32():
        responses, planted = sampled(load(folder), asked, TOKENS)
    planted_T = np.concatenate(planted)
    exact_T, tf32_T = predicted(folder, asked, responses), predicted(folder, asked, responses, ("tf32", "tf32"))
    # Sums in another order put some numbers on the other side of a tie, in each layer.
    assert np.abs(planted_T - tf32_T).mean() < 0.4 * np.abs(planted_T - exact_T).mean()
    found = explain(rows_of(asked, responses, planted, rescored(load(folder), asked, responses)), folder, tokens=150)
    assert found.code == 0 and [one.hypothesis.name for one in found.sampler.benign] == ["tf32"]


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts."""
    folder = make_policy(tmp_path_factory.mktemp("dense"))
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    to = tmp_path_factory.mktemp("mixture")
    save_policy(mixture(tokenizer), tokenizer, to)
    return to


def with_routers_in(model: Any, dtype: torch.dtype) -> Any:
    """Each router computes in this dtype, by a wrapper around its forward."""
    for layer in model.model.layers:
        gate = layer.mlp.gate.to(dtype)

        def forward(hidden: torch.Tensor, own: Any = gate.forward) -> Any:
            logits, weights, experts = own(hidden.to(dtype))
            return logits.float(), weights.float(), experts

        gate.forward = forward
    return model


def test_routers_of_another_dtype_compute_what_the_hypothesis_says(experts: Path) -> None:
    asked = prompts(experts)[:3]
    responses, planted = sampled(with_routers_in(load(experts), torch.bfloat16), asked, TOKENS)
    planted_T = np.concatenate(planted)
    assert np.abs(planted_T - predicted(experts, asked, responses)).mean() > 1e-3
    assert np.abs(planted_T - predicted(experts, asked, responses, ("router", "bfloat16"))).max() < 1e-3


def test_experts_of_a_log_cannot_be_replayed_and_that_is_said(experts: Path) -> None:
    asked = prompts(experts)[:6]
    responses, right = sampled(load(experts), asked, 6)
    close = [column_T + 1e-7 for column_T in right]
    untried = dict(explain(rows_of(asked, responses, right, close), experts).untried)
    assert "no format of logs" in untried["experts of the other side"] and "router" not in untried


def own_names() -> list[str]:
    return [one.name for one in catalogue() if one.entry.kind == "model" and not one.entry.needs]


@pytest.mark.parametrize("name", own_names())
def test_no_hypothesis_changes_the_weights_that_its_copy_shares(name: str, folder: Path) -> None:
    """A copy of all weights for each hypothesis took seconds and twice the memory."""
    scorer = Scorer(str(folder))
    before = {name: weight.clone() for name, weight in scorer.model.state_dict().items()}
    hypothesis = next(one for one in catalogue() if one.name == name)
    for value in hypothesis.entry.values:
        scorer.variant((Choice(hypothesis, value),))
    after = scorer.model.state_dict()
    assert all(torch.equal(weight, after[name]) for name, weight in before.items())


def test_a_hypothesis_of_a_user_that_changes_a_weight_in_place_is_refused(folder: Path) -> None:
    def halved(model: Any, value: float, context: Any) -> Any:  # noqa: ARG001
        next(model.parameters()).mul_(value)
        return model

    hypothesis = Hypothesis("halved", Entry(kind="model", words="half of a weight", look="here"), halved)
    with pytest.raises(StudyError, match=r"^halved: changes a weight in place"), torch.no_grad():
        Scorer(str(folder)).variant((Choice(hypothesis, 0.5),))


def test_a_copy_shares_the_weights_that_it_does_not_replace(folder: Path) -> None:
    scorer = Scorer(str(folder))
    rope = next(one for one in catalogue() if one.name == "rope_scale")
    changed = scorer.variant((Choice(rope, 2.0),))
    assert changed is not None and changed is not scorer.model
    assert [one.data_ptr() for one in changed.parameters()] == [one.data_ptr() for one in scorer.model.parameters()]
