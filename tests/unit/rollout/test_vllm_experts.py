"""A mixture of experts in vLLM: hand-overs, the prepack that vLLM forgets, and the experts of every token.

One engine in float32, one in bfloat16 without recorded routes, and one with an 8-bit cache. What starts them is slow:
`test_exact.py` has experts to the bit, `test_vllm.py` hand-overs, `training/test_routes.py` the replay.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from moe_fixture import mixture
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from vllm_fixture import shut_down

from tailrl.config.sampler import SamplerSettings
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import named_weights, save_policy
from tailrl.model.routing import Routing
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.types import Request, Rollout
from tailrl.rollout.vllm import worker as worker_module
from tailrl.rollout.vllm.engine import VllmSampler
from tailrl.rollout.vllm.experts import RouteRecord, check_routes_here
from tailrl.rollout.vllm.quantization import missing_instructions
from tailrl.rollout.vllm.twin import TwinCheckedSampler, twin_logprobs
from tailrl.runtime.errors import StudyError

pytestmark = pytest.mark.vllm

DECODING = Decoding(temperature=1.0, max_new_tokens=20)
DTYPES = ("float32", "bfloat16")
CACHED = SamplerSettings(dtype="float32", kv_cache_dtype="fp8_e4m3")


@pytest.fixture(scope="module")
def policies(tokenizer: PreTrainedTokenizerFast) -> list[PreTrainedModel]:
    return [mixture(tokenizer, seed) for seed in (1, 2)]


@pytest.fixture(scope="module")
def started(
    policies: list[PreTrainedModel], tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[str], VllmSampler]]:
    """Starts the engine of a dtype or with the cache, or gives the one that was started."""
    folder, made = tmp_path_factory.mktemp("policy"), dict[str, VllmSampler]()
    save_policy(policies[0], tokenizer, folder)

    def start(name: str) -> VllmSampler:
        if name not in made:
            settings = CACHED if name == "cache" else SamplerSettings(dtype=name, routes=name == "float32")
            sampler = make_sampler(settings, folder, 128, seed=0)
            if isinstance(sampler, TwinCheckedSampler):
                sampler = sampler.engine
            assert isinstance(sampler, VllmSampler)
            made[name] = sampler
        return made[name]

    yield start
    shut_down(made)


@pytest.fixture
def engine32(started: Callable[[str], VllmSampler]) -> VllmSampler:
    return started("float32")


def requests(count: int = 40) -> list[Request]:
    """Two responses to each prompt."""
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(2, 600, length).tolist()) for length in rng.integers(1, 30, count // 2)]
    return [Request(prompt, 100 + i) for i, prompt in enumerate(p for p in prompts for _ in range(2))]


@torch.no_grad()
def scored(model: PreTrainedModel, rollouts: Sequence[Rollout]) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """The trainer's log-probs of all tokens; of each response the experts [P, L, K] and margins [P, L] of what ran."""
    logp, chosen = [], []
    for rollout in rollouts:
        batch, routing = pack_batch([rollout.prompt_tokens], [rollout.tokens]), Routing()
        hidden_TH = hidden_states(model, batch.tokens_P, batch.packing, routing)[batch.predict_T]
        logits_TV = (hidden_TH @ head_weight(model).T).double().log_softmax(-1)
        logp.append(logits_TV.gather(-1, batch.targets_T[:, None]).squeeze(-1).numpy())
        chosen.append((routing.choices().permute(1, 0, 2).numpy(), routing.margins().T.numpy()))
    return np.concatenate(logp), chosen


def sampled(rollouts: Sequence[Rollout]) -> np.ndarray:
    return np.concatenate([rollout.logp_sampler_T for rollout in rollouts])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_after_each_hand_over_log_probs_are_the_trainers(
    started: Callable[[str], VllmSampler], policies: list[PreTrainedModel], dtype: str
) -> None:
    """The engine's dummy weights are its first load, so that two hand-overs are its second and third."""
    engine, tolerance = started(dtype), {"float32": 1e-3, "bfloat16": 0.3}[dtype]
    for model in (*policies, policies[0]):
        engine.load_weights(named_weights(model))
        rollouts = engine.generate(requests(), DECODING)
        differences = np.abs(scored(model, rollouts)[0] - sampled(rollouts))
        # In half precision few tokens flip their experts, and differ by more.
        assert np.quantile(differences, 0.9) < tolerance
        assert dtype != "float32" or differences.max() < tolerance
        assert engine.self_test(requests(4), DECODING) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_prepack_that_vllm_forgets_is_noticed(
    started: Callable[[str], VllmSampler],
    policies: list[PreTrainedModel],
    dtype: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = started(dtype)
    monkeypatch.setattr(worker_module, "renew_kernels", lambda _: None)
    with pytest.raises(StudyError, match="vLLM's experts of layer 0 do not compute with the weights that they were"):
        engine.load_weights(named_weights(policies[1]))
    with pytest.raises(RuntimeError, match="no weights yet"):
        engine.generate(requests(2), DECODING)


def swapped(name: str) -> str:
    """Gate and up of the second layer's experts, swapped on the way."""
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    return re.sub(r"(layers\.1\.mlp\.experts\.\d\.)(gate_proj|up_proj)", lambda m: m[1] + other[m[2]], name)


def one_expert_elsewhere(name: str) -> str:
    other = {"1": "2", "2": "1"}
    return re.sub(r"(layers\.0\.mlp\.experts\.)([12])(?=\.down_proj)", lambda m: m[1] + other[m[2]], name)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "layer"), [(swapped, 1), (one_expert_elsewhere, 0)])
def test_weights_in_the_wrong_place_are_noticed(
    engine32: VllmSampler,
    policies: list[PreTrainedModel],
    fault: Any,
    layer: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    set_weights = worker_module.WorkerExtension.set_weights

    def faulty(self: Any, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        set_weights(self, ((fault(name), weight) for name, weight in weights))

    worker = engine32.llm.llm_engine.model_executor.driver_worker.worker
    monkeypatch.setattr(type(worker), "set_weights", faulty, raising=False)
    with pytest.raises(StudyError, match=f"experts of layer {layer} do not compute"):
        engine32.load_weights(named_weights(policies[0]))


@pytest.mark.slow
def test_experts_that_are_not_handed_over_are_named(engine32: VllmSampler, policies: list[PreTrainedModel]) -> None:
    name = "model.layers.1.mlp.experts.gate_up_proj"
    with pytest.raises(StudyError, match=f"a policy that lacks {name}"):
        engine32.load_weights((own, weight) for own, weight in named_weights(policies[0]) if own != name)


@pytest.mark.slow
def test_routes_are_those_of_the_trainer_in_the_same_arithmetic(
    engine32: VllmSampler, policies: list[PreTrainedModel]
) -> None:
    """float32 on both sides: every token's experts are equal, prompts' included, but for ties."""
    engine32.load_weights(named_weights(policies[0]))
    ties = 0
    for _ in range(2):
        rollouts = engine32.generate(requests(300), DECODING)  # more than are in flight at once
        for rollout, (chosen_PLK, margin_PL) in zip(rollouts, scored(policies[0], rollouts)[1], strict=True):
            assert rollout.routes_PLK is not None and rollout.routes_PLK.dtype == np.uint8
            assert rollout.routes_PLK.shape == (len(rollout.prompt_tokens) + len(rollout.tokens) - 1, 2, 2)
            same_PL = (np.sort(rollout.routes_PLK, -1) == np.sort(chosen_PLK, -1)).all(-1)
            assert margin_PL[~same_PL].max(initial=0) < 1e-4, "a tie alone may go the other way"
            ties += (~same_PL).sum()
    used = np.concatenate([rollout.routes_PLK.reshape(-1, 2) for rollout in rollouts if rollout.routes_PLK is not None])
    assert len(np.unique(used)) == 8
    assert ties < 5


@pytest.mark.slow
def test_without_the_setting_there_are_none(
    started: Callable[[str], VllmSampler], policies: list[PreTrainedModel]
) -> None:
    engine = started("bfloat16")
    engine.load_weights(named_weights(policies[0]))
    assert all(rollout.routes_PLK is None for rollout in engine.generate(requests(2), DECODING))


def test_a_token_without_experts_is_an_error() -> None:
    record = RouteRecord(np.array([0, 0, 0]), np.array([0, 1, 1]), np.arange(6, dtype=np.uint8).reshape(3, 1, 2))
    (routes,) = record.of([Request((5, 6), 0)], [1])
    assert routes.tolist() == [[[0, 1]], [[4, 5]]]  # what ran again has its last experts
    with pytest.raises(StudyError, match="did not report the experts of 1 tokens"):
        list(record.of([Request((5, 6), 0)], [2]))


@pytest.mark.slow
def test_an_engine_with_an_8_bit_cache_is_its_twin(
    started: Callable[[str], VllmSampler], policies: list[PreTrainedModel]
) -> None:
    """As one of a dense policy; rounded keys and values send some tokens to other experts, in the twin too."""
    if words := missing_instructions(CACHED):
        pytest.skip(words)
    for model in policies:
        engine = TwinCheckedSampler(started("cache"), started("cache").folder, CACHED)
        engine.load_weights(named_weights(model))
        weights = dict(engine.handed)
        assert engine.self_test(requests(8), DECODING) < 1e-4 and not engine.untested
        rollouts = engine.generate(requests(), DECODING)
        twin_T, plain_T = (
            twin_logprobs(engine.folder, weights, settings, rollouts, 1.0, False, torch.float32).numpy()
            for settings in (CACHED, SamplerSettings(dtype="float32"))
        )
        from_twin, from_plain = (np.abs(sampled(rollouts) - other_T).mean() for other_T in (twin_T, plain_T))
        assert from_twin < min(0.01, 0.1 * from_plain)


@pytest.mark.parametrize(("runner_v2", "gpu"), [(True, False), (False, True), (True, True)])
def test_routes_are_refused_where_vllm_would_not_say_them(
    policy_folder: Path, runner_v2: bool, gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, and with Model Runner V2; before vLLM starts."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", str(int(runner_v2)))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    words = r"^sampler\.routes: the experts of vLLM's tokens are recorded on a CPU alone: leave it out$"
    with pytest.raises(StudyError, match=words):
        make_sampler(SamplerSettings(routes=True), policy_folder, 32, seed=0)


def test_routes_are_said_on_a_cpu_by_the_first_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_routes_here(runner_v2=False)


@pytest.mark.slow
def test_a_dense_policy_has_no_routes(policy_folder: Path) -> None:
    sampler = SamplerSettings(dtype="float32", routes=True)
    with pytest.raises(StudyError, match=r"sampler\.routes: .* is no mixture of experts: leave it out"):
        make_sampler(sampler, policy_folder, 32, seed=0)
