"""vLLM as the rollout engine: samples from the safe vocabulary and records what vLLM does not return.

vLLM returns the log-prob of a sampled token under the distribution that it was drawn from, but neither the
mass nor the size of a safe set, and one mode of log-probs serves the whole engine. So a logits processor of
our own does the masking inside the engine, after the temperature, and keeps log Z' and |V'_S| of every
sampled token; then log π_infer = log π'^mp + log Z'. A disturbance comes first: it changes what π_infer is.

This is the only module that imports vLLM.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Read by vLLM when it is imported. One process: the engine loads in 4 s rather than 15 to 30, and weights are
# handed over without a copy through shared memory. A cache of 1 GiB holds far more than a step's sequences.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm import LLM, SamplingParams, TokensPrompt
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from tailrl import ranks
from tailrl.disturbance import disturb
from tailrl.errors import StudyError, reason
from tailrl.noise import gumbel
from tailrl.records import Request, Rollout
from tailrl.rollout import Decoding, is_kept
from tailrl.rollout.sampling import stop_tokens
from tailrl.rollout.selftest import record_error, tolerance
from tailrl.settings import Disturbance, SamplerSettings
from tailrl.vocabulary import logit_cut

SEQUENCES_IN_FLIGHT = 128
BATCHED_TOKENS = 4096


@dataclass(slots=True)
class _Row:
    """A row of the engine's batch: whose it is, what is done to it, and its running list of sampled tokens."""

    request: int
    seed: int
    start: int
    rule: str
    threshold: float
    disturbance: Disturbance
    shared_noise: bool
    keep_every: int
    tokens: list[int]

    @property
    def place(self) -> int:
        """Which token of its response comes next."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class SafeSetRecord:
    """log Z' and |V'_S| of sampled tokens: entry i is about token `position[i]` of request `request[i]`.

    `logits` has request, position and logits [V], not disturbed yet, of the places that are kept (`rollout.is_kept`).
    """

    request: NDArray[np.int64]
    position: NDArray[np.int64]
    log_kept: NDArray[np.float32]
    kept_vocab: NDArray[np.int32]
    logits: Sequence[tuple[int, int, Tensor]] = ()


class SafeSetProcessor(LogitsProcessor):  # type: ignore[misc]  # vLLM is not typed
    """Disturbs the logits, masks those outside the safe set, and records log Z' and |V'_S| of every row and step.

    A row that vLLM runs again (a preempted request) records the same position again; the last entry is the one that
    was sampled from.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:  # noqa: ARG002
        self.rows: dict[int, _Row] = {}
        self.records: list[tuple[list[int], list[int], Tensor, Tensor]] = []
        self.kept: list[tuple[int, int, Tensor]] = []

    def is_argmax_invariant(self) -> bool:
        """Said so that vLLM calls it after the temperature. The most probable token is always safe; noise may make
        another one the most probable, but no request is greedy, and only those would skip the processor."""
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the requests as vLLM adds, removes and moves them; the order is part of its contract."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.rows.pop(index, None)
        for index, params, _, tokens in batch_update.added:
            given = params.extra_args or {}
            self.rows[index] = _Row(
                request=given.get("request", -1),
                seed=given.get("seed", 0),
                start=given.get("start", 0),
                rule=given.get("rule", "full"),
                threshold=given.get("threshold", 0.0),
                disturbance=Disturbance.model_validate(given.get("disturbance", {})),
                shared_noise=given.get("shared_noise", False),
                keep_every=given.get("keep_every", 0),
                tokens=tokens,
            )
        for source, target, direction in batch_update.moved:
            moved, displaced = self.rows.pop(source, None), self.rows.pop(target, None)
            if moved is not None:
                self.rows[target] = moved
            if displaced is not None and direction == MoveDirectionality.SWAP:
                self.rows[source] = displaced

    def apply(self, logits: Tensor) -> Tensor:
        """Disturb and mask float32 logits [rows, V] in place; each row's settings came with its request."""
        rows = [self.rows[index] for index in range(logits.shape[0])]
        for index, row in enumerate(rows):
            if is_kept(row.seed, row.place, row.keep_every):
                self.kept.append((row.request, len(row.tokens), logits[index].clone()))
        for disturbance in {row.disturbance for row in rows if row.disturbance.on_logits}:
            chosen = [index for index, row in enumerate(rows) if row.disturbance == disturbance]
            seeds, places = [rows[index].seed for index in chosen], [rows[index].place for index in chosen]
            logits[chosen] = disturb(logits[chosen], seeds, places, disturbance)
        log_kept = torch.zeros(len(rows), device=logits.device)
        kept_vocab = torch.full((len(rows),), logits.shape[1], dtype=torch.int32, device=logits.device)
        rules = {row.rule for row in rows} - {"full"}
        if rules:
            cut = torch.full((len(rows), 1), -torch.inf, device=logits.device)
            for rule in rules:
                chosen = [index for index, row in enumerate(rows) if row.rule == rule]
                threshold = torch.tensor([[rows[index].threshold] for index in chosen], device=logits.device)
                cut[chosen] = logit_cut(logits[chosen], rule, threshold)
            safe = logits >= cut
            log_sum = logits.logsumexp(-1)
            logits.masked_fill_(~safe, -torch.inf)
            log_kept = logits.logsumexp(-1) - log_sum
            kept_vocab = safe.sum(-1, dtype=torch.int32)
        self.records.append(([row.request for row in rows], [len(row.tokens) for row in rows], log_kept, kept_vocab))
        drawn = [index for index, row in enumerate(rows) if row.shared_noise]
        if drawn:
            seeds, places = [rows[index].seed for index in drawn], [rows[index].place for index in drawn]
            noise = gumbel(seeds, places, logits.shape[1]).to(logits.device)
            token = (logits[drawn] + noise).argmax(-1)
            # One token is left: vLLM can draw no other.
            logits[drawn] = -torch.inf
            logits[drawn, token] = 0.0
        return logits

    def take(self) -> SafeSetRecord:
        """Everything recorded since the last call."""
        (records, self.records), (kept, self.kept) = (self.records, []), (self.kept, [])
        return SafeSetRecord(
            request=np.array([i for requests, *_ in records for i in requests], dtype=np.int64),
            position=np.array([t for _, positions, *_ in records for t in positions], dtype=np.int64),
            log_kept=torch.cat([record[2] for record in records]).cpu().numpy(),
            kept_vocab=torch.cat([record[3] for record in records]).cpu().numpy(),
            logits=kept,
        )


class WorkerExtension:
    """What vLLM adds to its worker, so that the sampler can reach it."""

    model_runner: Any

    def take_safe_set_record(self) -> SafeSetRecord:
        """The record of this worker's logits processor."""
        processors = self.model_runner.input_batch.logitsprocs.argmax_invariant
        return next(p for p in processors if isinstance(p, SafeSetProcessor)).take()

    def set_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load named tensors in checkpoint format; the model's loader splits, fuses and casts them."""
        self.model_runner.reload_weights(weights_iterator=weights)


class VllmSampler:
    """A `Sampler` over one vLLM engine in this process."""

    def __init__(self, policy_folder: Path, settings: SamplerSettings, max_length: int, seed: int) -> None:
        """See `make_sampler`."""
        sharing, eager = settings.tensor_parallel, settings.enforce_eager
        if ranks.count() % sharing:
            raise StudyError(
                f"sampler.tensor_parallel: {sharing} ranks are to share an engine, and there are {ranks.count()}: "
                "their number must be a multiple"
            )
        try:
            self.llm = LLM(
                model=str(policy_folder),
                trust_remote_code=False,
                dtype=settings.dtype,
                kv_cache_dtype=settings.kv_cache_dtype,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                # Among several ranks each is a worker on its own GPU, alone or with those that it shares an engine
                # with: vLLM's word for that is a launcher outside of it, whose process group it then uses. Each has a
                # scheduler, and all that share decide the same by the same requests.
                distributed_executor_backend="external_launcher" if ranks.count() > 1 else None,
                tensor_parallel_size=sharing,
                # The engine starts empty and is handed every weight, head included: where a reload leaves out a
                # tied head, vLLM's packed copy of the old one stays in place.
                load_format="dummy",
                hf_overrides={"tie_word_embeddings": False},
                max_model_len=max_length,
                max_num_seqs=SEQUENCES_IN_FLIGHT,
                seed=seed,
                skip_tokenizer_init=True,
                generation_config="vllm",  # nothing but the study decides how responses are drawn
                logprobs_mode="processed_logprobs",
                logits_processors=[SafeSetProcessor],
                worker_extension_cls=f"{__name__}.{WorkerExtension.__name__}",
                enforce_eager=not torch.cuda.is_available() if eager is None else eager,
                async_scheduling=False,  # the processor reads the tokens sampled so far
                # vLLM 0.32 cannot prefill a seeded request in pieces on a CPU, whose generator has no offset.
                enable_chunked_prefill=False,
                max_num_batched_tokens=max(BATCHED_TOKENS, max_length),
                disable_log_stats=True,
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise StudyError(f"{policy_folder}: vLLM could not start with this policy: {reason(error)}") from error
        self.dtype = getattr(torch, settings.dtype)
        self.max_length = max_length
        self.stop_tokens = stop_tokens(policy_folder)
        self.has_weights = False

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        """See `Sampler.generate`; raises StudyError for a prompt that leaves no room for a response."""
        if not self.has_weights:
            raise RuntimeError("the engine has no weights yet: call load_weights first")
        if not requests:
            return []
        longest = max(len(request.prompt_tokens) for request in requests)
        if longest >= self.max_length:
            raise StudyError(f"a prompt of {longest} tokens leaves no room in the policy's {self.max_length} tokens")
        disturbance = decoding.disturbance.model_dump()
        params = [
            SamplingParams(
                temperature=decoding.temperature,
                max_tokens=min(decoding.max_new_tokens - request.start, self.max_length - len(request.prompt_tokens)),
                seed=request.seed,
                stop_token_ids=self.stop_tokens,
                logprobs=0,
                flat_logprobs=True,
                detokenize=False,
                extra_args={
                    "request": index,
                    "seed": request.seed,
                    "start": request.start,
                    "rule": decoding.rule,
                    "threshold": request.threshold,
                    "disturbance": disturbance,
                    "shared_noise": decoding.shared_noise,
                    "keep_every": decoding.keep_every,
                },
            )
            for index, request in enumerate(requests)
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_tokens)) for request in requests]
        outputs = self.llm.generate(prompts, params, use_tqdm=False)
        record = self.llm.collective_rpc("take_safe_set_record")[0]
        shape = (len(requests), max(len(output.outputs[0].token_ids) for output in outputs) + 1)
        log_kept, kept_vocab = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
        # Positions recorded twice: numpy keeps the last, which is the one that counts.
        log_kept[record.request, record.position] = record.log_kept
        kept_vocab[record.request, record.position] = record.kept_vocab
        logits: list[dict[int, NDArray[np.float32]]] = [{} for _ in requests]
        for index, position, raw_V in record.logits:
            # Disturbed here anew, by the request: `self_test` holds it against what the processor made of them.
            place = requests[index].start + position
            drawn_1V = disturb(raw_V[None], [requests[index].seed], [place], decoding.disturbance)
            logits[index][position] = drawn_1V[0].cpu().numpy()
        return [
            _rollout(request, output.outputs[0], log_kept[index], kept_vocab[index], logits[index])
            for index, (request, output) in enumerate(zip(requests, outputs, strict=True))
        ]

    def self_test(self, requests: Sequence[Request], decoding: Decoding) -> float:
        """Whether the engine's log-probs are those of the masked, renormalised distribution that it samples from.

        The engine's logits are taken as they come and disturbed here anew, by the requests' seeds: a row that got
        another response's noise would show.

        Returns:
            The largest difference, nats, of a log π'^mp or log Z' from a float64 log-softmax of these logits.

        Raises:
            StudyError: it exceeds `selftest.tolerance` or is no number, |V'_S| differs, or a token was not seen: every
                ratio would be off, in silence.
        """
        rollouts = self.generate(requests, replace(decoding, keep_every=1))
        worst = max(
            record_error(request, rollout, torch.from_numpy(np.array(rollout.logits_infer_KV)), decoding.rule)
            for request, rollout in zip(requests, rollouts, strict=True)
        )
        vocabulary = max((len(logits_V) for rollout in rollouts for logits_V in rollout.logits_infer_KV), default=0)
        if not worst <= tolerance(vocabulary):
            raise StudyError(
                f"vLLM's log-probs are not those of the distribution it samples from: they differ by {worst:.2g} nats"
            )
        return worst

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Sampler.load_weights`; what was cached under the old weights is dropped."""
        # One at a time: the engine is in this process, and a second copy of the policy may not fit beside it.
        cast = ((name, weight.to(self.dtype)) for name, weight in weights)
        self.llm.collective_rpc("set_weights", args=(cast,))
        self.llm.reset_prefix_cache()
        self.has_weights = True

    def metrics(self) -> dict[str, float]:
        """See `Sampler.metrics`: nothing."""
        return {}


def _rollout(
    request: Request,
    output: Any,
    log_kept: NDArray[np.float32],
    kept_vocab: NDArray[np.int32],
    logits: dict[int, NDArray[np.float32]],
) -> Rollout:
    length = len(output.token_ids)
    return Rollout(
        prompt_tokens=request.prompt_tokens,
        tokens=tuple(output.token_ids),
        logp_infer_T=np.array(output.logprobs.logprobs, dtype=np.float32),
        log_kept_infer_T=log_kept[:length],
        kept_vocab_infer_T=kept_vocab[:length],
        stopped=output.finish_reason == "stop",
        logits_infer_KV=tuple(logits[position] for position in sorted(logits) if position < length),
    )
