"""The token explorer: responses as data for the page's script, which colours tokens and replays remedies on them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.metrics import FloatArray
from tailrl.runtime.errors import ConfigurationError, ModelError, reason
from tailrl.runtime.extras import not_installed

TOKENS_OF_A_RESPONSE = 2000
"""The explorer shows this many tokens of a longer response, around its largest mismatch."""

TOKENS_OF_A_PAGE = 20_000
"""A page holds at most this many tokens, so that it stays below a few megabytes."""

LETTERS_OF_A_TEXT, LETTERS_OF_A_TOKEN = 20_000, 200

ABOVE_ZERO = 1e-5
"""Nats above 0 that rounding may give a log-prob; a token beyond it has none."""

ODD_NATS = 1.0
"""What a token without two log-probs counts for in a response's mean |Δ|: more than any rounding."""

READ_COLUMNS = ("sampler", "trainer", "advantage", "trainer_top", "sampler_top", "rank", "trainer_set", "sampler_set")
"""The columns of a response that the page's script reads, beside `token` and `texts`."""


@dataclass(frozen=True, slots=True)
class Response:
    """A response of T tokens, as logged; NaN (of a token: −1): not logged.

    Attributes:
        sampler_T, trainer_T: float64, nats, the log-probs of the sampled tokens.
        token_T: int64, their ids. advantage_T: float64.
        trainer_top_T, sampler_top_T: float64, nats, the largest log-prob of each side at the token's position.
        rank_T: float64, the token's place in the trainer's distribution, from 0.
        trainer_set_T, sampler_set_T: float64, the tokens in each side's safe set at the token's position.
        step, reward: of the response.
        text: the whole response. texts: each token's text; empty if none is known.
        name: where it comes from, such as an arm and a seed.
    """

    sampler_T: FloatArray
    trainer_T: FloatArray
    token_T: NDArray[np.int64]
    advantage_T: FloatArray
    trainer_top_T: FloatArray
    sampler_top_T: FloatArray
    rank_T: FloatArray
    trainer_set_T: FloatArray
    sampler_set_T: FloatArray
    step: float
    reward: float
    text: str | None
    texts: tuple[str, ...] = ()
    name: str = ""


def delta(sampler_T: FloatArray, trainer_T: FloatArray) -> FloatArray:
    """Δ of each token, nats; NaN for a token without two log-probs (NaN, infinite or above 0)."""
    with np.errstate(invalid="ignore"):
        odd_T = ~(np.isfinite(sampler_T) & np.isfinite(trainer_T))
        odd_T |= (sampler_T > ABOVE_ZERO) | (trainer_T > ABOVE_ZERO)
        found: FloatArray = np.where(odd_T, np.nan, np.minimum(trainer_T, 0.0) - np.minimum(sampler_T, 0.0))
    return found


def mean_mismatch(
    sampler_T: FloatArray, trainer_T: FloatArray, sequence_T: NDArray[np.int64], count: int
) -> FloatArray:
    """The mean |Δ| of each of `count` responses, nats; a token without two log-probs counts as ODD_NATS."""
    size_T = np.abs(delta(sampler_T, trainer_T))
    size_T = np.where(np.isnan(size_T), ODD_NATS, size_T)
    sums_S, tokens_S = np.bincount(sequence_T, size_T, count), np.bincount(sequence_T, minlength=count)
    found: FloatArray = sums_S / np.maximum(tokens_S, 1)
    return found


def without_text(response: Response) -> Response:
    """The response without its text, its tokens' texts and their ids."""
    return replace(response, text=None, texts=(), token_T=np.full(len(response.token_T), -1))


def explorer_data(responses: Iterable[Response]) -> list[dict[str, Any]]:
    """The responses as plain data for JSON, in their order, until TOKENS_OF_A_PAGE are reached."""
    shown: list[dict[str, Any]] = []
    tokens = 0
    for response in responses:
        length = min(len(response.token_T), TOKENS_OF_A_RESPONSE)
        if not length:
            continue
        tokens += length
        if shown and tokens > TOKENS_OF_A_PAGE:
            break
        shown.append(_plain(response, len(shown) + 1))
    return shown


def _plain(response: Response, place: int) -> dict[str, Any]:
    """A response as plain data. What the page leaves out of it counts for weights of the whole: `rest`, `least`."""
    delta_T = delta(response.sampler_T, response.trainer_T)
    begin, end = _window(delta_T)
    outer_T = np.delete(delta_T, slice(begin, end))
    outer_T = outer_T[~np.isnan(outer_T)]
    found: dict[str, Any] = {
        "title": _title(response, delta_T, place),
        "begin": begin,
        "length": len(delta_T),
        "rest": _number(float(outer_T.sum())),
        "least": _number(float(outer_T.min())) if outer_T.size else 0.0,
        "token": response.token_T[begin:end].tolist(),
        "texts": [text[:LETTERS_OF_A_TOKEN] for text in response.texts[begin:end]],
        "text": response.text and response.text[:LETTERS_OF_A_TEXT],
    }
    for name in READ_COLUMNS:
        values_T = getattr(response, f"{name}_T")[begin:end]
        if name in ("sampler", "trainer") or not np.isnan(values_T).all():
            found[name] = [_number(value) for value in values_T.tolist()]
    return found


def _window(delta_T: FloatArray) -> tuple[int, int]:
    """The tokens that are shown: all, or those around the largest mismatch; a token without log-probs counts first."""
    if len(delta_T) <= TOKENS_OF_A_RESPONSE:
        return 0, len(delta_T)
    centre = int(np.argmax(np.where(np.isnan(delta_T), np.inf, np.abs(delta_T))))
    begin = min(max(0, centre - TOKENS_OF_A_RESPONSE // 2), len(delta_T) - TOKENS_OF_A_RESPONSE)
    return begin, begin + TOKENS_OF_A_RESPONSE


def _number(value: float) -> float | str:
    """A number of seven digits; JSON has no NaN and no infinity, so they are words that JavaScript reads."""
    if math.isfinite(value):
        return float(f"{value:.7g}")
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _title(response: Response, delta_T: FloatArray, place: int) -> str:
    known_T = np.abs(delta_T[~np.isnan(delta_T)])
    parts = [response.name, f"{len(delta_T):,} tokens"]
    parts += [f"mean |Δ| {known_T.mean():.3g}"] if known_T.size else ["no log-probs"]
    for name in ("step", "reward"):
        if not math.isnan(value := getattr(response, name)):
            parts.append(f"{name} {value:g}")
    return f"{place}. {', '.join(filter(None, parts))}"


def token_texts(tokenizer: Any, tokens: Sequence[int]) -> tuple[str, ...]:
    """Each token's text by a tokenizer of `tokenizers`: what it adds to the text of the few tokens before it.

    A token by itself may lose its leading space, or hold a part of a letter; such a part is shown as `�`.
    """
    found = []
    for i, token in enumerate(tokens):
        before = tokenizer.decode(list(tokens[max(0, i - 4) : i]), skip_special_tokens=False)
        whole = tokenizer.decode(list(tokens[max(0, i - 4) : i + 1]), skip_special_tokens=False)
        adds = whole.startswith(before) and len(whole) > len(before)
        found.append(whole[len(before) :] if adds else tokenizer.decode([token], skip_special_tokens=False))
    return tuple(found)


def read_tokenizer(path: Path) -> Any:
    """The tokenizer in a tokenizer.json, or in a model's folder; raises StudyError if there is none."""
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError as error:
        raise ConfigurationError(not_installed(error, "--tokenizer") or str(error)) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library's errors are plain exceptions
        raise ModelError(f"{file}: is no tokenizer.json: {reason(error)}") from None


def with_texts(responses: Sequence[Response], tokenizer: Any) -> tuple[Response, ...]:
    """The responses with each token's text by a tokenizer of `tokenizers`; those without token ids stay as they are."""
    return tuple(
        replace(response, texts=token_texts(tokenizer, response.token_T.tolist()))
        if (response.token_T >= 0).all()
        else response
        for response in responses
    )
