"""A mixture's routers: as transformers' own, recorded, and told what to choose, against a plain model in float64."""

import copy
from pathlib import Path

import pytest
import torch
from moe_fixture import SETTINGS, FixedBlock, mixture
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.training import Training
from tailrl.kernels.packing import pack
from tailrl.model.forward import hidden_states
from tailrl.model.policy import create_policy, load_policy, save_policy
from tailrl.model.routing import Routing, open_routers, routed, routers
from tailrl.training.placement import place

LENGTHS = (7, 12)
P, E, K = sum(LENGTHS), 8, 2
TOKENS_P = torch.arange(P) * 31 % 600


def fixed(seed: int = 3) -> Tensor:
    """Experts that no router would choose: two different ones for each token and layer, at random."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(SETTINGS.layers, P, E, generator=generator).topk(K, -1).indices


def oracle(model: PreTrainedModel, routes_LPK: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """Hidden states and gradients in float64, a sequence at a time, with the library's attention and fixed experts."""
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager").double()
    plain.load_state_dict(model.state_dict())
    blocks = [layer.mlp for layer in plain.model.layers]
    hidden, start = [], 0
    for length in LENGTHS:
        for index, (layer, block) in enumerate(zip(plain.model.layers, blocks, strict=True)):
            layer.mlp = FixedBlock(block, routes_LPK[index], start)
        hidden.append(plain.model(TOKENS_P[None, start : start + length], use_cache=False).last_hidden_state[0])
        start += length
    for layer, block in zip(plain.model.layers, blocks, strict=True):
        layer.mlp = block
    hidden_PH = torch.cat(hidden)
    objective(hidden_PH).backward()
    return hidden_PH.detach(), gradients(plain)


def objective(hidden_PH: Tensor) -> Tensor:
    return (hidden_PH * torch.sin(torch.arange(hidden_PH.numel())).view_as(hidden_PH).to(hidden_PH.dtype)).sum()


def gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, oracle_gradient in theirs.items():
        size = oracle_gradient.abs().max().item()
        torch.testing.assert_close(ours[name].double(), oracle_gradient, rtol=1e-3, atol=2e-5 * size, msg=name)


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return mixture(tokenizer)


def test_a_mixture_is_made_as_its_settings_say(tokenizer: PreTrainedTokenizerFast) -> None:
    made = create_policy(SETTINGS, tokenizer, 0)
    assert routed(made.config) == (2, E, K)
    assert made.model.layers[0].mlp.experts.gate_up_proj.shape == (E, 2 * 32, 64)
    again = dict(create_policy(SETTINGS, tokenizer, 0).named_parameters())
    assert all(torch.equal(parameter, again[name]) for name, parameter in made.named_parameters())


def test_packed_rows_are_the_library_s_own_model(model: PreTrainedModel) -> None:
    plain = AutoModelForCausalLM.from_config(model.config, attn_implementation="eager", experts_implementation="eager")
    plain.load_state_dict(model.state_dict())
    routing = Routing()
    with torch.no_grad():
        row_PH = hidden_states(model, TOKENS_P, pack(LENGTHS), routing)
        alone = [plain.model(part[None], use_cache=False).last_hidden_state[0] for part in TOKENS_P.split(LENGTHS)]
    torch.testing.assert_close(row_PH, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert routing.choices().shape == (2, P, K)
    assert len(routing.choices().unique()) == E
    assert all(gate.routing is None for gate in routers(model).values())


def test_recorded_experts_are_those_of_the_largest_logits(model: PreTrainedModel) -> None:
    routing = Routing()
    with torch.no_grad():
        hidden_states(model, TOKENS_P, pack(LENGTHS), routing)
    for layer in range(2):
        for token in range(P):
            logits = routing.logits[layer][token].tolist()
            best = sorted(range(E), key=lambda expert: -logits[expert])[:K]
            assert routing.chosen[layer][token].tolist() == best


def test_fixed_experts_give_the_oracle_s_values_and_gradients(model: PreTrainedModel) -> None:
    """Router weights included: their gradient comes through the softmax over the fixed set."""
    routing = Routing(fixed())
    hidden_PH = hidden_states(model, TOKENS_P, pack(LENGTHS), routing)
    objective(hidden_PH).backward()
    expected_PH, theirs = oracle(model, fixed())
    torch.testing.assert_close(hidden_PH.double(), expected_PH, rtol=1e-4, atol=1e-4)
    close(gradients(model), theirs)
    assert all(theirs[f"model.layers.{layer}.mlp.gate.weight"].abs().max() > 0 for layer in range(2))
    # What the routers would have chosen is recorded, not what they were told.
    assert not torch.equal(routing.choices().sort(-1).values, fixed().sort(-1).values)


def test_a_wrong_set_is_seen(model: PreTrainedModel) -> None:
    """One token's experts in one layer changed: the oracle differs."""
    wrong_LPK = fixed()
    wrong_LPK[0, 3] = (wrong_LPK[0, 3] + 1) % E
    hidden_PH = hidden_states(model, TOKENS_P, pack(LENGTHS), Routing(wrong_LPK))
    objective(hidden_PH).backward()
    with pytest.raises(AssertionError):
        close(gradients(model), oracle(model, fixed())[1])


def test_layers_that_are_computed_again_have_the_same_experts(model: PreTrainedModel) -> None:
    again = copy.deepcopy(model)
    place(again, Training(activation_checkpointing=True))
    for each in (model, again):
        objective(hidden_states(each, TOKENS_P, pack(LENGTHS), Routing(fixed()))).backward()
    theirs = gradients(model)
    assert all(torch.equal(gradient, theirs[name]) for name, gradient in gradients(again).items())


def test_the_load_balancing_loss_is_that_of_switch(model: PreTrainedModel) -> None:
    routing = Routing()
    hidden_states(model, TOKENS_P, pack(LENGTHS), routing)
    expected = 0.0
    for layer in range(2):
        probs_PE = routing.logits[layer].detach().double().softmax(-1)
        count_E = [sum(expert in chosen for chosen in routing.chosen[layer].tolist()) / P for expert in range(E)]
        expected += E * sum(count_E[expert] * probs_PE[:, expert].mean().item() for expert in range(E)) / 2
    loss = routing.load_balancing(K)
    assert loss.item() == pytest.approx(expected, rel=1e-5)
    loss.backward()
    assert all(gate.weight.grad.abs().max() > 0 for gate in routers(model).values())


def test_balanced_experts_have_the_least_loss() -> None:
    """K, where every expert gets the same tokens with the same probability."""
    even, crowded = Routing(), Routing()
    even.logits = {0: torch.eye(E).repeat(4, 1)}
    crowded.logits = {0: torch.eye(E)[:1].repeat(32, 1)}
    assert even.load_balancing(1).item() == pytest.approx(1, rel=1e-5)
    assert crowded.load_balancing(1).item() > 1.5


def test_a_saved_mixture_comes_back(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_policy(model, tokenizer, tmp_path / "policy")
    loaded = load_policy(tmp_path / "policy")
    weights = loaded.state_dict()
    assert all(torch.equal(weight, weights[name]) for name, weight in model.state_dict().items())
    routing = Routing()
    with torch.no_grad():
        ours, theirs = (hidden_states(each, TOKENS_P, pack(LENGTHS), routing) for each in (model, loaded))
    assert torch.equal(ours, theirs)
    assert loaded.config._experts_implementation == model.config._experts_implementation == "grouped_mm"


def test_a_dense_model_has_no_routers(policy_folder: Path) -> None:
    dense = load_policy(policy_folder)
    open_routers(dense)
    assert routers(dense) == {} and routed(dense.config) is None
