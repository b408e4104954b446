"""Each remedy replayed, against loops over responses; what sets it in each framework; and which is advised."""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple

import numpy as np
import pytest

from tailrl.config.arm import Correction
from tailrl.diagnosis.advice import HEALTHY_ESS, NO_HARM, advise
from tailrl.diagnosis.causes import Cause
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import measure
from tailrl.diagnosis.replay import NEEDS_ADVANTAGES, P_TOP_UNKNOWN, Replay, Replayed, catalogue, configuration

RANDOM = np.random.default_rng(11)


def response(length: int, size: float = 1.0, **more: object) -> LoggedRow:
    train = -RANDOM.exponential(2.0, length)
    infer = np.minimum(train + RANDOM.normal(0, size, length), 0.0)
    return LoggedRow("here", infer, train, advantage_T=np.full(length, RANDOM.normal()), **more)  # type: ignore[arg-type]


ROWS = [response(int(length)) for length in RANDOM.integers(1, 12, 60)]


def replayed(*parts: list[LoggedRow]) -> dict[tuple[str, float], Replayed]:
    replay = Replay()
    for rows in parts:
        replay.add(pack(rows))
    return {(one.name, one.threshold): one for one in replay.table()}


Weigh = Callable[[np.ndarray, float], Iterator[float]]


def everywhere(weight: Callable[[np.ndarray, float], float]) -> Weigh:
    """A response's weight at each of its tokens."""
    return lambda d, c: iter([weight(d, c)] * len(d))


DEFINED: dict[str, Weigh] = {
    "token_tis": lambda d, c: (min(math.exp(x), c) for x in d),
    "token_mask": lambda d, c: (math.exp(x) if 1 / c <= math.exp(x) <= c else 0.0 for x in d),
    "sequence_is": everywhere(lambda d, _: math.exp(sum(d))),
    "sequence_tis": everywhere(lambda d, c: min(math.exp(sum(d)), c)),
    "mis": everywhere(lambda d, c: math.exp(sum(d)) * (math.exp(sum(d)) <= c)),
    "geometric": everywhere(lambda d, c: float(1 / c <= math.exp(sum(d) / len(d)) <= c)),
    "reject_k1": everywhere(lambda d, c: float(abs(sum(d) / len(d)) <= c)),
    "reject_k3": everywhere(lambda d, c: float(sum(math.exp(x) - 1 - x for x in d) / len(d) <= c)),
    "token_tis_two_sided": lambda d, c: (min(max(math.exp(x), 0.5), c) for x in d),
    "geometric_token_is": lambda d, c: (math.exp(x) * (1 / c <= math.exp(sum(d) / len(d)) <= c) for x in d),
    "reject_max_k2": everywhere(lambda d, c: float(max(d**2 / 2) <= c)),
    "trm": everywhere(lambda d, c: float(max(d**2 / 2) <= c and (np.exp(d) - 1 - d).mean() <= 0.01)),
    "outlier_veto": everywhere(lambda d, c: float(all(1e-4 <= math.exp(x) <= c for x in d))),
    "veto": everywhere(lambda d, c: float(all(math.exp(x) >= c for x in d))),
}


@pytest.mark.parametrize("name", DEFINED)
def test_each_remedy_against_its_definition(name: str) -> None:
    found = {threshold: one for (other, threshold), one in replayed(ROWS[:25], ROWS[25:]).items() if other == name}
    assert found
    for threshold, one in found.items():
        weights, advantages, kept_responses, dropped, k3 = [], [], 0, [], []
        for row in ROWS:
            delta = row.trainer_T - row.sampler_T
            own = list(DEFINED[name](delta, threshold))
            weights += own
            assert row.advantage_T is not None
            advantages += row.advantage_T.tolist()
            kept_responses += any(own)
            dropped += [math.exp(p) for p, w in zip(row.trainer_T, own, strict=True) if not w]
            k3 += [math.exp(x) - 1 - x for x, w in zip(delta, own, strict=True) if w]
        w, a = np.array(weights), np.array(advantages)
        expected = {
            "kept_tokens": (w > 0).mean(),
            "kept_responses": kept_responses / len(ROWS),
            "ess": w.sum() ** 2 / len(w) / (w**2).sum() if w.any() else 0.0,
            "largest": w.max(),
            "cosine": (w * a) @ a / math.sqrt(((w * a) @ (w * a)) * (a @ a)) if w.any() else math.nan,
            "dropped_prob": np.mean(dropped) if dropped else math.nan,
            "kept_k3": np.mean(k3) if k3 else math.nan,
        }
        for field, value in expected.items():
            assert getattr(one, field) == pytest.approx(value, rel=1e-9, nan_ok=True), (threshold, field)


def test_every_remedy_of_the_file_has_a_definition_here() -> None:
    """A remedy that is added to `replay.yaml` is added to DEFINED or to this list, with a test of its own."""
    assert catalogue().remedies.keys() == DEFINED.keys() | {"dvp", "opsm", "dppo_tv"}


def test_what_judges_by_the_advantage() -> None:
    """A gap of 0.3 in probability, and a mean log-ratio of −0.51 or 0.41, at both signs of the advantage."""
    down, up = np.log([0.2, 0.5]), np.log([0.5, 0.2])
    rows = [
        LoggedRow("here", infer[:1], train[:1], advantage_T=np.full(1, sign))
        for infer, train in ((down, up), (up, down))
        for sign in (1.0, -1.0)
    ]
    found = replayed(rows)
    assert found["dppo_tv", 0.2].kept_tokens == 0.5 and found["dppo_tv", 0.2].largest == pytest.approx(2.5)
    assert found["opsm", 0.5].kept_responses == 0.75  # of the two that fell, the one with a negative advantage
    without = replayed([LoggedRow("here", row.sampler_T, row.trainer_T, reward=1.0) for row in rows])
    assert without["opsm", 0.5].note == NEEDS_ADVANTAGES and math.isnan(without["opsm", 0.5].kept_tokens)
    assert without["mis", 2.0].note == ""


def test_parts_without_advantages_are_not_judged_by_them() -> None:
    """Against loops over the responses that have an advantage, of the whole table, in two orders of its parts."""
    bare = [LoggedRow("here", row.sampler_T, row.trainer_T, reward=1.0) for row in (response(5) for _ in range(30))]
    judged = [(row.trainer_T - row.sampler_T, row.sampler_T, float(row.advantage_T[0])) for row in ROWS]  # type: ignore[index]
    tokens = sum(len(delta) for delta, _, _ in judged)
    for parts in ([bare, ROWS], [ROWS[:20], bare, ROWS[20:]], [[*ROWS[:9], *bare, *ROWS[9:]]]):
        found = replayed(*parts)
        for threshold in (t for name, t in found if name == "opsm"):
            one = found["opsm", threshold]
            kept = [not (a < 0 and -delta.mean() > threshold) for delta, _, a in judged]
            assert one.kept_responses == pytest.approx(np.mean(kept)) and np.mean(kept) < 1
            kept_tokens = sum(len(delta) for (delta, _, _), k in zip(judged, kept, strict=True) if k)
            assert one.kept_tokens == pytest.approx(kept_tokens / tokens)
        for threshold in (t for name, t in found if name == "dppo_tv"):
            gap = [(np.exp(q) * np.expm1(d), a) for d, q, a in judged]
            kept_tokens = sum(int(((x <= threshold) if a > 0 else (x >= -threshold)).sum()) for x, a in gap)
            one = found["dppo_tv", threshold]
            assert one.kept_tokens == pytest.approx(kept_tokens / tokens) and kept_tokens < tokens
            assert one.note == f"of the {tokens / (tokens + 150):.1%} of the tokens that have advantages"
        alone, mixed = replayed(ROWS), replayed(*parts)
        assert mixed["token_tis", 2.0].cosine == pytest.approx(alone["token_tis", 2.0].cosine, rel=1e-9)
        assert mixed["token_tis", 2.0].note == ""


def test_dvp_keeps_what_lies_in_both_sets() -> None:
    top = np.log(0.5)
    row = LoggedRow(
        "here",
        sampler_T=np.log([0.5, 0.006, 0.5, 0.006, 1e-7]),
        trainer_T=np.log([0.5, 0.5, 0.004, 0.006, 1e-7]),
        trainer_top_T=np.full(5, top),
        sampler_top_T=np.full(5, top),
    )
    found = replayed([row])
    assert found["dvp", 1e-2].kept_tokens == 3 / 5 and found["dvp", 1e-2].note == ""
    assert found["dvp", 1e-2].dropped_prob == pytest.approx((0.004 + 1e-7) / 2)
    assert found["dvp", 1e-3].kept_tokens == 4 / 5
    assert found["dvp", float(f"{math.exp(-13):.12g}")].kept_tokens == 4 / 5
    bound = replayed([LoggedRow("here", row.sampler_T, row.trainer_T)])
    assert bound["dvp", 1e-2].kept_tokens == 1 / 5 and bound["dvp", 1e-2].note == P_TOP_UNKNOWN


def test_a_cut_and_odd_tokens_change_nothing() -> None:
    odd = LoggedRow("here", np.array([np.nan, -1.0, -1.0, 0.5]), np.array([-1.0, -np.inf, np.nan, -1.0]))
    whole, cut = replayed(ROWS), replayed(ROWS[:1], [odd], ROWS[1:40], [odd], ROWS[40:])
    assert whole.keys() == cut.keys()
    for key, one in whole.items():
        assert astuple(one)[2:-1] == pytest.approx(astuple(cut[key])[2:-1], rel=1e-9, nan_ok=True)
    assert Replay().table() == () and replayed([odd]) == {}


def test_rewards_stand_for_advantages() -> None:
    rows = [LoggedRow("here", row.sampler_T, row.trainer_T, reward=float(i % 3)) for i, row in enumerate(ROWS)]
    mean = np.mean([row.reward for row in rows])
    advantage_T = np.concatenate([np.full(len(row.sampler_T), row.reward - mean) for row in rows])
    w_T = np.minimum(np.exp(np.concatenate([row.trainer_T - row.sampler_T for row in rows])), 2.0)
    expected = (w_T * advantage_T) @ advantage_T
    expected /= math.sqrt(((w_T * advantage_T) @ (w_T * advantage_T)) * (advantage_T @ advantage_T))
    assert replayed(rows[:9], rows[9:])["token_tis", 2.0].cosine == pytest.approx(expected, rel=1e-9)
    without = [LoggedRow("here", row.sampler_T, row.trainer_T) for row in ROWS]
    assert math.isnan(replayed(without)["token_tis", 2.0].cosine)


def test_the_mismatch_is_that_of_the_updates_begin() -> None:
    """The log-probs of a later point of the update say how far the trainer moved, not the mismatch."""
    moved = [
        LoggedRow("here", row.sampler_T, np.minimum(row.trainer_T - 1.0, 0), recomputed_T=row.trainer_T) for row in ROWS
    ]
    without = [LoggedRow("here", row.sampler_T, row.trainer_T) for row in ROWS]
    assert replayed(moved).keys() == replayed(without).keys()
    for key, one in replayed(without).items():
        assert key[0] in ("opsm", "dppo_tv") or one.ess == replayed(moved)[key].ess


def test_a_weight_that_overflows_is_said() -> None:
    row = LoggedRow("here", np.full(3, -400.0), np.full(3, -1.0))
    found = replayed([*ROWS, row])
    assert found["sequence_is", math.inf].largest == math.inf and found["sequence_is", math.inf].ess == 0
    assert found["sequence_tis", 2.0].largest == 2.0


def test_lines_of_configuration() -> None:
    found = {one.framework: one for one in configuration("token_mask", 5.0)}
    assert found.keys() == {"verl", "TRL", "NeMo-RL", "slime", "SkyRL", "OpenRLHF", "tailrl"}
    assert 'rollout_is_threshold="0.2_5"' in found["verl"].text
    assert "clip_min=0.2, vllm_importance_sampling_clip_max=5)" in found["TRL"].text
    assert found["NeMo-RL"].version == "7ea279a" and found["NeMo-RL"].source.endswith("loss_functions.py:144")
    [*_, own] = configuration("reject_k3", 0.01)
    assert own.text == "correction: {sequence: reject_k3, sequence_threshold: 0.01}"
    [*_, own] = configuration("dvp", 1e-3)
    assert own.text == "vocabulary: {rho: 1e-3, rule: min_p}"


def test_every_try_has_its_lines() -> None:
    for name, remedy in catalogue().remedies.items():
        assert set(remedy.lines) <= catalogue().versions.keys()
        for threshold, settings in remedy.settings():
            for one in configuration(name, threshold):
                assert "{C}" not in one.text and "{low}" not in one.text and one.source
            assert not isinstance(settings, Correction) or settings.weighted or settings.vetoes


HOPELESS = [LoggedRow("here", np.full(1, -9.0 * (i == 0)), np.full(1, -9.0 * (i > 0))) for i in range(50)]
CLEAN = [response(8, 0.01) for _ in range(30)]


@pytest.mark.parametrize(
    ("rows", "causes", "kind", "name"),
    [
        (CLEAN, [], "none", None),
        ([LoggedRow("here", np.array([np.nan]), np.array([-1.0]))], [], "fix", None),
        (CLEAN, [Cause("temperature", 0.9, ())], "fix", None),
        (ROWS, [Cause("shift", 0.9, ()), Cause("stale", 0.8, ())], "fix", None),
        (ROWS, [Cause("temperature", 0.4, ())], "remedy", "token_tis"),
        (ROWS, [], "remedy", "token_tis"),
        (ROWS, [Cause("stale", 0.9, ())], "remedy", "token_tis"),
        (ROWS, [Cause("floor", 0.9, ())], "remedy", "token_tis"),  # no ρ takes this mismatch away
        (
            [LoggedRow("here", np.full(1, -9.0 * (i == 0)), np.full(1, -9.0 * (i > 0))) for i in range(50)],
            [],
            "beyond",
            None,
        ),
    ],
)
def test_the_rule_of_advice(rows: list[LoggedRow], causes: list[Cause], kind: str, name: str | None) -> None:
    measured, table = measure([("a", pack(rows))]), tuple(replayed(rows).values())
    found = advise(measured, causes, table)
    assert (found.kind, found.name) == (kind, name) and found.words.endswith(".")


def test_dvp_is_advised_where_it_takes_the_mismatch_away() -> None:
    """One token in ten is drawn at random from a tail of 1e-5, where the sampler has 1e-3."""
    train = np.log(np.where(np.arange(200) % 10 == 3, 1e-5, 0.5))
    infer = np.log(np.where(np.arange(200) % 10 == 3, 1e-3, 0.499))
    top = np.full(200, np.log(0.5))
    rows = [LoggedRow("here", infer, train, trainer_top_T=top, sampler_top_T=top)]
    measured, table = measure([("a", pack(rows))]), tuple(replayed(rows).values())
    found = advise(measured, [Cause("floor", 0.9, ())], table)
    assert (found.kind, found.name, found.threshold) == ("remedy", "dvp", 1e-4)
    assert "keeps 90.0% of the tokens" in found.words
    assert HEALTHY_ESS > 0 and NO_HARM > 0
