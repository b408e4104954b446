"""Samples with an engine, scores with the trainer, and compares both: each token, and the whole vocabulary."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from tailrl.artifacts.probes import Positions
from tailrl.config.distributions import HEAD_BELOW, TAIL_FROM, Distributions
from tailrl.config.probe import ProbeSettings
from tailrl.config.vocabulary import log_rho
from tailrl.diagnosis.log import LoggedRow, seen_before
from tailrl.model.forward import make_exact, trained_length
from tailrl.model.policy import check_vocabulary, load_policy, load_tokenizer, local_folder
from tailrl.probes.distributions.comparison import EDGES
from tailrl.probes.distributions.measure import (
    both_logits,
    compare_in_parts,
    make_requests,
    sampled,
    self_tested,
    start_sampler,
    trainer_logits,
)
from tailrl.probes.model.columns import TokenColumns, token_columns
from tailrl.probes.model.prompts import DEFAULT_PROMPTS, encode_prompts, read_prompts
from tailrl.reports.distributions.numbers import Compared
from tailrl.rollout import Decoding, Sampler
from tailrl.rollout.prompts import show_prompts
from tailrl.rollout.sampling import stop_tokens
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime import distributed
from tailrl.runtime.errors import say

WHOLE_LOGITS = 2**23
"""Logits of the positions whose whole distributions are compared: about eight seconds of a core."""

ENGINE, FLOOR = "engine", "noise floor"

ALONE = 1
"""The noise floor's token budget: each response is a micro-batch of its own."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What a probe found.

    Attributes:
        model: its folder or name.
        rows: the responses as a log, one a response.
        engine: the engine's whole distributions against the trainer's.
        floor: the noise floor: the trainer's against its own, each response packed alone.
        vocabulary: the model's tokens.
        self_test: the largest error of the engine's log-probs against its own distribution, nats.
        tokenizer: the model's.
    """

    model: str
    rows: tuple[LoggedRow, ...]
    engine: Compared
    floor: Compared
    vocabulary: int
    self_test: float
    tokenizer: PreTrainedTokenizerBase


def probe_model(path: str, settings: ProbeSettings, prompts_file: Path | None = None) -> Probed:
    """Probes a Hugging Face folder or a model on the hub, and says on stderr what it does.

    Raises:
        StudyError: the model, its tokenizer or the prompts cannot be used; or the engine is not installed, refuses the
            model, or fails its self-test.
    """
    texts = read_prompts(prompts_file or DEFAULT_PROMPTS)
    say(f"reads {path}")
    tokenizer = load_tokenizer(path)
    model = load_policy(path).to(distributed.device())
    check_vocabulary(model.config, tokenizer, path)
    if settings.sampler.exact:
        make_exact(model)
    prompts, longest = encode_prompts(tokenizer, texts, trained_length(model.config), settings.max_new_tokens)
    show_prompts(tokenizer, prompts, stop_tokens(local_folder(path), tokenizer), path)
    compared = settings.compared(longest).decided(distributed.device().type == "cuda")
    say(f"starts the engine {settings.sampler.engine} in {settings.sampler.dtype}")
    sampler = start_sampler(compared, local_folder(path), model, max(map(len, prompts)) + longest)
    rule = "full" if settings.top_p == 1 else "top_p"
    decoding = Decoding(settings.temperature, longest, rule=rule, keep_every=compared.every)
    requests = [replace(request, threshold=settings.top_p) for request in make_requests(compared, prompts)]
    say(f"tests the engine, then samples {len(requests)} responses of at most {longest} tokens")
    tested = self_tested(sampler, requests, decoding, compared)
    batches = list(_scored(model, sampler, requests, decoding, compared))
    rows = tuple(replace(row, text=tokenizer.decode(row.token_T)) for batch in batches for row in batch.rows)
    return Probed(
        model=path,
        rows=rows,
        engine=_joined(ENGINE, compared, batches, len(prompts)),
        floor=_joined(FLOOR, compared, batches, len(prompts)),
        vocabulary=model.config.vocab_size,
        self_test=tested,
        tokenizer=tokenizer,
    )


class _Batch(NamedTuple):
    """Scored responses: as rows of a log; and of the positions whose whole distributions are compared the response,
    and the engine's and the noise floor's comparison."""

    rows: list[LoggedRow]
    response_P: NDArray[np.int64]
    engine: Positions
    floor: Positions


def _scored(
    model: PreTrainedModel, sampler: Sampler, requests: Sequence[Request], decoding: Decoding, settings: Distributions
) -> Iterator[_Batch]:
    vocabulary = model.config.vocab_size
    every = max(1, len(requests) * decoding.max_new_tokens * vocabulary // WHOLE_LOGITS)
    log_rhos = [log_rho(rho, vocabulary) for rho in settings.rho]
    seen = 0
    for start, chosen, rollouts in sampled(sampler, requests, decoding, settings, vocabulary):
        trainer_TV, sampler_TV = both_logits(model, chosen, rollouts, settings)
        again_TV = trainer_logits(model, chosen, rollouts, settings, ALONE).cpu()
        lengths = [len(rollout.tokens) for rollout in rollouts]
        tokens_T = torch.tensor([token for rollout in rollouts for token in rollout.tokens])
        log_kept_T = torch.from_numpy(np.concatenate([rollout.log_kept_sampler_T for rollout in rollouts])).double()
        columns = token_columns(trainer_TV, sampler_TV, again_TV, tokens_T, log_kept_T, log_rhos[0])
        split = [TokenColumns(*own) for own in zip(*(torch.split(column, lengths) for column in columns), strict=True)]
        picked = slice(-seen % every, None, every)  # every n-th of all tokens, the first among them
        seen += len(tokens_T)
        yield _Batch(
            [_row(f"response {start + i}", rollouts[i], own) for i, own in enumerate(split)],
            np.repeat(np.arange(start, start + len(rollouts)), lengths)[picked],
            *(
                compare_in_parts(trainer_TV[picked], other_TV[picked], tokens_T[picked], log_rhos)
                for other_TV in (sampler_TV, again_TV)
            ),
        )
        say(f"{start + len(rollouts)} of {len(requests)} responses sampled and scored")


def _row(where: str, rollout: Rollout, columns: TokenColumns) -> LoggedRow:
    named = {name: column.numpy() for name, column in columns._asdict().items()}
    whole_T = np.array([*rollout.prompt_tokens, *rollout.tokens], np.int64)
    place_T = np.arange(len(rollout.prompt_tokens), len(whole_T))
    return LoggedRow(
        where,
        token_T=whole_T[place_T],
        seen_T=seen_before(whole_T)[place_T],
        whole_T=whole_T,
        place_T=place_T,
        **named,
    )


def _joined(name: str, settings: Distributions, batches: Sequence[_Batch], prompts: int) -> Compared:
    """The comparison over all batches in the form of a study's."""
    floor = name == FLOOR
    engine = settings.engine.model_copy(update={"rescored": ALONE}) if floor else settings.engine
    found = Positions.joined([batch.floor if floor else batch.engine for batch in batches])
    response_P = np.concatenate([batch.response_P for batch in batches])
    record: dict[str, Any] = {
        "settings": settings.model_copy(update={"engine": engine}).model_dump(mode="json"),
        "edges": list(EDGES[:-1]),
        "head_below": HEAD_BELOW,
        "tail_from": TAIL_FROM,
    }
    arrays = {field.name: getattr(found, field.name) for field in fields(Positions)}
    return Compared(name, record, arrays | {"response_P": response_P, "problem_P": response_P % prompts})
