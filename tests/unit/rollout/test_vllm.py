"""The vLLM engine against plain arithmetic on its own logits, against vLLM's min-p, and against the trainer.

Two engines live as long as this module: each start costs seconds, and the end of one takes the process groups of
the others with it.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cases_fixture import rest_long
from definitions import safe_tokens, softmax
from step_fixture import run_of
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from vllm import LLM, SamplingParams
from vllm.config import CUDAGraphMode
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.linear import LinearBase
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
from vllm_fixture import shut_down

from tailrl.config.load import parse_study
from tailrl.config.policy import ScratchPolicy
from tailrl.config.sampler import Disturbance, SamplerSettings
from tailrl.kernels.packing import pack_batch
from tailrl.model.forward import head_weight, hidden_states
from tailrl.model.policy import create_policy, named_weights, save_policy
from tailrl.objective.disturbance import UNDISTURBED, disturb
from tailrl.objective.noise import gumbel
from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs
from tailrl.probes.distributions import measure
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.exact import ExactSampler
from tailrl.rollout.types import Request, Rollout
from tailrl.rollout.verified import VerifiedSampler
from tailrl.rollout.vllm import engine as engine_module
from tailrl.rollout.vllm import twin
from tailrl.rollout.vllm.engine import VllmSampler
from tailrl.rollout.vllm.experts import record_routes
from tailrl.rollout.vllm.processor import SafeSetProcessor
from tailrl.rollout.vllm.processor_v2 import SafeSetProcessorV2
from tailrl.rollout.vllm.quantization import missing_instructions
from tailrl.rollout.vllm.recorder import SafeSetRecord
from tailrl.rollout.vllm.scheduling import SEQUENCES_IN_FLIGHT
from tailrl.rollout.vllm.twin import TwinCheckedSampler
from tailrl.runtime import distributed
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem, write_problems
from tailrl.tracking.metrics import METRICS, VERIFICATION
from tailrl.training import loop, step

pytestmark = pytest.mark.vllm

V = 600  # not a multiple of 64: vLLM pads the vocabulary, and the padding must stay out of everything
MAX_LENGTH = 128
ALONE = "TAILRL_COMPILED_ENGINE"  # set in the process of the one test that must not share its own
STOP_TOKENS = list(range(1, V, 15))  # many end tokens, so that responses of random weights end at all lengths
PLAIN = Decoding(temperature=1.0, max_new_tokens=24)
MIN_P = Decoding(temperature=1.0, max_new_tokens=24, rule="min_p")
DTYPES = ("bfloat16", "float32")

Logits = dict[tuple[int, int], Tensor]
"""The engine's float32 logits [V] before the mask, by request and position."""


def random_policy(tokenizer: PreTrainedTokenizerFast, seed: int) -> PreTrainedModel:
    """Weights, norms' too, large enough for a distribution with peaks; no two of them alike."""
    settings = ScratchPolicy(
        vocabulary_size=V, hidden_size=64, layers=2, heads=2, intermediate_size=96, max_length=MAX_LENGTH
    )
    model = create_policy(settings, tokenizer, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 1.0 if parameter.ndim == 1 else 0.35, generator=generator)
    model.config.eos_token_id = STOP_TOKENS
    model.generation_config.eos_token_id = STOP_TOKENS
    return model


def random_requests(count: int, longest: int = 30, seed: int = 0, threshold: float = 0.0) -> list[Request]:
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, longest + 1, count)
    prompts = [tuple(rng.integers(0, V, length).tolist()) for length in lengths]
    return [Request(prompt, 1000 * seed + i, threshold) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def policy(tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    return random_policy(tokenizer, 1)


@pytest.fixture(scope="module")
def folder(
    policy: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    folder = tmp_path_factory.mktemp("policy")
    save_policy(policy, tokenizer, folder)
    return folder


@pytest.fixture(scope="module")
def engines(folder: Path) -> Iterator[dict[str, VllmSampler]]:
    """One engine for each dtype; a test may add its own."""
    made: dict[str, VllmSampler] = {}
    for dtype in DTYPES:
        sampler = make_sampler(SamplerSettings(dtype=dtype), folder, MAX_LENGTH, seed=0)
        assert isinstance(sampler, VllmSampler)
        made[dtype] = sampler
    yield made
    shut_down(made)


@pytest.fixture
def cramped(engines: dict[str, VllmSampler], folder: Path) -> VllmSampler:
    """An engine in float32 whose small cache preempts sequences, and whose short blocks are cached."""
    if "cramped" not in engines:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine_module, "LLM", partial(LLM, block_size=32, num_gpu_blocks_override=40))
            engines["cramped"] = VllmSampler(folder, SamplerSettings(dtype="float32"), MAX_LENGTH, seed=0)
    return engines["cramped"]


@pytest.fixture(params=rest_long(("bfloat16",), DTYPES))
def engine(request: pytest.FixtureRequest, engines: dict[str, VllmSampler], policy: PreTrainedModel) -> VllmSampler:
    """Both engines in turn, with the policy's weights; that in float32, which `engine32` tests have too, slowly."""
    sampler = engines[request.param]
    sampler.load_weights(named_weights(policy))
    return sampler


@pytest.fixture
def engine32(engines: dict[str, VllmSampler], policy: PreTrainedModel) -> VllmSampler:
    engines["float32"].load_weights(named_weights(policy))
    return engines["float32"]


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> Logits:
    """The logits that every sampled token was drawn from, before the mask; a repeated position replaces itself."""
    kept: Logits = {}
    apply = SafeSetProcessor.apply

    def spy(self: SafeSetProcessor, logits: Tensor) -> Tensor:
        for index in range(logits.shape[0]):
            row = self.rows[index]
            kept[row.request, len(row.tokens)] = logits[index].clone()
        return apply(self, logits)

    monkeypatch.setattr(SafeSetProcessor, "apply", spy)
    return kept


def test_an_eager_engine_compiles_nothing(engine32: VllmSampler) -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    assert len(engine32.generate(random_requests(3), PLAIN)) == 3
    assert not torch._dynamo.utils.counters["frames"]


@pytest.mark.slow  # the test above
def test_what_an_eager_engine_leaves_uncompiled_changes_no_bits(engine32: VllmSampler) -> None:
    """vLLM compiles an integer there, and no code reads it."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = engine32.generate(random_requests(3), PLAIN)
    engine32.compiles = True
    try:
        compiled = engine32.generate(random_requests(3), PLAIN)
    finally:
        engine32.compiles = False
    assert torch._dynamo.utils.counters["frames"]["ok"]
    assert all(map(same_bits, eager, compiled))


def check_records(rollouts: Sequence[Rollout], captured: Logits, log_rho: float = -np.inf) -> None:
    """Every record equals what float64 makes of the captured logits; |V'_S| exactly, the rest to 1e-5 nats.

    The rule is min-p with the given ln ρ, which keeps every token at −inf.
    """
    for index, rollout in enumerate(rollouts):
        length = len(rollout.tokens)
        logits_TV = torch.stack([captured[index, position] for position in range(length)]).numpy()
        assert logits_TV.shape == (length, V)
        assert logits_TV.dtype == np.float32
        least_T = logits_TV.max(-1) + np.float32(log_rho)
        safe_TV = logits_TV >= least_T[:, None]
        probs_TV = np.exp(logits_TV.astype(np.float64) - logits_TV.max(-1, keepdims=True))
        mass_T, all_T = (probs_TV * safe_TV).sum(-1), probs_TV.sum(-1)
        sampled = (np.arange(length), list(rollout.tokens))
        assert safe_TV[sampled].all()
        np.testing.assert_allclose(rollout.logp_sampler_T, np.log(probs_TV[sampled] / mass_T), atol=1e-5, rtol=0)
        np.testing.assert_allclose(rollout.log_kept_sampler_T, np.log(mass_T / all_T), atol=1e-5, rtol=0)
        np.testing.assert_array_equal(rollout.kept_vocab_sampler_T, safe_TV.sum(-1))
        arrays = (rollout.logp_sampler_T, rollout.log_kept_sampler_T, rollout.kept_vocab_sampler_T)
        assert [(array.shape, array.dtype) for array in arrays] == [
            ((length,), np.float32),
            ((length,), np.float32),
            ((length,), np.int32),
        ]


def concatenated(rollouts: Sequence[Rollout], name: str) -> np.ndarray:
    return np.concatenate([getattr(rollout, name) for rollout in rollouts])


def same_bits(left: Rollout, right: Rollout) -> bool:
    return left.tokens == right.tokens and all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("logp_sampler_T", "log_kept_sampler_T", "kept_vocab_sampler_T")
    )


# --- what is recorded --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize(("rule", "log_rho"), [("full", -np.inf), ("min_p", -13.0), ("min_p", -3.0), ("min_p", -0.01)])
def test_records_are_those_of_the_engines_own_logits(
    engine: VllmSampler, captured: Logits, rule: str, log_rho: float, temperature: float
) -> None:
    rollouts = engine.generate(random_requests(40, threshold=log_rho), Decoding(temperature, 24, rule))
    check_records(rollouts, captured, log_rho)
    kept, log_kept = concatenated(rollouts, "kept_vocab_sampler_T"), concatenated(rollouts, "log_kept_sampler_T")
    if rule == "full":
        assert (kept == V).all()
        assert (log_kept == 0).all()
    else:
        assert kept.min() < V
        assert log_kept.min() < 0
    if log_rho == -0.01:
        assert (concatenated(rollouts, "logp_sampler_T")[kept == 1] == 0).all()
        assert (kept == 1).mean() > 0.9


def test_the_temperature_divides_before_the_mask(engine: VllmSampler, captured: Logits) -> None:
    requests = random_requests(10, threshold=-3.0)
    engine.generate(requests, Decoding(1.0, 1, "min_p"))
    plain = dict(captured)
    engine.generate(requests, Decoding(0.7, 1, "min_p"))
    for index in range(len(requests)):
        torch.testing.assert_close(captured[index, 0] * 0.7, plain[index, 0], atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize("log_rho", [-13.0, -3.0, -0.01])
def test_vllms_own_min_p_draws_the_same(engine: VllmSampler, log_rho: float, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_min_p(*, extra_args: dict[str, Any], **given: Any) -> SamplingParams:
        return SamplingParams(
            **given, extra_args={"request": extra_args["request"]}, min_p=math.exp(extra_args["threshold"])
        )

    requests = random_requests(40, threshold=log_rho)
    ours = engine.generate(requests, MIN_P)
    monkeypatch.setattr(engine_module, "SamplingParams", with_min_p)
    native = engine.generate(requests, MIN_P)
    assert [rollout.tokens for rollout in ours] == [rollout.tokens for rollout in native]
    np.testing.assert_allclose(
        concatenated(ours, "logp_sampler_T"), concatenated(native, "logp_sampler_T"), atol=1e-5, rtol=0
    )
    assert (concatenated(native, "kept_vocab_sampler_T") == V).all(), "our own mask was on as well"


@pytest.mark.parametrize(("rule", "number"), [("entropy", -3.0), ("top_k", 20.0), ("top_p", 0.9)])
def test_other_rules_are_drawn_from_and_recorded(
    engine: VllmSampler, captured: Logits, rule: str, number: float
) -> None:
    rollouts = engine.generate(random_requests(20, threshold=number), Decoding(1.0, 24, rule))
    for index, rollout in enumerate(rollouts):
        for position, token in enumerate(rollout.tokens):
            probs = softmax(captured[index, position].tolist())
            kept = int(rollout.kept_vocab_sampler_T[position])
            # float32 may put a token on the very edge on either side.
            sizes = [sum(safe_tokens(probs, rule, number + shift)) for shift in (-1e-5, 0.0, 1e-5)]
            assert min(sizes) <= kept <= max(sizes)
            mass = sum(sorted(probs)[-kept:])
            assert sorted(probs)[-kept] <= probs[token]
            assert rollout.log_kept_sampler_T[position] == pytest.approx(math.log(mass), abs=1e-5)
            assert rollout.logp_sampler_T[position] == pytest.approx(math.log(probs[token] / mass), abs=1e-5)
    assert concatenated(rollouts, "kept_vocab_sampler_T").min() < V


SELF_TESTED = [("full", 0.0), ("min_p", -3.0), ("entropy", -3.0), ("top_k", 20.0), ("top_p", 0.9)]


@pytest.mark.parametrize(("rule", "number"), SELF_TESTED)
def test_the_self_test_passes(engine: VllmSampler, rule: str, number: float) -> None:
    worst = engine.self_test(random_requests(8, threshold=number), Decoding(0.7, 24, rule))
    assert 0 <= worst < 1e-5
    # It leaves nothing behind: the engine goes on, and keeps no logits.
    after = engine.generate(random_requests(2, threshold=number), Decoding(0.7, 24, rule))
    assert [rollout.logits_sampler_KV for rollout in after] == [(), ()]


def test_the_self_test_refuses_raw_log_probs(engine32: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that returns log-probs from before the mask is off by log Z', without any other sign of it."""
    generate = VllmSampler.generate

    def raw(self: VllmSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        rollouts = generate(self, requests, decoding)
        return [replace(r, logp_sampler_T=r.logp_sampler_T + r.log_kept_sampler_T) for r in rollouts]

    monkeypatch.setattr(VllmSampler, "generate", raw)
    assert engine32.self_test(random_requests(8), PLAIN) < 1e-5, "without a mask both are the same"
    with pytest.raises(StudyError, match=r"not those of the distribution it samples from: .* nats"):
        engine32.self_test(random_requests(8, threshold=-1.0), MIN_P)


def test_more_requests_than_the_engine_runs_at_once(engine: VllmSampler, captured: Logits) -> None:
    requests = random_requests(300, threshold=-3.0)
    assert len(requests) > 2 * SEQUENCES_IN_FLIGHT
    rollouts = engine.generate(requests, MIN_P)
    assert [rollout.prompt_tokens for rollout in rollouts] == [request.prompt_tokens for request in requests]
    check_records(rollouts, captured, -3.0)
    assert len({len(rollout.tokens) for rollout in rollouts}) > 15


@pytest.mark.parametrize("decoding", [PLAIN, MIN_P], ids=lambda decoding: decoding.rule)
def test_a_request_gives_the_same_response_in_any_batch(engine32: VllmSampler, decoding: Decoding) -> None:
    requests = random_requests(200, threshold=-3.0)
    together = engine32.generate(requests, decoding)
    backwards = engine32.generate(requests[::-1], decoding)[::-1]
    alone = [engine32.generate([request], decoding)[0] for request in requests[:20]]
    for left, right in [*zip(together, backwards, strict=True), *zip(together, alone, strict=False)]:
        assert left.tokens == right.tokens
        np.testing.assert_allclose(left.logp_sampler_T, right.logp_sampler_T, atol=1e-4, rtol=0)
        np.testing.assert_allclose(left.log_kept_sampler_T, right.log_kept_sampler_T, atol=1e-4, rtol=0)


@pytest.mark.slow  # sequences that wait: `test_more_requests_than_the_engine_runs_at_once`
def test_a_preempted_sequence_resumes(
    cramped: VllmSampler,
    engine32: VllmSampler,
    policy: PreTrainedModel,
    captured: Logits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preempt = Scheduler._preempt_request
    thrown_out: list[str] = []

    def spy(self: Scheduler, request: Any, *args: Any, **kwargs: Any) -> Any:
        thrown_out.append(request.request_id)
        return preempt(self, request, *args, **kwargs)

    monkeypatch.setattr(Scheduler, "_preempt_request", spy)
    cramped.load_weights(named_weights(policy))
    requests, decoding = random_requests(60, threshold=-3.0), Decoding(1.0, 60, "min_p")
    rollouts = cramped.generate(requests, decoding)
    assert thrown_out
    check_records(rollouts, captured, -3.0)
    assert [r.tokens for r in rollouts] == [r.tokens for r in engine32.generate(requests, decoding)]


# --- randomness, ends and errors ---------------------------------------------------------------------


def test_the_seed_decides(engine: VllmSampler) -> None:
    requests = random_requests(20)
    first, again = engine.generate(requests, PLAIN), engine.generate(requests, PLAIN)
    assert all(map(same_bits, first, again))
    others = engine.generate([Request(request.prompt_tokens, request.seed + 1) for request in requests], PLAIN)
    assert sum(left.tokens == right.tokens for left, right in zip(first, others, strict=True)) < 10
    group = engine.generate([Request(requests[0].prompt_tokens, seed) for seed in range(20)], PLAIN)
    assert len({rollout.tokens for rollout in group}) > 15


def test_the_end_token_ends_a_response_and_belongs_to_it(engine: VllmSampler) -> None:
    assert engine.stop_tokens == STOP_TOKENS
    rollouts = engine.generate(random_requests(60), PLAIN)
    assert {rollout.stopped for rollout in rollouts} == {True, False}
    for rollout in rollouts:
        assert not set(rollout.tokens[:-1]) & set(STOP_TOKENS)
        assert rollout.stopped == (rollout.tokens[-1] in STOP_TOKENS)
        assert rollout.stopped or len(rollout.tokens) == PLAIN.max_new_tokens


def test_a_response_ends_where_the_policy_can_hold_no_more(engine32: VllmSampler) -> None:
    prompt = tuple(range(MAX_LENGTH - 3))
    rollouts = engine32.generate([Request(prompt, seed) for seed in range(20)], PLAIN)
    assert max(len(rollout.tokens) for rollout in rollouts) == 3
    assert not any(rollout.stopped for rollout in rollouts if rollout.tokens[-1] not in STOP_TOKENS)


def test_a_dense_policy_has_no_routes(engine32: VllmSampler, folder: Path) -> None:
    """What a start with `sampler.routes` asks the engine."""
    with pytest.raises(StudyError, match=rf"sampler\.routes: {folder} is no mixture of experts: leave it out"):
        record_routes(engine32.llm, folder)


def test_no_request_no_rollout(engine32: VllmSampler) -> None:
    assert engine32.generate([], PLAIN) == []


@pytest.mark.parametrize("length", [MAX_LENGTH, MAX_LENGTH + 50])
def test_a_prompt_that_leaves_no_room_is_refused(engine32: VllmSampler, length: int) -> None:
    with pytest.raises(StudyError, match=rf"a prompt of {length} tokens .* {MAX_LENGTH} tokens"):
        engine32.generate([*random_requests(2), Request((5,) * length, 0)], PLAIN)
    assert len(engine32.generate(random_requests(2), PLAIN)) == 2, "the engine goes on after a refusal"


def test_a_prompt_without_a_token_is_refused(engine32: VllmSampler) -> None:
    with pytest.raises(StudyError, match="a prompt holds no token"):
        engine32.generate([Request((), 0)], PLAIN)


def test_an_engine_without_weights_does_not_generate() -> None:
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.has_weights = False
    with pytest.raises(RuntimeError, match="load_weights"):
        sampler.generate(random_requests(1), PLAIN)


def test_a_folder_that_holds_no_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="vLLM could not start") as caught:
        VllmSampler(tmp_path, SamplerSettings(), MAX_LENGTH, seed=0)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_policy_without_an_end_token_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": None}), encoding="utf-8")
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    with pytest.raises(StudyError, match="no end token") as caught:
        VllmSampler(tmp_path, SamplerSettings(), MAX_LENGTH, seed=0)
    assert str(tmp_path) in str(caught.value)


# --- beside a trainer --------------------------------------------------------------------------------


OUTPUT = SimpleNamespace(
    outputs=[SimpleNamespace(token_ids=(5,), logprobs=SimpleNamespace(logprobs=(-1.0,)), finish_reason="length")]
)
RECORD = SafeSetRecord(np.array([0]), np.array([0]), np.zeros(1, np.float32), np.ones(1, np.int32))


class StandIn:
    """Stands in for vLLM: its arguments, and how many weights had been handed over when each was taken."""

    records = True  # whether the processor is in its model runner

    def __init__(self, **given: Any) -> None:
        self.given = given
        scheduler = {"max_num_seqs": 1024, "max_num_batched_tokens": 16384, "enable_chunked_prefill": True}
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(
                use_v2_model_runner=given["async_scheduling"],
                scheduler_config=SimpleNamespace(**scheduler, async_scheduling=given["async_scheduling"]),
                compilation_config=SimpleNamespace(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE),
            )
        )
        self.handed: list[str] = []
        self.calls: list[str] = []
        self.taken: list[tuple[str, torch.dtype, int]] = []

    def collective_rpc(self, method: str, args: tuple[Iterable[tuple[str, Tensor]]] = ((),)) -> list[Any]:
        if method in ("records_safe_sets", "rounds_queries"):
            return [self.records]
        if method == "formats":
            return [({"as they are"}, {self.given["kv_cache_dtype"]})]
        assert method == "set_weights"
        self.calls.append("weights")
        self.taken = [(name, weight.dtype, len(self.handed)) for name, weight in args[0]]
        return [None]

    def sleep(self, level: int) -> None:
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(f"wake {tags}")

    def reset_prefix_cache(self) -> None:
        self.calls.append("reset")
        self.taken.append(("then the cache", torch.bool, len(self.handed)))


@pytest.mark.parametrize(
    ("count", "sharing", "backend"), [(1, 1, None), (2, 1, "external_launcher"), (4, 2, "external_launcher")]
)
def test_each_rank_has_an_engine_or_a_slice_of_one_on_a_share_of_its_gpu(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int, sharing: int, backend: str | None
) -> None:
    """vLLM's arguments, which no test has tried on a GPU. Weights pass one at a time, in the engine's dtype."""
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(distributed, "count", lambda: count)
    settings = SamplerSettings(gpu_memory_utilization=0.3, tensor_parallel=sharing)
    sampler = make_sampler(settings, folder, MAX_LENGTH, seed=0)
    assert isinstance(sampler, VllmSampler)
    engine = sampler.llm
    assert engine.given["tensor_parallel_size"] == sharing
    assert engine.given["gpu_memory_utilization"] == 0.3
    assert engine.given["distributed_executor_backend"] == backend

    def weights() -> Iterator[tuple[str, Tensor]]:
        for name in ("first", "second"):
            engine.handed.append(name)
            yield name, torch.ones(2)

    sampler.names = {}.keys()
    sampler.load_weights(weights())
    assert engine.taken == [
        ("first", torch.bfloat16, 1),
        ("second", torch.bfloat16, 2),
        ("then the cache", torch.bool, 2),
    ]


def test_a_weight_that_is_not_handed_over_is_refused(
    folder: Path, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM would go on with the old one."""
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    sampler = make_sampler(SamplerSettings(), folder, MAX_LENGTH, seed=0)
    sampler.load_weights(named_weights(policy))
    left_out = "model.layers.1.self_attn.k_proj.weight"
    with pytest.raises(StudyError, match=rf"vLLM was handed a policy that lacks {left_out}$"):
        sampler.load_weights((name, weight) for name, weight in named_weights(policy) if name != left_out)
    with pytest.raises(RuntimeError, match="no weights yet"):
        sampler.generate(random_requests(1), PLAIN)


@pytest.mark.parametrize(
    ("said", "gpu", "told"), [(None, False, True), (None, True, False), (False, False, False), (True, True, True)]
)
def test_vllm_compiles_on_a_gpu_and_where_the_settings_say_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, said: bool | None, gpu: bool, told: bool
) -> None:
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    sampler = make_sampler(SamplerSettings(enforce_eager=said), folder, MAX_LENGTH, seed=0)
    assert isinstance(sampler, VllmSampler)
    assert sampler.llm.given["enforce_eager"] is told


@pytest.mark.parametrize(
    ("gpu", "runner", "processor", "temperature"),
    [
        (False, "0", SafeSetProcessor, 0.7),
        (True, "1", SafeSetProcessorV2, 1.0),
        (True, "0", SafeSetProcessor, 0.7),
    ],
)
def test_a_gpu_has_the_scheduling_that_vllm_recommends(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    gpu: bool,
    runner: str,
    processor: type,
    temperature: float,
) -> None:
    """V2 calls processors before the temperature, so its own is 1. V1 on a GPU is for users who say so."""
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    sampler = make_sampler(SamplerSettings(), folder, MAX_LENGTH, seed=0)
    assert isinstance(sampler, VllmSampler)
    given = sampler.llm.given
    assert given["logits_processors"] == [processor]
    assert given["enable_chunked_prefill"] is gpu
    assert given["async_scheduling"] is (runner == "1")
    # Where they are left out, vLLM knows them by the GPU.
    sizes = {name: given[name] for name in ("max_num_seqs", "max_num_batched_tokens") if name in given}
    assert sizes == ({} if gpu else {"max_num_seqs": 128, "max_num_batched_tokens": 4096})
    said = f"vLLM: Model Runner V{int(runner) + 1}, 1024 sequences in flight, 16384 tokens a step"
    assert (said in capsys.readouterr().err) is gpu
    asked: list[SamplingParams] = []
    sampler.has_weights = True
    sampler.llm.generate = lambda _, params, **__: asked.extend(params) or [OUTPUT]
    sampler.llm.collective_rpc = lambda _: [RECORD]
    sampler.generate(random_requests(1), Decoding(0.7, 1))
    assert asked[0].temperature == temperature
    assert asked[0].extra_args.get("temperature", 1.0) * temperature == 0.7


def test_an_engine_that_rounds_queries_says_so_and_its_twin_does_too(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As FlashAttention 3 does with an fp8 cache; without one vLLM is not asked."""
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(engine_module, "prepare", lambda _: None)
    monkeypatch.setattr(engine_module, "control_rounds_queries", lambda _: False)
    for cache, rounds in (("auto", False), ("fp8_e4m3", True)):
        sampler = make_sampler(SamplerSettings(kv_cache_dtype=cache), folder, MAX_LENGTH, seed=0)
        assert isinstance(sampler, TwinCheckedSampler if rounds else VllmSampler)
        assert (sampler.engine if isinstance(sampler, TwinCheckedSampler) else sampler).rounds_queries is rounds
        said = "vLLM rounds queries to fp8 here, and a matched control does not"
        assert (said in capsys.readouterr().err) is rounds
    monkeypatch.setattr(engine_module, "control_rounds_queries", lambda _: True)
    make_sampler(SamplerSettings(kv_cache_dtype="auto"), folder, MAX_LENGTH, seed=0)
    sampler = make_sampler(SamplerSettings(kv_cache_dtype="fp8_e4m3"), folder, MAX_LENGTH, seed=0)
    assert "queries" not in capsys.readouterr().err, "the control does as the engine"
    assert isinstance(sampler, TwinCheckedSampler)
    asked: list[bool] = []
    monkeypatch.setattr(twin, "check_twin", lambda *given: asked.append(given[-1]))
    monkeypatch.setattr(engine_module, "record_error", lambda *_: 0.0)
    responses = [SimpleNamespace(logits_sampler_KV=())] * 2
    monkeypatch.setattr(sampler.engine, "generate", lambda *_: responses)
    sampler.self_test(random_requests(2), PLAIN)
    assert asked == [True]


def test_the_other_model_runner_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(StandIn, "records", False)
    with pytest.raises(StudyError, match="another model runner than VLLM_USE_V2_MODEL_RUNNER=0 names"):
        make_sampler(SamplerSettings(), folder, MAX_LENGTH, seed=0)


@pytest.mark.parametrize(("longest", "tested"), [(20, 20), (32, 32), (8192, 32)])
def test_the_self_test_keeps_the_logits_of_few_tokens(
    monkeypatch: pytest.MonkeyPatch, longest: int, tested: int
) -> None:
    """At a vocabulary of 151,936 each takes 600 KB; at full length they took 40 GB."""
    kept: list[int] = []

    def generate(_: VllmSampler, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        assert decoding.keep_every == 1
        length = decoding.max_new_tokens
        kept.extend([length] * len(requests))
        flat = np.full(length, -math.log(4), np.float32)
        numbers = (flat, np.zeros(length, np.float32), np.full(length, 4, np.int32))
        logits = tuple(np.zeros(4, np.float32) for _ in range(length))
        return [Rollout(r.prompt_tokens, (0,) * length, *numbers, False, logits) for r in requests]

    monkeypatch.setattr(VllmSampler, "generate", generate)
    assert VllmSampler.__new__(VllmSampler).self_test(random_requests(3), Decoding(1.0, longest)) < 1e-6
    assert kept == [tested] * 3


def test_an_engine_beside_a_trainer_sleeps_between_rollout_and_hand_over(
    folder: Path, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU: weights wake before the hand-over and the cache after it; a verified engine's proposer sleeps too."""
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    verified = make_sampler(SamplerSettings(verify=True), folder, MAX_LENGTH, 0, policy)
    assert isinstance(verified, VerifiedSampler)
    sampler = verified.proposer
    assert isinstance(sampler, VllmSampler)
    engine = sampler.llm
    assert engine.given["enable_sleep_mode"] is True
    verified.load_weights(named_weights(policy))
    assert engine.calls == ["weights", "reset"], "it starts awake"
    verified.release()
    verified.release()
    with pytest.raises(RuntimeError, match="load_weights"):
        sampler.generate(random_requests(1), PLAIN)
    verified.load_weights(named_weights(policy))
    woken = ["wake ['weights']", "weights", "wake ['kv_cache']", "reset"]
    assert engine.calls[2:] == ["sleep 2", *woken]
    sampler.check_weights()


@pytest.mark.parametrize(("gpu", "trainer"), [(True, False), (False, True)])
def test_an_engine_alone_or_on_a_cpu_stays_awake(
    folder: Path, policy: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, gpu: bool, trainer: bool
) -> None:
    monkeypatch.setattr(engine_module, "LLM", StandIn)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    sampler = make_sampler(SamplerSettings(), folder, MAX_LENGTH, 0, policy if trainer else None)
    assert isinstance(sampler, VllmSampler)
    assert sampler.llm.given["enable_sleep_mode"] is False
    sampler.load_weights(named_weights(policy))
    sampler.release()
    sampler.check_weights()
    assert sampler.llm.calls == ["weights", "reset"]


@pytest.mark.parametrize("count", [1, 3])
def test_an_engine_that_not_all_ranks_can_share_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    monkeypatch.setattr(distributed, "count", lambda: count)
    words = rf"tensor_parallel: {count} ranks cannot share engines in groups of 2"
    with pytest.raises(StudyError, match=words):
        make_sampler(SamplerSettings(tensor_parallel=2), folder, MAX_LENGTH, seed=0)


# --- weights -----------------------------------------------------------------------------------------


def effective_weights(model: nn.Module) -> dict[str, Tensor]:
    """What the engine computes with, layer by layer.

    On a CPU vLLM packs a linear layer's weights and leaves an empty tensor. They are read back by applying the layer to
    an identity matrix, which is exact in every dtype.
    """
    found: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, RMSNorm):
            found[f"{name}.weight"] = module.weight.data
        elif isinstance(module, LinearBase):
            identity = torch.eye(module.input_size, dtype=module.params_dtype)
            found[f"{name}.weight"] = module.quant_method.apply(module, identity, None).T
    head = model.lm_head  # type: ignore[union-attr]
    identity = torch.eye(head.embedding_dim, dtype=found["model.norm.weight"].dtype)
    found["lm_head.weight"] = model.compute_logits(identity).T  # type: ignore[operator]
    tokens = torch.arange(found["lm_head.weight"].shape[0])
    found["model.embed_tokens.weight"] = model.model.embed_tokens(tokens)  # type: ignore[union-attr]
    return {name: weight.clone() for name, weight in found.items()}


def fused(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's weights, stacked as vLLM stacks them."""
    stacks = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
    done = dict(weights)
    for stack, parts in stacks.items():
        for name in [name for name in weights if f".{parts[0]}." in name]:
            done[name.replace(parts[0], stack)] = torch.cat([done.pop(name.replace(parts[0], part)) for part in parts])
    return done


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_engine_computes_with_its_loaded_weights(
    engines: dict[str, VllmSampler], tokenizer: PreTrainedTokenizerFast, dtype: str
) -> None:
    """Bit for bit, every parameter, for one set after the other: a tied head once stayed the first one's."""
    for seed in (5, 6, 7):
        weights = dict(named_weights(random_policy(tokenizer, seed)))
        engines[dtype].load_weights(weights.items())
        (actual,) = engines[dtype].llm.apply_model(effective_weights)
        expected = fused({name: weight.to(getattr(torch, dtype)) for name, weight in weights.items()})
        assert actual.keys() == expected.keys()
        for name, weight in expected.items():
            assert actual[name].dtype == weight.dtype
            assert torch.equal(actual[name], weight), f"{name} of the set with seed {seed}"


@pytest.mark.slow
def test_a_compiled_engine_computes_with_its_loaded_weights(
    folder: Path, tokenizer: PreTrainedTokenizerFast, request: pytest.FixtureRequest
) -> None:
    """Its log-probs are the trainer's, for one set of weights after the other.

    In a process of its own, for a compiled engine breaks those that come after it.
    """
    if ALONE not in os.environ:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "slow", request.node.nodeid]
        ended = subprocess.run(
            command, env={**own, ALONE: "1"}, cwd=request.config.rootpath, capture_output=True, text=True
        )
        assert ended.returncode == 0 and "1 passed" in ended.stdout, ended.stdout[-5000:]
        return
    settings = SamplerSettings(dtype="float32", enforce_eager=False)
    sampler = make_sampler(settings, folder, MAX_LENGTH, seed=0)
    decoding = Decoding(1.0, 20, "min_p")
    for seed in (5, 6):
        policy = random_policy(tokenizer, seed)
        sampler.load_weights(named_weights(policy))
        requests = random_requests(40, seed=seed, threshold=-3.0)
        assert sampler.self_test(requests[:4], decoding) < 1e-4
        rollouts = sampler.generate(requests, decoding)
        found = np.concatenate([rollout.logp_sampler_T for rollout in rollouts])
        scored = trained(policy, rollouts, 1.0, -3.0)
        inside = ~scored.outside_T.numpy()
        assert inside.mean() > 0.99
        np.testing.assert_allclose(found[inside], scored.logp_T.numpy()[inside], atol=2e-3)


def trained(
    policy: PreTrainedModel, rollouts: Sequence[Rollout], temperature: float, log_rho: float = -np.inf
) -> TokenLogprobs:
    """The trainer's packed forward of all rollouts, on the min-p set."""
    batch = pack_batch([r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts])
    with torch.no_grad():
        hidden_TH = hidden_states(policy, batch.tokens_P, batch.packing)[batch.predict_T]
        return token_logprobs(hidden_TH @ head_weight(policy).T / temperature, batch.targets_T, "min_p", log_rho)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_a_float32_engine_agrees_with_the_trainer(
    engine32: VllmSampler, tokenizer: PreTrainedTokenizerFast, temperature: float
) -> None:
    for seed in (1, 2):
        policy = random_policy(tokenizer, seed)
        engine32.load_weights(named_weights(policy))
        rollouts = engine32.generate(random_requests(100, threshold=-3.0), Decoding(temperature, 24, "min_p"))
        train = trained(policy, rollouts, temperature, -3.0)
        logp, log_kept = concatenated(rollouts, "logp_sampler_T"), concatenated(rollouts, "log_kept_sampler_T")
        inside = ~train.outside_T.numpy()
        assert inside.mean() > 0.999  # a token on the edge of the set may fall on either side
        np.testing.assert_allclose(logp + log_kept, train.logp_full_T, atol=1e-4, rtol=0)
        same_set = train.kept_vocab_T.numpy() == concatenated(rollouts, "kept_vocab_sampler_T")
        assert same_set.mean() > 0.99
        np.testing.assert_allclose(logp[inside & same_set], train.logp_T[inside & same_set], atol=1e-4, rtol=0)
        np.testing.assert_allclose(log_kept[same_set], train.log_kept_T[same_set], atol=1e-4, rtol=0)


@pytest.mark.slow  # the cache is reset: `test_an_engine_alone_or_on_a_cpu_stays_awake`
def test_a_cache_of_other_weights_is_not_used(cramped: VllmSampler, tokenizer: PreTrainedTokenizerFast) -> None:
    """The cramped engine's blocks are short enough for these prompts to fill some, and so to be cached."""
    requests = random_requests(8, seed=3) + [Request(tuple(range(s, s + 100)), s) for s in range(8)]
    for seed in (1, 2):
        policy = random_policy(tokenizer, seed)
        cramped.load_weights(named_weights(policy))
        rollouts = cramped.generate(requests, PLAIN)
        train = trained(policy, rollouts, 1.0)
        np.testing.assert_allclose(concatenated(rollouts, "logp_sampler_T"), train.logp_full_T, atol=1e-4, rtol=0)


def test_a_bfloat16_engine_differs_from_the_trainer_a_little(
    engines: dict[str, VllmSampler], policy: PreTrainedModel
) -> None:
    engines["bfloat16"].load_weights(named_weights(policy))
    rollouts = engines["bfloat16"].generate(random_requests(100), PLAIN)
    delta = trained(policy, rollouts, 1.0).logp_full_T.numpy() - concatenated(rollouts, "logp_sampler_T")
    assert 1e-3 < np.abs(delta).mean() < 0.2
    assert abs(delta.mean()) < 0.02


@pytest.mark.slow  # `test_vllm_quantized.py` has an 8-bit cache beside int8 weights
def test_a_cache_of_eight_bits_is_a_mismatch_of_its_own(
    engines: dict[str, VllmSampler], folder: Path, policy: PreTrainedModel, captured: Logits
) -> None:
    """Its records match its own logits; it differs from the trainer by more than float32's rounding."""
    settings = SamplerSettings(dtype="float32", kv_cache_dtype="fp8_e4m3")
    if words := missing_instructions(settings):
        pytest.skip(words)
    sampler = make_sampler(settings, folder, MAX_LENGTH, seed=0)
    assert isinstance(sampler, TwinCheckedSampler)
    engines["eight bits"] = sampler.engine
    sampler.load_weights(named_weights(policy))
    rollouts = sampler.generate(random_requests(100, threshold=-3.0), MIN_P)
    check_records(rollouts, captured, -3.0)
    logp = concatenated(rollouts, "logp_sampler_T") + concatenated(rollouts, "log_kept_sampler_T")
    delta = trained(policy, rollouts, 1.0).logp_full_T.numpy() - logp
    assert 0.02 < np.abs(delta).mean() < 1.0


# --- the mismatch dial -------------------------------------------------------------------------------

DISTURBANCES: dict[str, Disturbance] = {
    "noise": Disturbance(noise=0.5),
    "bias": Disturbance(bias=0.5),
    "floor": Disturbance(floor=0.1),
    "all": Disturbance(noise=0.2, bias=0.2, floor=0.01),
}


def disturbed_logits(raw: Logits, requests: Sequence[Request], disturbance: Disturbance) -> Logits:
    """What is drawn from where the engine's logits are these."""
    return {
        (index, position): disturb(logits[None], [requests[index].seed], [position], disturbance)[0]
        for (index, position), logits in raw.items()
    }


@pytest.mark.parametrize(("rule", "log_rho"), [("full", -np.inf), ("min_p", -3.0)])
@pytest.mark.parametrize("cause", DISTURBANCES)
def test_records_are_those_of_the_disturbed_logits(
    engine: VllmSampler, captured: Logits, cause: str, rule: str, log_rho: float
) -> None:
    requests = random_requests(40, threshold=log_rho, seed=7)
    rollouts = engine.generate(requests, Decoding(0.8, 24, rule, DISTURBANCES[cause]))
    check_records(rollouts, disturbed_logits(captured, requests, DISTURBANCES[cause]), log_rho)
    with pytest.raises(AssertionError):
        check_records(rollouts, captured, log_rho)


@pytest.mark.parametrize("cause", DISTURBANCES)
def test_the_engine_draws_from_the_disturbance_of_its_own_logits(
    engine: VllmSampler, monkeypatch: pytest.MonkeyPatch, captured: Logits, cause: str
) -> None:
    """Its first logits without a disturbance, disturbed here, are what the processor returns with it."""
    requests, disturbance = random_requests(20, seed=3), DISTURBANCES[cause]
    engine.generate(requests, Decoding(1.0, 1))
    expected = disturbed_logits(dict(captured), requests, disturbance)
    returned: Logits = {}
    apply = SafeSetProcessor.apply

    def spy(self: SafeSetProcessor, logits: Tensor) -> Tensor:
        rows = apply(self, logits)
        returned.update({(self.rows[i].request, len(self.rows[i].tokens)): rows[i].clone() for i in range(len(rows))})
        return rows

    monkeypatch.setattr(SafeSetProcessor, "apply", spy)
    engine.generate(requests, Decoding(1.0, 1, "full", disturbance))
    assert returned.keys() == expected.keys() == {(index, 0) for index in range(20)}
    for place, logits in expected.items():
        torch.testing.assert_close(returned[place], logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("cause", DISTURBANCES)
def test_the_self_test_knows_the_disturbance(engine: VllmSampler, cause: str) -> None:
    decoding = Decoding(0.7, 24, "min_p", DISTURBANCES[cause])
    assert 0 <= engine.self_test(random_requests(8, threshold=-3.0), decoding) < 1e-5


def test_the_self_test_refuses_another_responses_noise(engine32: VllmSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    follow = SafeSetProcessor.update_state

    def with_other_seeds(self: SafeSetProcessor, batch_update: BatchUpdate | None) -> None:
        follow(self, batch_update)
        for index, row in self.rows.items():
            row.seed = index

    monkeypatch.setattr(SafeSetProcessor, "update_state", with_other_seeds)
    requests = random_requests(8, seed=4)
    assert engine32.self_test(requests, PLAIN) < 1e-5
    with pytest.raises(StudyError, match="not those of the distribution it samples from"):
        engine32.self_test(requests, Decoding(1.0, 24, "full", DISTURBANCES["noise"]))


def test_a_disturbed_request_gives_the_same_response_in_any_batch(engine32: VllmSampler) -> None:
    requests, decoding = random_requests(150, threshold=-3.0), Decoding(1.0, 24, "min_p", DISTURBANCES["all"])
    together = engine32.generate(requests, decoding)
    backwards = engine32.generate(requests[::-1], decoding)[::-1]
    assert [rollout.tokens for rollout in together] == [rollout.tokens for rollout in backwards]
    plain = engine32.generate(requests, MIN_P)
    assert sum(left.tokens == right.tokens for left, right in zip(together, plain, strict=True)) < 75


def trained_likewise(
    policy: PreTrainedModel, rollouts: Sequence[Rollout], requests: Sequence[Request], disturbance: Disturbance
) -> tuple[TokenLogprobs, np.ndarray]:
    """The matched trainer's log-probs on the full vocabulary, and Σ p² of its undisturbed distribution per state."""
    batch = pack_batch([r.prompt_tokens for r in rollouts], [r.tokens for r in rollouts])
    places = [(q.seed, t) for q, r in zip(requests, rollouts, strict=True) for t in range(len(r.tokens))]
    with torch.no_grad():
        logits_TV = hidden_states(policy, batch.tokens_P, batch.packing)[batch.predict_T] @ head_weight(policy).T
        matched_TV = disturb(logits_TV, *map(list, zip(*places, strict=True)), disturbance)
        return token_logprobs(matched_TV, batch.targets_T, "full"), logits_TV.softmax(-1).square().sum(-1).numpy()


@pytest.mark.parametrize("cause", DISTURBANCES)
def test_a_matched_trainer_agrees_with_a_float32_engine(
    engine32: VllmSampler, policy: PreTrainedModel, cause: str
) -> None:
    requests, disturbance = random_requests(100, seed=5), DISTURBANCES[cause]
    rollouts = engine32.generate(requests, Decoding(1.0, 24, "full", disturbance))
    matched, _ = trained_likewise(policy, rollouts, requests, disturbance)
    np.testing.assert_allclose(matched.logp_full_T, concatenated(rollouts, "logp_sampler_T"), atol=1e-4, rtol=0)
    alone = trained(policy, rollouts, 1.0).logp_full_T.numpy() - concatenated(rollouts, "logp_sampler_T")
    assert np.abs(alone).mean() > 0.02


def test_noise_in_the_engine_makes_the_k3_of_its_size(engine32: VllmSampler, policy: PreTrainedModel) -> None:
    """E[k3] of a sampled token is σ²/2 (1 − Σ p²), to O(σ⁴) ≤ 9 σ⁴/8; an interval of 99.9 % over the tokens."""
    sigma, requests = 0.1, random_requests(300, seed=6)
    disturbance = Disturbance(noise=sigma)
    rollouts = engine32.generate(requests, Decoding(1.0, 24, "full", disturbance))
    _, squares = trained_likewise(policy, rollouts, requests, disturbance)
    delta = trained(policy, rollouts, 1.0).logp_full_T.double().numpy() - concatenated(rollouts, "logp_sampler_T")
    difference = np.expm1(delta) - delta - sigma**2 / 2 * (1 - squares)
    half_width = 3.29 * difference.std(ddof=1) / math.sqrt(len(difference))
    assert half_width < sigma**2 / 8
    assert abs(difference.mean()) < half_width + 9 / 8 * sigma**4


# --- the logits processor without an engine ----------------------------------------------------------


def processor(*log_rhos: float | None) -> tuple[SafeSetProcessor, list[list[int]]]:
    """A processor with one request a row, and the running lists of their sampled tokens."""
    made, tokens = SafeSetProcessor(None, torch.device("cpu"), False), [[] for _ in log_rhos]
    made.update_state(update(added=[added(i, i, log_rho, tokens[i]) for i, log_rho in enumerate(log_rhos)]))
    return made, tokens


def added(index: int, request: int, log_rho: float | None, tokens: list[int]) -> tuple[Any, ...]:
    """A request on the min-p set, or one that names no rule at all."""
    extra = {"request": request} | ({} if log_rho is None else {"rule": "min_p", "threshold": log_rho})
    return (index, SamplingParams(extra_args=extra), None, tokens)


def update(*, added: Sequence[Any] = (), removed: Sequence[int] = (), moved: Sequence[Any] = ()) -> BatchUpdate:
    return BatchUpdate(batch_size=0, removed=removed, added=added, moved=moved)


def kept_by_row(made: SafeSetProcessor, rows: int) -> tuple[list[int], list[int], list[int]]:
    """Requests, positions and set sizes of one step in which every row has the logits 0, −1, −2, −3."""
    made.apply(-torch.arange(4.0).repeat(rows, 1))
    record = made.take()
    return record.request.tolist(), record.index.tolist(), record.kept_vocab.tolist()


def test_each_row_has_its_own_threshold() -> None:
    made, _ = processor(None, -2.5, -0.5, -1.0, 0.0)
    logits = -torch.arange(4.0).repeat(5, 1)
    masked = made.apply(logits)
    assert masked is logits, "vLLM expects the mask in place"
    assert torch.isfinite(masked).sum(-1).tolist() == [4, 3, 1, 2, 1]
    record = made.take()
    assert record.request.tolist() == [0, 1, 2, 3, 4]
    assert record.kept_vocab.tolist() == [4, 3, 1, 2, 1]
    probs = np.exp(-np.arange(4.0)) / np.exp(-np.arange(4.0)).sum()
    np.testing.assert_allclose(np.exp(record.log_kept), [probs[:n].sum() for n in (4, 3, 1, 2, 1)], atol=1e-6)
    assert record.log_kept[0] == 0


def test_each_row_has_its_own_rule() -> None:
    """A batch may hold the rows of requests with different rules; each is masked by its own."""
    rules = [("full", 0.0), ("top_k", 3.0), ("min_p", -2.5), ("entropy", -1.0), ("top_p", 0.8), ("top_k", 1.0)]
    made = SafeSetProcessor(None, torch.device("cpu"), False)
    extras = [{"request": i, "rule": rule, "threshold": number} for i, (rule, number) in enumerate(rules)]
    made.update_state(update(added=[(i, SamplingParams(extra_args=e), None, []) for i, e in enumerate(extras)]))
    logits = torch.tensor(np.random.default_rng(0).normal(0, 2, (len(rules), 50)), dtype=torch.float32)
    expected = [safe_tokens(softmax(z), *rule) for z, rule in zip(logits.tolist(), rules, strict=True)]
    mass = [sum(np.array(softmax(z))[safe]) for z, safe in zip(logits.tolist(), expected, strict=True)]
    assert torch.isfinite(made.apply(logits)).tolist() == expected
    record = made.take()
    assert record.kept_vocab.tolist() == [sum(safe) for safe in expected]
    np.testing.assert_allclose(np.exp(record.log_kept), mass, atol=1e-6)
    assert record.log_kept[0] == 0


def test_each_row_has_its_own_disturbance() -> None:
    """Disturbed by its request's seed and its position, as if it were alone; the safe set is chosen afterwards."""
    settings = [Disturbance(), DISTURBANCES["noise"], DISTURBANCES["all"], DISTURBANCES["noise"], Disturbance()]
    made, tokens = SafeSetProcessor(None, torch.device("cpu"), False), [[], [4], [5, 6], [], [7]]
    extras = [
        {"request": i, "seed": 90 + i, "rule": "min_p", "threshold": -2.0, "disturbance": one.model_dump()}
        for i, one in enumerate(settings)
    ]
    rows = [(i, SamplingParams(extra_args=extra), None, tokens[i]) for i, extra in enumerate(extras)]
    made.update_state(update(added=rows))
    logits = torch.tensor(np.random.default_rng(0).normal(0, 2, (5, 50)), dtype=torch.float32)
    expected = [
        disturb(row[None], [90 + i], [len(tokens[i])], one)[0]
        for i, (row, one) in enumerate(zip(logits.clone(), settings, strict=True))
    ]
    found = made.apply(logits)
    assert found is logits, "vLLM expects the disturbance in place"
    for row, before in zip(found, expected, strict=True):
        assert row.isfinite().tolist() == safe_tokens(softmax(before.tolist()), "min_p", -2.0)
        assert torch.equal(row[row.isfinite()], before[row.isfinite()])


def test_a_row_counts_the_tokens_sampled_so_far() -> None:
    made, tokens = processor(-0.5, None)
    assert kept_by_row(made, 2) == ([0, 1], [0, 0], [1, 4])
    tokens[0] += [7, 8]
    tokens[1] += [9]
    made.update_state(None)  # nothing changed in the batch
    assert kept_by_row(made, 2) == ([0, 1], [2, 1], [1, 4])


def test_rows_follow_their_requests() -> None:
    made, tokens = processor(None, -2.5, -0.5, -1.0)
    tokens[3] += [1, 2, 3]
    swap, one_way = MoveDirectionality.SWAP, MoveDirectionality.UNIDIRECTIONAL
    made.update_state(update(moved=[(0, 3, swap)]))
    assert kept_by_row(made, 4) == ([3, 1, 2, 0], [3, 0, 0, 0], [2, 3, 1, 4])
    made.update_state(update(removed=[1], moved=[(3, 1, one_way)]))
    assert kept_by_row(made, 3) == ([3, 0, 2], [3, 0, 0], [2, 4, 1])
    made.update_state(update(removed=[0], added=[added(0, 9, -2.5, [])]))
    assert kept_by_row(made, 3) == ([9, 0, 2], [0, 0, 0], [3, 4, 1])
    made.update_state(update(added=[added(2, 8, None, [])]))  # takes the place of a row that was not removed
    assert kept_by_row(made, 3) == ([9, 0, 8], [0, 0, 0], [3, 4, 4])
    # All at once: removed first, then added, then moved.
    made.update_state(update(removed=[0, 2], added=[added(2, 7, -0.5, [5])], moved=[(2, 0, one_way), (0, 1, swap)]))
    assert kept_by_row(made, 2) == ([0, 7], [0, 1], [4, 1])


def test_a_row_that_was_moved_onto_itself_stays_where_it_is() -> None:
    made, _ = processor(-0.5, None)
    made.update_state(update(moved=[(1, 0, MoveDirectionality.SWAP), (0, 1, MoveDirectionality.SWAP)]))
    assert kept_by_row(made, 2) == ([0, 1], [0, 0], [1, 4])


def test_take_returns_each_record_once() -> None:
    made, _ = processor(-0.5)
    kept_by_row(made, 1)
    assert kept_by_row(made, 1) == ([0], [0], [1])


def test_the_last_record_of_a_position_counts() -> None:
    record = SafeSetRecord(
        request=np.array([0, 1, 0, 0]),
        index=np.array([0, 0, 1, 0]),
        log_kept=np.array([-0.1, -0.2, -0.3, -0.4], np.float32),
        kept_vocab=np.array([1, 2, 3, 4], np.int32),
    )
    outputs = [
        SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=ids, logprobs=SimpleNamespace(logprobs=logps), finish_reason="length")]
        )
        for ids, logps in (((5, 6), (-1.0, -2.0)), ((7,), (-3.0,)))
    ]
    sampler = VllmSampler.__new__(VllmSampler)
    sampler.has_weights, sampler.max_length, sampler.stop_tokens = True, MAX_LENGTH, []
    sampler.llm = SimpleNamespace(generate=lambda *_, **__: outputs, collective_rpc=lambda _: [record])
    first, second = sampler.generate(random_requests(2), PLAIN)
    np.testing.assert_array_equal(first.log_kept_sampler_T, np.array([-0.4, -0.3], np.float32))
    np.testing.assert_array_equal(first.kept_vocab_sampler_T, [4, 3])
    np.testing.assert_array_equal(second.kept_vocab_sampler_T, [2])


# --- last, for an engine that fails within a step is of no more use ----------------------------------


def test_more_prompt_tokens_than_the_engine_takes_in_one_step(engine32: VllmSampler, captured: Logits) -> None:
    """The prompts that do not fit must wait whole: vLLM cannot cut a seeded request into pieces on a CPU."""
    requests = [Request(tuple((7 * i + t) % V for t in range(100)), i, -3.0) for i in range(SEQUENCES_IN_FLIGHT)]
    budget = engine32.llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    assert sum(len(request.prompt_tokens) for request in requests) > budget
    rollouts = engine32.generate(requests, Decoding(1.0, 10, "min_p"))
    check_records(rollouts, captured, -3.0)


# --- kept logits -------------------------------------------------------------------------------------


@pytest.mark.parametrize("disturbance", [UNDISTURBED, DISTURBANCES["all"]], ids=["undisturbed", "disturbed"])
def test_kept_logits_are_those_that_the_tokens_were_drawn_from(
    engine: VllmSampler, captured: Logits, disturbance: Disturbance
) -> None:
    """At every third position, for more requests than run at once, some continued, under temperature and mask."""
    requests = [replace(r, start=i % 3) for i, r in enumerate(random_requests(150, threshold=-3.0, seed=8))]
    decoding = Decoding(0.8, 20, "min_p", disturbance, keep_every=3)
    rollouts = engine.generate(requests, decoding)
    kept = 0
    for index, (request, rollout) in enumerate(zip(requests, rollouts, strict=True)):
        positions = [t for t in range(len(rollout.tokens)) if (request.start + t - request.seed) % 3 == 0]
        assert len(rollout.logits_sampler_KV) == len(positions)
        for position, logits_V in zip(positions, rollout.logits_sampler_KV, strict=True):
            place = [request.seed], [request.start + position]
            expected_V = disturb(captured[index, position][None], *place, disturbance)[0].numpy()
            np.testing.assert_array_equal(logits_V, expected_V)
            logp = math.log(softmax(logits_V.tolist())[rollout.tokens[position]])
            recorded = rollout.logp_sampler_T[position] + rollout.log_kept_sampler_T[position]
            assert logp == pytest.approx(recorded, abs=1e-5)
        kept += len(positions)
    tokens = sum(len(rollout.tokens) for rollout in rollouts)
    assert abs(kept - tokens / 3) < tokens / 10
    plain = engine.generate(requests, replace(decoding, keep_every=0))
    assert [rollout.tokens for rollout in plain] == [rollout.tokens for rollout in rollouts]
    assert not any(rollout.logits_sampler_KV for rollout in plain)


def test_whole_distributions_by_dtype(
    engines: dict[str, VllmSampler],
    folder: Path,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """bfloat16 lies further from the trainer than float32, and the exact engine nowhere."""
    monkeypatch.setattr(
        measure,
        "make_sampler",
        lambda settings, *given: (
            make_sampler(settings, *given) if settings.engine == "exact" else engines[settings.dtype]
        ),
    )
    write_problems(problems[:20], tmp_path / "problems.jsonl")
    named = {dtype: {"sampler": {"dtype": dtype}} for dtype in DTYPES}
    named["exact"] = {"sampler": {"engine": "exact", "dtype": "float32"}}
    study = parse_study(
        {
            "name": "s",
            "arms": {"naive": {}},
            "training": {"max_new_tokens": 24},
            "distributions": {"engines": named, "responses": 60, "every": 2, "rho": ["e-3"]},
        }
    )
    found = {}
    for name in named:
        measure.write_distributions(study.compared(name), folder, tmp_path / "problems.jsonl", tmp_path / name)
        with np.load(tmp_path / name / "positions.npz") as file:
            found[name] = {key: file[key] for key in file}
        assert len(found[name]["tv_P"]) > 150
    assert found["float32"]["tv_P"].max() < 1e-4
    assert 1e-3 < found["bfloat16"]["tv_P"].mean() < 0.2
    assert (found["bfloat16"]["kept_both_PS"] < found["bfloat16"]["kept_train_PS"]).any()
    for key in ("tv_P", "delta_max_P", "kl_train_infer_P", "kl_infer_train_P", "flip_P"):
        assert not found["exact"][key].any(), key
    assert (found["exact"]["kept_both_PS"] == found["exact"]["kept_train_PS"]).all()


# --- draws from shared noise -------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "log_rho"), [("full", -np.inf), ("min_p", -3.0)])
def test_shared_noise_draws_the_largest_of_logit_plus_noise(
    engine: VllmSampler, captured: Logits, rule: str, log_rho: float
) -> None:
    requests = [
        replace(request, start=index % 3) for index, request in enumerate(random_requests(30, threshold=log_rho))
    ]
    decoding = Decoding(1.0, 20, rule, Disturbance(noise=0.3), shared_noise=True)
    rollouts = engine.generate(requests, decoding)
    for index, (request, rollout) in enumerate(zip(requests, rollouts, strict=True)):
        assert len(rollout.tokens) <= 20 - request.start
        for position, token in enumerate(rollout.tokens):
            place = [request.seed], [request.start + position]
            logits_1V = disturb(captured[index, position][None], *place, decoding.disturbance)
            safe_1V = safe_set(logits_1V, rule, request.threshold)
            score_1V = (logits_1V + gumbel(*place, V)).masked_fill(~safe_1V, -torch.inf)
            assert int(score_1V.argmax()) == token


def test_the_trainer_verifies_what_vllm_proposes(engine: VllmSampler, policy: PreTrainedModel, folder: Path) -> None:
    """The responses equal the exact engine's; float32 proposals agree nearly always, bfloat16 ones less often."""
    exact = ExactSampler(folder, SamplerSettings(engine="exact", dtype="float32"), MAX_LENGTH)
    exact.load_weights(named_weights(policy))
    requests = random_requests(40, threshold=-6.0)
    sampler = VerifiedSampler(engine, exact.model, STOP_TOKENS, MAX_LENGTH)
    found = sampler.generate(requests, MIN_P)
    assert all(map(same_bits, found, exact.generate(requests, MIN_P)))
    agreement = sampler.metrics()["verification/agreement"]
    assert agreement > (0.999 if engine.dtype == torch.float32 else 0.8)


def test_a_verified_run_has_no_mismatch(
    engines: dict[str, VllmSampler],
    folder: Path,
    problems: list[Problem],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def verified_by(*arguments: Any) -> VerifiedSampler:
        return VerifiedSampler(engines["bfloat16"], arguments[-1], STOP_TOKENS, MAX_LENGTH)

    monkeypatch.setattr(loop, "make_sampler", verified_by)
    monkeypatch.setattr(step, "rewards", lambda rollouts, *_: np.arange(len(rollouts), dtype=np.float32) % 2)
    write_problems(problems, tmp_path / "problems.jsonl")
    run = run_of({"vocabulary": {"rule": "min_p", "rho": 0.01}, "sampler": {"verify": True}})
    loop.train(run, 0, folder, tmp_path / "problems.jsonl", tmp_path / "out", tmp_path / "wandb")
    lines = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert {line["rollout_corr/delta_abs_max"] for line in lines} == {0.0}
    assert all(line["train/grad_norm"] > 0 and line["verification/agreement"] > 0.8 for line in lines)
    assert lines[0].keys() == METRICS.keys() | VERIFICATION.keys()
