"""The job that compares one engine's distributions with the trainer's, on the engine's responses.

The engine keeps the logits of a share of its decoding steps (`rollout.is_kept`). The trainer scores the same responses
in packed micro-batches and in the number format of training. The noise floor is the trainer against itself: it scores
the responses twice, and packs them in two ways.
"""

import itertools
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from tailrl.artifacts.manifest import MANIFEST, policy_digest, vouched_checksum, write_manifest
from tailrl.artifacts.probes import DistributionsRecord, Positions, write_positions
from tailrl.artifacts.records import write_record
from tailrl.config.distributions import HEAD_BELOW, TAIL_FROM, Distributions
from tailrl.config.sampler import Disturbance
from tailrl.config.source_files import at_start, job_files
from tailrl.config.vocabulary import log_rho
from tailrl.kernels.exact_logprobs import Scoring, chunked_logits
from tailrl.kernels.packing import micro_batches, pack_batch
from tailrl.model.forward import head_weight, hidden_states, make_exact, trained_length
from tailrl.model.policy import encode_prompt, load_policy, load_tokenizer, required_length
from tailrl.objective.disturbance import disturb, round_weights
from tailrl.probes.distributions.comparison import EDGES, compare
from tailrl.probes.distributions.experts import compare_routes
from tailrl.rollout import Decoding, Sampler, is_kept, make_sampler
from tailrl.rollout.prompts import show_prompts
from tailrl.rollout.sampling import stop_tokens
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import ConfigurationError, ModelError
from tailrl.runtime.provenance import provenance
from tailrl.runtime.seeding import derive_seed
from tailrl.runtime.timeouts import guarded
from tailrl.tasks.problem import read_problems
from tailrl.training.placement import tensor_floats
from tailrl.training.weight_sync import WeightSync

HELD_LOGITS = 2**26
"""Most logits that an engine keeps before they are compared: 256 MiB, or one response's."""

COMPARED_LOGITS = 2**21
"""Logits compared at once: 16 MiB in float64; a comparison holds about twelve such tensors."""

TESTED_REQUESTS = 8
"""Requests of an engine's self-test."""


def write_distributions(settings: Distributions, policy_folder: Path, problems_file: Path, out: Path) -> None:
    """Writes out/positions.npz (`artifacts.probes.Positions`), and out/run.json with settings and provenance.

    Where the engine says which experts it chose, positions.npz has `ExpertFlips` too.

    Raises:
        StudyError: an unreadable input, a prompt too long for the policy, a ρ above 1 in its vocabulary, an engine
            that refuses the temperature, keeps no logits or does not give its experts as it should, logits that are
            not finite, or no position to compare.
    """
    begun = time.perf_counter()
    _check_temperature(settings)
    settings = settings.decided(distributed.device().type == "cuda")
    sources, digest = at_start(job_files("compare", settings)), policy_digest(policy_folder)
    inputs = {"problems": vouched_checksum(problems_file), "base policy": digest}
    model, prompts, length, log_rhos = read_inputs(settings, policy_folder, problems_file)
    vocabulary = model.config.vocab_size
    sampler = start_sampler(settings, policy_folder, model, length)
    every, disturbance = 0 if settings.engine.rescored else settings.every, settings.engine.disturbance
    decoding = Decoding(settings.temperature, settings.max_new_tokens, disturbance=disturbance, keep_every=every)
    requests = make_requests(settings, prompts)
    tested = self_tested(sampler, requests, decoding, settings)
    compared, where, experts, tokens = [], [], [], 0
    for start, chosen, rollouts in sampled(sampler, requests, decoding, settings, vocabulary):
        compared.append(compare_rollouts(model, chosen, rollouts, settings, log_rhos))
        tokens += sum(len(rollout.tokens) for rollout in rollouts)
        for index, (request, rollout) in enumerate(zip(chosen, rollouts, strict=True), start=start):
            kept = kept_positions(request, rollout, settings.every)
            where += [(index, index % len(prompts), position, rollout.tokens[position]) for position in kept]
        if settings.engine.sampler.says_routes:
            given = zip(chosen, rollouts, first_tokens(rollouts), strict=True)
            rows = [start + position for q, r, start in given for position in kept_positions(q, r, settings.every)]
            experts.append(compare_routes(model, rollouts, settings).at(rows))
    if not where:
        raise ConfigurationError(
            f"distributions: none of {settings.responses} responses has a position to compare; lower every"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_positions(out, np.array(where, np.int32), Positions.joined(compared), experts)
    record = DistributionsRecord(
        settings=settings.model_dump(mode="json"),
        **provenance(),
        threads=torch.get_num_threads(),
        vocabulary=vocabulary,
        tokens=tokens,
        edges=list(EDGES[:-1]),
        head_below=HEAD_BELOW,
        tail_from=TAIL_FROM,
        sampler_self_test=tested if math.isfinite(tested) else None,
        wall_seconds=round(time.perf_counter() - begun, 1),
    )
    write_record(out, record)
    write_manifest(out / MANIFEST, [out / "positions.npz", out / "run.json"], inputs=inputs, sources=sources)


def start_sampler(settings: Distributions, policy_folder: Path, model: PreTrainedModel, length: int) -> Sampler:
    """The engine, with the policy's weights; `length`: most tokens of prompt and response together.

    The model is float32, and from then on computes as the trainer of these settings (`Distributions.decided`).

    Raises StudyError as `make_sampler` does.
    """
    with guarded(settings.rollout_timeout, "the engine's start"):
        sampler = make_sampler(settings.engine.sampler, policy_folder, length, settings.seed, model)
    with guarded(settings.rollout_timeout, "the hand-over of the weights"):
        WeightSync(sampler, settings.engine.disturbance)(model)
    compute_as_trainer(model, settings)
    return sampler


def compute_as_trainer(model: PreTrainedModel, settings: Distributions) -> None:
    """Gives the model's weights the trainer's number format; in a matched control they are rounded first, as the
    engine's are. Buffers, such as those of rotary positions, keep theirs, as under FSDP2."""
    dial = settings.engine.disturbance
    for (
        name,
        parameter,
    ) in model.named_parameters():  # one at a time: both formats of all would not fit beside an engine
        own = [(name, parameter.detach())]
        ((_, weight),) = round_weights(own, dial.weights if dial.side == "both" else None)
        parameter.data = weight.to(getattr(torch, settings.dtype))


def self_tested(sampler: Sampler, requests: Sequence[Request], decoding: Decoding, settings: Distributions) -> float:
    """The error of the engine's log-probs, nats: see `Sampler.self_test`."""
    with guarded(settings.rollout_timeout, "the engine's self-test"):
        return sampler.self_test(requests[:TESTED_REQUESTS], decoding)


def sampled(
    sampler: Sampler, requests: Sequence[Request], decoding: Decoding, settings: Distributions, vocabulary: int
) -> Iterator[tuple[int, Sequence[Request], list[Rollout]]]:
    """Batches of responses, each with the number of its first request: as many as HELD_LOGITS allows."""
    at_once = max(1, HELD_LOGITS // (vocabulary * -(-decoding.max_new_tokens // settings.every)))
    for start in range(0, len(requests), at_once):
        chosen = requests[start : start + at_once]
        with guarded(settings.rollout_timeout, f"a batch of {len(chosen)} responses"):
            rollouts = sampler.generate(chosen, decoding)
        yield start, chosen, rollouts


def _check_temperature(settings: Distributions) -> None:
    try:
        settings.engine.sampler.check_temperature("training.temperature", settings.temperature)
    except ValueError as error:
        raise ConfigurationError(f"distributions.engines.{settings.name}: {error}") from None


def make_requests(settings: Distributions, prompts: Sequence[tuple[int, ...]]) -> list[Request]:
    """A request for each response: the prompts in turn, each request with its own random stream."""
    return [
        Request(prompts[index % len(prompts)], derive_seed("distributions", settings.seed, index))
        for index in range(settings.responses)
    ]


def read_inputs(
    settings: Distributions, policy_folder: Path, problems_file: Path
) -> tuple[PreTrainedModel, list[tuple[int, ...]], int, list[float]]:
    """The trainer's model, the first problems' prompts, the most tokens of prompt and response together, and ln ρ of
    the min-p sets; raises StudyError for a ρ above 1 in this vocabulary."""
    tokenizer = load_tokenizer(policy_folder)
    problems = read_problems(problems_file)[: settings.responses]
    prompts = [tuple(encode_prompt(tokenizer, problem.prompt)) for problem in problems]
    show_prompts(tokenizer, prompts, stop_tokens(policy_folder, tokenizer), settings.name)
    model = load_policy(policy_folder).to(distributed.device())
    if settings.engine.sampler.exact:
        make_exact(model)
    most, key = trained_length(model.config), "training.max_new_tokens"
    length = required_length(problems, prompts, settings.max_new_tokens, most, key)
    vocabulary = model.config.vocab_size
    log_rhos = [log_rho(rho, vocabulary) for rho in settings.rho]
    if max(log_rhos) > 0:
        raise ConfigurationError(
            f"distributions.rho: one of {', '.join(settings.rho)} is above 1 for {vocabulary} tokens"
        )
    return model, prompts, length, log_rhos


def compare_rollouts(
    model: PreTrainedModel,
    requests: Sequence[Request],
    rollouts: Sequence[Rollout],
    settings: Distributions,
    log_rhos: Sequence[float],
) -> Positions:
    """The comparison at every kept position of the rollouts, in order; raises StudyError as `write_distributions`."""
    tokens_P = torch.tensor(
        [r.tokens[t] for q, r in zip(requests, rollouts, strict=True) for t in kept_positions(q, r, settings.every)],
        dtype=torch.int64,
    )
    return compare_in_parts(*both_logits(model, requests, rollouts, settings), tokens_P, log_rhos)


def both_logits(
    model: PreTrainedModel, requests: Sequence[Request], rollouts: Sequence[Rollout], settings: Distributions
) -> tuple[Tensor, Tensor]:
    """The trainer's and the engine's logits at every kept position of the rollouts, in order.

    Returns:
        Two tensors on the CPU, float32 [P, V], after the temperature.

    Raises:
        StudyError: the engine kept none, or a logit is not finite.
    """
    trainer_PV = trainer_logits(model, requests, rollouts, settings, settings.token_budget).cpu()
    if settings.engine.rescored:
        sampler_PV = trainer_logits(model, requests, rollouts, settings, settings.engine.rescored).cpu()
    else:
        kept = [logits_V for rollout in rollouts for logits_V in rollout.logits_sampler_KV]
        if len(kept) != len(trainer_PV):
            raise ConfigurationError(
                f"the engine {settings.engine.sampler.engine} does not keep the logits that it samples from"
            )
        sampler_PV = torch.from_numpy(np.stack(kept)) if kept else trainer_PV
    if not (trainer_PV.isfinite().all() and sampler_PV.isfinite().all()):
        raise ModelError("the policy's logits are not finite")
    return trainer_PV, sampler_PV


def compare_in_parts(trainer_PV: Tensor, sampler_PV: Tensor, tokens_P: Tensor, log_rhos: Sequence[float]) -> Positions:
    """See `compare`; so many positions at a time as COMPARED_LOGITS allows."""
    parts = row_chunks(trainer_PV)
    return Positions.joined([compare(trainer_PV[p], sampler_PV[p], tokens_P[p], log_rhos) for p in parts])


def row_chunks(logits_PV: Tensor) -> list[slice]:
    """Slices of P positions with at most COMPARED_LOGITS logits, or one position; a single slice if P is 0."""
    rows = max(1, COMPARED_LOGITS // logits_PV.shape[1])
    return [slice(start, start + rows) for start in range(0, max(1, len(logits_PV)), rows)]


@torch.no_grad()
def trainer_logits(
    model: PreTrainedModel,
    requests: Sequence[Request],
    rollouts: Sequence[Rollout],
    settings: Distributions,
    token_budget: int,
) -> Tensor:
    """The trainer's logits at every kept position of the rollouts, in order: float32 [P, V], after the temperature.

    With an exact engine they come from its operators; in a matched control they are disturbed like the engine's.
    """
    dial = settings.engine.disturbance if settings.engine.disturbance.side == "both" else Disturbance()
    scoring = Scoring("full", settings.temperature, disturbance=dial)
    found: dict[int, Tensor] = {}
    # The head's product is in float32, as training's: rounded logits would be a mismatch that training does not have.
    weight_VH = head_weight(model).float()
    prompts, lengths = [r.prompt_tokens for r in rollouts], [len(r.tokens) for r in rollouts]
    for group in micro_batches(prompts, lengths, token_budget):
        chosen = [rollouts[i] for i in group]
        batch = pack_batch([r.prompt_tokens for r in chosen], [r.tokens for r in chosen], weight_VH.device)
        positions = [kept_positions(requests[i], rollouts[i], settings.every) for i in group]
        kept = [start + p for start, own in zip(first_tokens(chosen), positions, strict=True) for p in own]
        with tensor_floats(settings.engine.sampler):
            hidden_PH = hidden_states(model, batch.tokens_P, batch.packing)[batch.predict_T[kept]]
            seeds = [requests[i].seed for i, own in zip(group, positions, strict=True) for _ in own]
            flat = [position for own in positions for position in own]
            if settings.engine.sampler.exact:
                chunks = chunked_logits(hidden_PH, weight_VH, scoring, seeds, flat)
                none_PV = weight_VH.new_empty(0, len(weight_VH))
                logits_PV = torch.cat([none_PV, *(part[: len(flat[rows])] for rows, part in chunks)])
            else:
                logits_PV = disturb(hidden_PH.float() @ weight_VH.T / settings.temperature, seeds, flat, dial)
        found.update(zip(group, torch.split(logits_PV, [len(own) for own in positions]), strict=True))
    return torch.cat([found[i] for i in range(len(rollouts))])


def first_tokens(rollouts: Sequence[Rollout]) -> list[int]:
    """The number of each response's first token among the tokens of all responses."""
    return [0, *itertools.accumulate(len(rollout.tokens) for rollout in rollouts[:-1])]


def kept_positions(request: Request, rollout: Rollout, every: int) -> list[int]:
    """The positions of a response at which logits are kept (`rollout.is_kept`)."""
    return [position for position in range(len(rollout.tokens)) if is_kept(request.seed, position, every)]
