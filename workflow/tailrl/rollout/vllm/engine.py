"""vLLM as the rollout engine: samples from the safe set and records what vLLM does not return.

vLLM returns a sampled token's log-prob under the distribution that it was drawn from, but neither mass nor size of a
safe set, and the whole engine has one mode of log-probs. So our own logits processor masks inside the engine, after the
temperature, and records log Z' and |V'_S| of every sampled token: log π_infer = log π'^mp + log Z'. A disturbance comes
before the mask and is part of π_infer. vLLM has two model runners, each with its own kind of processor.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm import LLM, SamplingParams, TokensPrompt

from tailrl.config.sampler import VllmSettings
from tailrl.model.policy import checkpoint_weights
from tailrl.model.quantize import packed
from tailrl.model.quantized import check_cache, check_sizes, control_rounds_queries, projections
from tailrl.objective.disturbance import disturb
from tailrl.rollout import Decoding
from tailrl.rollout.sampling import LocalSampler, response_limits, stop_tokens
from tailrl.rollout.self_test import record_error, shortened, tolerance
from tailrl.rollout.types import Request, Rollout, Routes
from tailrl.rollout.vllm.classes import classes_put_back
from tailrl.rollout.vllm.experts import ExpectedExperts, check_routes_here, check_shared, record_routes
from tailrl.rollout.vllm.processor import SafeSetProcessor
from tailrl.rollout.vllm.processor_v2 import SafeSetProcessorV2
from tailrl.rollout.vllm.quantization import check_formats, overrides, prepare
from tailrl.rollout.vllm.scheduling import described, scheduling
from tailrl.rollout.vllm.twin import TwinCheckedSampler
from tailrl.rollout.vllm.worker import WorkerExtension
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError, ModelError, one_line, reason, say


class VllmSampler(LocalSampler):
    """A `Sampler` over one vLLM engine in this process."""

    runner_v2 = False  # which of vLLM's model runners the engine has
    routes = False  # whether it says which experts a token got
    compiles = True  # whether torch may compile parts of it

    def __init__(
        self, policy_folder: Path, settings: VllmSettings, max_length: int, seed: int, beside_trainer: bool = False
    ) -> None:
        """See `make_sampler`; beside a trainer on a GPU the engine can sleep."""
        sharing, eager = settings.tensor_parallel, settings.enforce_eager
        gpu, self.runner_v2 = torch.cuda.is_available(), os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
        self.compiles = gpu or eager is False
        if distributed.count() % sharing:
            raise ConfigurationError(
                f"sampler.tensor_parallel: {distributed.count()} ranks cannot share engines in groups of {sharing}"
            )
        model = _without_weights(policy_folder)
        prepare(settings)
        if settings.routes:
            check_routes_here(self.runner_v2)
        check_cache(model, settings)
        check_sizes(model, settings)
        check_shared(model, sharing)
        # Its modules on the meta device say how the family's weights are named and laid out.
        self.skeleton, self.names, self.projections = model, model.state_dict().keys(), projections(model)
        self.folder, self.settings = policy_folder, settings
        distributed.stay_on_loopback()  # vLLM has a process group for one process too
        try:
            with classes_put_back(model) as changed:
                self.llm = LLM(
                    model=str(policy_folder),
                    trust_remote_code=False,
                    dtype=settings.dtype,
                    kv_cache_dtype=settings.kv_cache_dtype,
                    gpu_memory_utilization=settings.gpu_memory_utilization,
                    # With several ranks each is a worker on its own GPU, and vLLM uses their process group
                    # ("external_launcher"). Each has a scheduler; those that share an engine get the same requests
                    # and so decide the same.
                    distributed_executor_backend="external_launcher" if distributed.count() > 1 else None,
                    tensor_parallel_size=sharing,
                    # The engine starts empty and gets every weight, head included: vLLM would keep its packed copy of
                    # the old head where a reload leaves out a tied one.
                    load_format="dummy",
                    hf_overrides={"tie_word_embeddings": False} | overrides(settings),
                    max_model_len=max_length,
                    seed=seed,
                    skip_tokenizer_init=True,
                    generation_config="vllm",  # only the study decides how responses are drawn
                    logprobs_mode="processed_logprobs",
                    logits_processors=[SafeSetProcessorV2 if self.runner_v2 else SafeSetProcessor],
                    worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
                    enable_sleep_mode=beside_trainer and gpu,
                    # A token whose keys are cached is not run, and so has no experts.
                    enable_prefix_caching=False if settings.routes else None,
                    enforce_eager=not gpu if eager is None else eager,
                    **scheduling(gpu, self.runner_v2, max_length),
                    disable_log_stats=True,
                )
        except (OSError, ValueError, RuntimeError, AssertionError) as error:
            raise ModelError(f"{policy_folder}: vLLM could not start with this policy: {reason(error)}") from error
        self.sleeps = beside_trainer and gpu  # whether it may
        self.asleep = False
        if changed:
            self.llm.collective_rpc("give_classes", args=(changed,))
        self._check_start(gpu)
        self.dtype = getattr(torch, settings.dtype)
        self.max_length = max_length
        self.stop_tokens = stop_tokens(policy_folder)

    def _check_start(self, gpu: bool) -> None:
        """Look at what vLLM started; raises StudyError where it is not what the settings ask for."""
        if not all(self.llm.collective_rpc("records_safe_sets")):
            raise ModelError(
                "vLLM took another model runner than VLLM_USE_V2_MODEL_RUNNER="
                f"{int(self.runner_v2)} names, so that our logits processor is not in it"
            )
        if gpu and distributed.is_first():
            say(f"vLLM: {described(self.llm.llm_engine.vllm_config)}")
        if self.settings.quantized:
            check_formats(self.llm, self.settings)
        cached = self.settings.kv_cache_dtype != "auto"
        self.rounds_queries = cached and any(self.llm.collective_rpc("rounds_queries"))
        if cached and self.rounds_queries != control_rounds_queries(self.settings) and distributed.is_first():
            does, control = ("rounds", "does not") if self.rounds_queries else ("does not round", "does")
            say(f"vLLM {does} queries to fp8 here, and a matched control {control}")
        self.routes = self.settings.routes and record_routes(self.llm, self.folder)

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """See `Sampler.generate`; raises StudyError for a prompt that is empty or leaves no room."""
        self.check_weights()
        if not requests:
            return []
        limits = response_limits(requests, decoding, self.max_length)
        same = {
            "rule": decoding.rule,
            "disturbance": decoding.disturbance.model_dump(),
            "shared_noise": decoding.shared_noise,
            "keep_every": decoding.keep_every,
        }
        temperature = decoding.temperature
        if self.runner_v2:
            # It calls processors before the temperature: ours divides itself.
            same["temperature"], temperature = temperature, 1.0
        params = [
            SamplingParams(
                temperature=temperature,
                max_tokens=limit,
                seed=request.seed,
                stop_token_ids=self.stop_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                extra_args=same
                | {"request": i, "seed": request.seed, "start": request.start, "threshold": request.threshold},
            )
            for i, (request, limit) in enumerate(zip(requests, limits, strict=True))
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_tokens)) for request in requests]
        # vLLM compiles its count of a token's rank even where all else is eager: a second, for a number of no use here.
        with nullcontext() if self.compiles else torch.compiler.set_stance("force_eager"):
            outputs = self.llm.generate(prompts, params, use_tqdm=False)
        record = self.llm.collective_rpc("take_safe_set_record")[0]
        routes_N: Iterable[Routes | None] = repeat(None)
        if self.routes:
            lengths = [len(output.outputs[0].token_ids) for output in outputs]
            routes_N = list(self.llm.collective_rpc("take_route_record")[0].of(requests, lengths))
        shape = (len(requests), max(len(output.outputs[0].token_ids) for output in outputs) + 1)
        log_kept, kept_vocab = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        # A token recorded twice: numpy keeps the last entry, which counts.
        log_kept[record.request, record.index] = record.log_kept
        kept_vocab[record.request, record.index] = record.kept_vocab
        logits: list[dict[int, NDArray[np.float32]]] = [{} for _ in requests]
        for index, token, raw_V in record.logits:
            # Disturbed here anew, by the request: `self_test` compares with the processor's log-probs.
            position = requests[index].start + token
            raw_1V = raw_V[None].to(distributed.device())
            drawn_1V = disturb(raw_1V, [requests[index].seed], [position], decoding.disturbance)
            logits[index][token] = drawn_1V[0].cpu().numpy()
        return [
            _rollout(request, output.outputs[0], log_kept[index], kept_vocab[index], logits[index], routes_PLK)
            for index, (request, output, routes_PLK) in enumerate(zip(requests, outputs, routes_N, strict=False))
        ]

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """Check the engine's log-probs against the masked, renormalised distribution that it samples from.

        The engine's raw logits are disturbed here anew, by the requests' seeds: noise of another response in a row is
        found. Responses have at most `self_test.TESTED_TOKENS` tokens, each of which keeps its logits.

        Returns:
            The largest error, nats, of a log π'^mp or log Z' against a float64 log-softmax of these logits.

        Raises:
            StudyError: it exceeds `self_test.tolerance` or is nan, |V'_S| differs, or a token was not recorded: every
                ratio would be silently wrong.
        """
        try:
            rollouts = self.generate(requests, replace(shortened(decoding), keep_every=1))
        except (ValueError, TypeError, AssertionError, AttributeError) as error:  # as families end in its backends
            raise ModelError(f"{self.folder}: vLLM cannot compute with this policy: {reason(error)}") from error
        worst = max(
            record_error(request, rollout, torch.from_numpy(np.array(rollout.logits_sampler_KV)), decoding.rule)
            for request, rollout in zip(requests, rollouts, strict=True)
        )
        vocabulary = max((len(logits_V) for rollout in rollouts for logits_V in rollout.logits_sampler_KV), default=0)
        if not worst <= tolerance(vocabulary):
            raise ModelError(
                f"vLLM's log-probs are not those of the distribution it samples from: they differ by {worst:.2g} nats"
            )
        return worst

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`; drops what was cached under the old weights.

        Raises StudyError where a weight is missing, since vLLM would keep the old one.
        """
        self.has_weights = False
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        self._hand_over(weights)
        if self.asleep:
            # After the hand-over, which may gather a whole policy.
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
        self.llm.reset_prefix_cache()
        self.has_weights = True

    def _hand_over(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        missing, experts = set(self.names), ExpectedExperts(self.skeleton)

        def cast() -> Iterator[tuple[str, Tensor]]:
            # One at a time, since a second copy of the policy may not fit into this process beside the engine.
            for name, weight in weights:
                missing.discard(name)
                if self.settings.quantization and name in self.projections:
                    yield from packed(name, weight, self.settings)
                else:
                    yield name, experts.seen(name, weight.to(self.dtype))

        try:
            self.llm.collective_rpc("set_weights", args=(checkpoint_weights(self.skeleton, cast()),))
        except (ValueError, AssertionError, KeyError, AttributeError) as error:  # as its loaders of families end
            raise ModelError(f"{self.folder}: vLLM could not take the policy's weights: {reason(error)}") from error
        if missing:
            raise ModelError(f"vLLM was handed a policy that lacks {one_line(', '.join(sorted(missing)))}")
        experts.check(self.llm, self.dtype)

    def release(self) -> None:
        """See `Sampler.release`: vLLM's sleep mode drops weights and cache. It wakes for the next weights alone."""
        if self.sleeps and not self.asleep:
            self.llm.sleep(level=2)
            self.asleep = True
            self.has_weights = False


def make_engine(
    policy_folder: Path, settings: VllmSettings, max_length: int, seed: int, beside_trainer: bool = False
) -> VllmSampler | TwinCheckedSampler:
    """The engine; one that quantises is compared with its twin in PyTorch, since vLLM's loaders are not ours."""
    engine = VllmSampler(policy_folder, settings, max_length, seed, beside_trainer)
    return TwinCheckedSampler(engine, policy_folder, settings) if settings.quantized else engine


def _without_weights(folder: Path) -> PreTrainedModel:
    """The policy's modules; raises StudyError for a folder that holds none."""
    try:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: vLLM could not start with this policy: {reason(error)}") from error


def _rollout(
    request: Request,
    output: Any,
    log_kept: NDArray[np.float32],
    kept_vocab: NDArray[np.int32],
    logits: dict[int, NDArray[np.float32]],
    routes_PLK: Routes | None,
) -> Rollout:
    length = len(output.token_ids)
    return Rollout(
        prompt_tokens=request.prompt_tokens,
        tokens=tuple(output.token_ids),
        logp_sampler_T=np.array(output.logprobs.logprobs, dtype=np.float32),
        log_kept_sampler_T=log_kept[:length],
        kept_vocab_sampler_T=kept_vocab[:length],
        stopped=output.finish_reason == "stop",
        logits_sampler_KV=tuple(logits[token] for token in sorted(logits) if token < length),
        routes_PLK=routes_PLK,
    )
