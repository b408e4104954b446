"""Faults that a log shows exactly: each planted into tokens of two real distributions, and none in clean ones."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from tailrl.diagnosis.exact_checks import ExactChecks, fault_words
from tailrl.diagnosis.log import LoggedRow, pack

V, RESPONSES, LENGTH = 200, 40, 50


@dataclass
class Tokens:
    """Both sides' log-probs of the sampled tokens, [RESPONSES, LENGTH], and the sampler's largest at each place."""

    sampler: np.ndarray
    trainer: np.ndarray
    top: np.ndarray


def drawn(seed: int, noise: float = 0.02, temperature: float = 1.0, top_k: int = V, penalty: float = 0.0) -> Tokens:
    """Tokens drawn from the sampler's distribution; the trainer has other logits, by noise. All in float32."""
    generator = np.random.default_rng(seed)
    logits = 2.5 * generator.standard_normal((RESPONSES, LENGTH, V))
    seen = generator.random(logits.shape) < 0.1
    own = (logits + noise * generator.standard_normal(logits.shape) - penalty * seen) / temperature
    own = np.where(own >= np.sort(own, -1)[..., -top_k, None], own, -np.inf)
    logq = own - np.logaddexp.reduce(own, -1, keepdims=True)
    logp = logits - np.logaddexp.reduce(logits, -1, keepdims=True)
    gumbel = -np.log(-np.log(generator.random(logits.shape)))
    token = (logq + gumbel).argmax(-1)[..., None]
    picked = [np.take_along_axis(values, token, -1)[..., 0].astype(np.float32).astype(float) for values in (logq, logp)]
    return Tokens(*picked, logq.max(-1))


def faults_of(sampler: object, trainer: object, **more: object) -> list[str]:
    rows = [
        LoggedRow(f"row {n}", np.asarray(s, float), np.asarray(t, float), **{k: v[n] for k, v in more.items()})  # type: ignore[index, arg-type]
        for n, (s, t) in enumerate(zip(sampler, trainer, strict=True))  # type: ignore[call-overload]
    ]
    checks = ExactChecks()
    for begin in range(0, len(rows), 17):  # in parts
        checks.add(pack(rows[begin : begin + 17]))
    return [fault.name for fault in checks.faults()]


def bfloat16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x8000) & 0xFFFF0000).view(np.float32).astype(float)


def padded(values: np.ndarray, pad: float) -> np.ndarray:
    ends = np.random.default_rng(5).integers(20, LENGTH + 1, len(values))
    return np.where(np.arange(LENGTH) < ends[:, None], values, pad)


CLEAN: dict[str, Callable[[], Tokens]] = {
    "rounding": lambda: drawn(0),
    "a large mismatch": lambda: drawn(1, noise=1.0),
    "a cooler sampler": lambda: drawn(2, temperature=0.6),
    "a warmer sampler": lambda: drawn(3, temperature=1.5),
    "top-k": lambda: drawn(4, top_k=5),
    "a penalty": lambda: drawn(5, penalty=1.0),
    "one token left": lambda: drawn(6, top_k=1),
}

FIRST = np.arange(RESPONSES * LENGTH).reshape(RESPONSES, LENGTH) % 700 == 4  # three tokens

PLANTED: dict[str, tuple[str, Callable[[Tokens], tuple[np.ndarray, np.ndarray]]]] = {
    "a copy": ("copy", lambda t: (t.trainer, t.trainer)),
    "a constant": ("constant", lambda t: (np.zeros_like(t.sampler), t.trainer)),
    "another constant": ("constant", lambda t: (t.sampler, np.full_like(t.trainer, -1.5))),
    "negative log-likelihoods": ("negative", lambda t: (-t.sampler, -t.trainer)),
    "probabilities": ("probabilities", lambda t: (np.exp(t.sampler), np.exp(t.trainer))),
    "probabilities of one side": ("probabilities", lambda t: (np.exp(t.sampler), t.trainer)),
    "a fill of -9999": ("fill_value", lambda t: (t.sampler, np.where(FIRST, -9999.0, t.trainer))),
    "a fill of -1e30": ("fill_value", lambda t: (np.where(FIRST, -1e30, t.sampler), t.trainer)),
    "one side negated": ("negative", lambda t: (t.sampler, -t.trainer)),
    "base 2": ("base", lambda t: (t.sampler / math.log(2), t.trainer)),
    "base 10 of the trainer": ("base", lambda t: (t.sampler, t.trainer / math.log(10))),
    "padding of 0": ("padding", lambda t: (padded(t.sampler, 0.0), padded(t.trainer, 0.0))),
    "padding of 1": ("padding", lambda t: (padded(t.sampler, 1.0), padded(t.trainer, 1.0))),
    "padding of -100": ("padding", lambda t: (padded(t.sampler, -100.0), padded(t.trainer, -100.0))),
    "whole responses": ("filled", lambda t: (np.where(np.arange(RESPONSES)[:, None] % 8, t.sampler, 0), t.trainer)),
    "the first choice": ("first_choice", lambda t: (t.top, t.trainer)),
    "logits in 16 bits": ("grid", lambda t: (t.sampler, np.round(t.trainer * 16) / 16)),
    "rounded log-probs": ("sixteen_bits", lambda t: (bfloat16(t.sampler), t.trainer)),
    "float16 log-probs": ("sixteen_bits", lambda t: (t.sampler, t.trainer.astype(np.float16).astype(float))),
}


@pytest.mark.parametrize("name", CLEAN)
def test_no_mismatch_of_two_engines_is_a_fault(name: str) -> None:
    tokens = CLEAN[name]()
    # A sampler with one token left has log-prob 0 everywhere, which no log tells from a filling.
    expected = ["constant"] if name == "one token left" else []
    assert faults_of(tokens.sampler, tokens.trainer) == expected


# A large mismatch hides one factor between all log-probs, and where the other side is sure.
WITH_BASES = [("rounding", name) for name in PLANTED]
WITH_BASES += [
    ("a large mismatch", name) for name, (fault, _) in PLANTED.items() if fault not in ("base", "first_choice")
]


@pytest.mark.parametrize(("base", "name"), WITH_BASES)
def test_a_planted_fault_is_found_alone(name: str, base: str) -> None:
    expected, plant = PLANTED[name]
    assert faults_of(*plant(CLEAN[base]())) == [expected]


def in_batches(values: np.ndarray, pad: float, widths: tuple[int, ...], at_the_end: bool = True) -> list[np.ndarray]:
    """Responses of 20 to LENGTH tokens, padded to the width of their batch."""
    lengths = np.random.default_rng(5).integers(20, LENGTH + 1, len(values))
    rows = []
    for number, (row, length) in enumerate(zip(values, lengths, strict=True)):
        fill = np.full(widths[number * len(widths) // len(values)] - length, pad)
        rows.append(np.concatenate([row[:length], fill] if at_the_end else [fill, row[:length]]))
    return rows


@pytest.mark.parametrize("widths", [(50,), (50, 60), (70, 50, 60, 90)])
@pytest.mark.parametrize("pad", [0.0, -1.0, -9.5])
@pytest.mark.parametrize("at_the_end", [True, False])
def test_padding_of_each_batch_to_its_own_width(widths: tuple[int, ...], pad: float, at_the_end: bool) -> None:
    tokens = drawn(8)
    assert faults_of(*(in_batches(side, pad, widths, at_the_end) for side in (tokens.sampler, tokens.trainer))) == [
        "padding"
    ]


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("least", [20, LENGTH - 1, LENGTH])
def test_a_pruned_policys_zeros_are_no_padding(share: float, least: int) -> None:
    """Both sides have exactly 0 in runs, also where nearly all responses were cut at the same length."""
    tokens, generator = drawn(9), np.random.default_rng(3)
    forced = np.repeat(generator.random((RESPONSES, LENGTH)) < share, 3, axis=1)[:, :LENGTH]
    forced[:, :3] = True  # such as the words of a template
    lengths = generator.integers(least, LENGTH + 1, RESPONSES)
    sides = [
        [row[:length] for row, length in zip(np.where(forced, 0.0, side), lengths, strict=True)]
        for side in (tokens.sampler, tokens.trainer)
    ]
    assert faults_of(*sides) == []


def test_repetitions_of_different_tokens_are_no_padding() -> None:
    tokens = drawn(8)
    sides = [padded(side, 0.0) for side in (tokens.sampler, tokens.trainer)]
    loop = np.tile(np.arange(LENGTH) % 3, (RESPONSES, 1))
    assert faults_of(*sides, token_T=loop) == []
    assert faults_of(*sides, token_T=np.where(sides[0] == 0, 7, loop)) == ["padding"]


def test_versions_after_their_step() -> None:
    tokens = drawn(7)
    steps = np.arange(RESPONSES, dtype=float)
    assert faults_of(tokens.sampler, tokens.trainer, step=steps, version=steps - 3) == []
    assert faults_of(tokens.sampler, tokens.trainer, step=steps, version=steps + 1) == ["ahead"]


def test_nothing_is_said_of_nothing() -> None:
    assert ExactChecks().faults() == ()
    nothing = np.full((3, 4), np.nan)
    assert faults_of(nothing, nothing) == []
    assert faults_of([[-1.0, -2.0]], [[-1.0, -2.0]]) == []  # too few tokens to be sure


def test_every_fault_is_planted() -> None:
    assert {fault for fault, _ in PLANTED.values()} | {"ahead"} == fault_words().keys()
