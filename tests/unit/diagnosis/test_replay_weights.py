"""The replay's weights in NumPy against those of the objective in torch, which trains."""

import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from tailrl.config.arm import LIMITED, REMEDIES, Clip, Correction
from tailrl.config.rejection import Rejection
from tailrl.config.vocabulary import Vocabulary
from tailrl.diagnosis.log import Log, LoggedRow, pack
from tailrl.diagnosis.replay import catalogue
from tailrl.diagnosis.replay_weights import ReplaySettings, moved, token_weights
from tailrl.objective.corrections import weigh
from tailrl.objective.ratio_losses import RATIO_LOSSES, RatioTokens
from tailrl.objective.rejections import STATISTICS
from tailrl.objective.safe_set import safe_set
from tailrl.runtime.errors import NumericalError

NATS = [0.0, -1e-12, -1e-3, -0.1, -math.log(2), -math.log(5), -3.0, -9.3, -40.0, -100.0, -708.0, -1e6]
"""Log-probs whose differences lie on thresholds, at zero, and beyond what an exponential holds."""


def objective_weights(tokens: Log, settings: ReplaySettings) -> tuple[np.ndarray, np.ndarray] | None:
    """The weights and what `normalise` divides by, in float64 by torch; None: one overflows."""
    if isinstance(settings, Vocabulary):
        pairs = ((tokens.recomputed_T, tokens.trainer_top_T), (tokens.sampler_T, tokens.sampler_top_T))
        sets = [
            safe_set(torch.from_numpy(np.stack([np.nan_to_num(top_T), logp_T], 1)), "min_p", settings.threshold(1))
            for logp_T, top_T in pairs
        ]
        return (sets[0] & sets[1])[:, 1].double().numpy(), np.ones(0)
    sequence_T, sampler_T, advantage_T = (
        torch.from_numpy(getattr(tokens, name)) for name in ("sequence_T", "sampler_T", "advantage_T")
    )
    moved_T = torch.from_numpy(moved(tokens))
    delta_T = torch.from_numpy(tokens.recomputed_T - tokens.sampler_T)
    if isinstance(settings, Clip):
        sign_T = torch.where(advantage_T > 0, 1.0, -1.0).double()
        log_T = (delta_T + moved_T).requires_grad_()
        bounds = settings.bounds
        judged = RatioTokens(
            log_T, log_T, sign_T, sequence_T, len(tokens.start_S), bounds, settings.limit, dual=settings.dual_bound
        )
        term_T, _ = RATIO_LOSSES[settings.loss](judged)
        [gradient_T] = torch.autograd.grad(term_T.sum(), log_T)
        return ((gradient_T * sign_T).numpy(), np.ones(0)) if gradient_T.isfinite().all() else None
    try:
        found = weigh(delta_T, moved_T, sequence_T, len(tokens.start_S), settings, sampler_T, advantage_T)
    except NumericalError:
        return None
    return found.weight_T.numpy(), found.ratio_X.numpy()


def assert_equal(tokens: Log, settings: ReplaySettings) -> None:
    expected, found = objective_weights(tokens, settings), token_weights(tokens, settings)
    assert (found is None) == (expected is None), settings
    if found is None or expected is None:
        return
    np.testing.assert_allclose(found.weight_T, expected[0], rtol=1e-9, atol=1e-12, err_msg=repr(settings))
    if getattr(settings, "normalise", False):
        assert found.ratio_X is not None
        np.testing.assert_allclose(found.ratio_X, expected[1], rtol=1e-9, err_msg=repr(settings))
    else:
        assert found.ratio_X is None


def sound(sequence: list[int], infer: list[float], train: list[float], shift: list[float], advantage: list[float],
          top: list[float]) -> Log:  # fmt: skip
    """Tokens of responses in order."""
    rows = []
    for number in dict.fromkeys(sequence):
        own = [place for place, other in enumerate(sequence) if other == number]
        sampler_T, trainer_T, shift_T, advantage_T, top_T = (
            np.array(values, np.float64)[own] for values in (infer, train, shift, advantage, top)
        )
        row = LoggedRow(
            where="",
            sampler_T=sampler_T,
            trainer_T=trainer_T + shift_T,
            recomputed_T=trainer_T,
            advantage_T=advantage_T,
            trainer_top_T=np.maximum(top_T, trainer_T),
        )
        rows.append(row)
    return pack(rows)


@st.composite
def token_columns(draw: st.DrawFn) -> Log:
    """One to five responses of one to six tokens; log-probs from NATS or anywhere."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    sequence = [number for number, length in enumerate(lengths) for _ in range(length)]
    count = len(sequence)
    nats = st.sampled_from(NATS) | st.floats(-30, 0)
    advantages = draw(st.lists(st.sampled_from([-1.5, 0.0, 2.0]), min_size=len(lengths), max_size=len(lengths)))
    infer = draw(st.lists(nats, min_size=count, max_size=count))
    near = st.one_of(nats, st.floats(-0.5, 0.5).map(lambda shift: shift))
    shifts = draw(st.lists(near, min_size=count, max_size=count))
    close = draw(st.booleans())
    train = [min(a + b, 0.0) if close else min(b, 0.0) for a, b in zip(infer, shifts, strict=True)]
    shift = draw(st.lists(st.sampled_from([0.0, 0.1, -0.2, 5.0]), min_size=count, max_size=count))
    top = draw(st.lists(nats, min_size=count, max_size=count))
    return sound(sequence, infer, train, shift, [advantages[number] for number in sequence], top)


def catalogued() -> Iterator[ReplaySettings]:
    for remedy in catalogue().remedies.values():
        yield from (settings for _, settings in remedy.settings())


@pytest.mark.slow
@given(token_columns())
def test_every_remedy_of_the_table(tokens: Log) -> None:
    for settings in catalogued():
        assert_equal(tokens, settings)


def valid(kind: type, **fields: object) -> object | None:
    """The settings, or None where they refuse each other."""
    try:
        return kind(**fields)
    except ValidationError:
        return None


LIMITS = st.none() | st.sampled_from([0.5, 20.0])
REJECTIONS = st.builds(
    lambda **fields: valid(Rejection, **fields),
    of=st.sampled_from(list(STATISTICS)),
    by=st.sampled_from(["token", "segment", "sum", "mean", "max"]),
    above=st.none() | st.sampled_from([1e-3, 0.2, math.log(2)]),
    below=st.none() | st.sampled_from([-0.2, -math.log(2)]),
    ratio=st.sampled_from(["r_corr", "r_ppo", "r_rollout"]),
    when=st.sampled_from(["always", "negative", "outward"]),
).filter(lambda rule: rule is not None)
CORRECTIONS = st.builds(
    lambda **fields: valid(Correction, **fields),
    token=st.sampled_from(["none", "is", "tis", "mask"]),
    token_threshold=st.sampled_from([2.0, 5.0]),
    token_lower=st.none() | st.sampled_from([0.0, 0.5]),
    sequence=st.sampled_from(["none", *LIMITED, "geometric", "reject_k1", "reject_k3", *REMEDIES]),
    sequence_threshold=st.none() | st.sampled_from([1.001, 2.0, 1e30]),
    sequence_lower=st.none() | st.just(0.5),
    rejects=st.sampled_from(["r_corr", "r_ppo"]),
    reject=st.lists(REJECTIONS, max_size=2).map(tuple),
    veto=st.none() | st.just(1e-4),
    veto_above=st.none() | st.just(100.0),
    normalise=st.booleans(),
    log_ratio_limit=LIMITS,
).filter(lambda correction: correction is not None)
CLIPS = st.builds(
    lambda **fields: valid(Clip, **fields),
    loss=st.sampled_from(list(RATIO_LOSSES)),
    ratio=st.just("bypass"),
    low=st.sampled_from([0.2, 3e-4, 0.5]),
    high=st.sampled_from([0.2, 4e-4, 1.0]),
    log_ratio_limit=LIMITS,
    dual=st.none() | st.just(3.0),
).filter(lambda clip: clip is not None)


@given(token_columns(), CORRECTIONS | CLIPS)
def test_any_correction_and_any_loss(tokens: Log, settings: ReplaySettings) -> None:
    assert_equal(tokens, settings)


@pytest.mark.parametrize("settings", list(catalogued()), ids=lambda settings: repr(settings)[:60])
def test_one_token_on_each_threshold(settings: ReplaySettings) -> None:
    """A ratio of exactly 2, 5, 1/2 or 1, one token a response: the bounds themselves count on both sides."""
    for delta in (0.0, math.log(2), math.log(5), -math.log(2), -math.log(5), math.log(0.5), math.log(1e-4)):
        for advantage in (1.0, -1.0, 0.0):
            infer, train = (-50.0 - delta, -50.0) if delta > 0 else (-50.0, -50.0 + delta)
            assert_equal(sound([0], [infer], [train], [0.0], [advantage], [0.0]), settings)


def test_a_large_log() -> None:
    """Twenty thousand tokens, as a log has them, with every remedy of the table."""
    random = np.random.default_rng(5)
    sequence = np.sort(random.integers(0, 300, 20_000))
    sequence_T = np.cumsum(np.diff(sequence, prepend=sequence[:1]) != 0)
    trainer_T = -random.exponential(2.0, 20_000)
    sampler_T = np.minimum(trainer_T + random.normal(0, 0.3, 20_000), 0.0)
    advantage_T = random.normal(size=300)[sequence_T]
    tokens = sound(sequence_T.tolist(), sampler_T.tolist(), trainer_T.tolist(), [0.0] * 20_000, advantage_T.tolist(),
                   [0.0] * 20_000)  # fmt: skip
    for settings in catalogued():
        assert_equal(tokens, settings)
