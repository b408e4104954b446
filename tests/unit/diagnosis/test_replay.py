"""Each remedy replayed, against loops over responses; what sets it in each framework; and which is advised."""

import math
from collections.abc import Callable, Iterator
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tailrl.config.arm import Arm, Correction
from tailrl.config.base import Kinds
from tailrl.config.vocabulary import Vocabulary
from tailrl.diagnosis.advice import FACTS, advice_rules, advise
from tailrl.diagnosis.causes import Cause, cause_words
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import measure
from tailrl.diagnosis.replay import (
    NEEDS_ADVANTAGES,
    P_TOP_UNKNOWN,
    Catalogue,
    PartSums,
    Replay,
    Replayed,
    catalogue,
    configuration,
    preset_of,
    weight_sums,
)

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
    "token_mask_low": lambda d, c: (math.exp(x) if 0.5 <= math.exp(x) <= c else 0.0 for x in d),
    "token_mask_upper": lambda d, c: (math.exp(x) if math.exp(x) <= c else 0.0 for x in d),
    "geometric_low": everywhere(lambda d, c: float(0.99 <= math.exp(sum(d) / len(d)) <= c)),
    "reject_mean_k2": everywhere(lambda d, c: float(sum(d**2 / 2) / len(d) <= c)),
    "reject_sum_k1": everywhere(lambda d, c: float(abs(sum(d)) <= c)),
    "reject_sum_k2": everywhere(lambda d, c: float(sum(d**2 / 2) <= c)),
    "reject_sum_k3": everywhere(lambda d, c: float(sum(np.exp(d) - 1 - d) <= c)),
    "reject_max_k3": everywhere(lambda d, c: float(max(np.exp(d) - 1 - d) <= c)),
    "reject_token_k1": lambda d, c: (float(abs(x) <= c) for x in d),
    "reject_token_k2": lambda d, c: (float(x**2 / 2 <= c) for x in d),
    "reject_token_k3": lambda d, c: (float(math.exp(x) - 1 - x <= c) for x in d),
    "cispo": lambda d, c: (min(max(math.exp(x), 1 - c), 1 + c) for x in d),
    "geometric_tis": everywhere(lambda d, c: min(math.exp(sum(d) / len(d)), c)),
    "geometric_mis": everywhere(lambda d, c: math.exp(sum(d) / len(d)) * (math.exp(sum(d) / len(d)) <= c)),
    "geometric_upper": lambda d, c: (math.exp(x) * (math.exp(sum(d) / len(d)) <= c) for x in d),
    "roll_token_ratio": lambda d, c: (float(0.8 <= math.exp(x) <= c) for x in d),
    "roll_geometric": everywhere(lambda d, c: float(0.8 <= math.exp(sum(d) / len(d)) <= c)),
    "roll_sequence": everywhere(lambda d, c: float(0.8 <= math.exp(sum(d)) <= c)),
    "token_tis_normalised": lambda d, c: (min(math.exp(x), c) / MEAN_TIS for x in d),
}
MEAN_TIS = np.mean([min(math.exp(x), 2.0) for row in ROWS for x in row.trainer_T - row.sampler_T])


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    """PPO's gradient of a ratio over A ∇ log π."""
    return 0.0 if (ratio > 1 + high and advantage > 0) or (ratio < 1 - low and advantage < 0) else ratio


def sapo(ratio: float, advantage: float) -> float:
    """d/dlog r of (4/τ) σ(τ (r − 1))."""
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    return 4 * gate * (1 - gate) * ratio


def vespo(ratio: float, advantage: float) -> float:
    k, rate = (2.0, 3.0) if advantage >= 0 else (3.0, 2.0)
    ratio = min(max(ratio, 1e-8), math.exp(20))
    return ratio**k * math.exp(rate * (1 - ratio))


def binary_kl(x: float, q: float) -> float:
    """KL of (q, 1 − q) from (p, 1 − p), with the sign of p − q."""
    p, q = math.exp(q + x), math.exp(q)
    if p == 1 and q < 1:
        return math.inf
    others = (1 - q) * math.log((1 - q) / (1 - p)) if q < 1 else 0.0
    return math.copysign(q * math.log(q / p) + others, p - q)


def gap(x: float, q: float) -> float:
    """|p − q|."""
    return abs(math.exp(q + x) - math.exp(q))


JUDGED: dict[str, Callable[[np.ndarray, np.ndarray, float, float], Iterator[float]]] = {
    "ppo_clip": lambda d, _, a, c: (clipped(math.exp(x), a, c, c) for x in d),
    "gspo": lambda d, _, a, c: iter([clipped(math.exp(d.mean()), a, 3e-4 if c == 4e-4 else c, c)] * len(d)),
    "sapo": lambda d, _, a, __: (sapo(math.exp(x), a) for x in d),
    "vespo": lambda d, _, a, __: iter([vespo(math.exp(sum(d)), a)] * len(d)),
    "ipo": lambda d, q, _, c: (math.exp(x) * (gap(x, y) <= c) for x, y in zip(d, q, strict=True)),
    "roll_token_diff": lambda d, q, _, c: (float(gap(x, y) <= c) for x, y in zip(d, q, strict=True)),
    "binary_kl": lambda d, q, _, c: (math.exp(x) * (abs(binary_kl(x, y)) <= c) for x, y in zip(d, q, strict=True)),
    "mean_binary_kl": lambda d, q, _, c: iter(
        np.exp(d) * (np.mean([abs(binary_kl(x, y)) for x, y in zip(d, q, strict=True)]) <= c)
    ),
    "kpop": lambda d, q, _, c: (
        math.exp(x) * (max(abs(binary_kl(x, y)), abs(binary_kl(-x, y + x))) <= c) for x, y in zip(d, q, strict=True)
    ),
    "dppo_kl": lambda d, q, a, c: (
        0.0 if binary_kl(x, y) * (1 if a > 0 else -1) > c else math.exp(x) for x, y in zip(d, q, strict=True)
    ),
}
"""Those of the advantage's sign or of both probabilities: Δ, the sampler's log-probs, A and the threshold → weights."""


@pytest.mark.parametrize("name", [*DEFINED, *JUDGED])
def test_each_remedy_against_its_definition(name: str) -> None:
    found = {threshold: one for (other, threshold), one in replayed(ROWS[:25], ROWS[25:]).items() if other == name}
    assert found
    for threshold, one in found.items():
        weights, advantages, kept_responses, dropped, k3 = [], [], 0, [], []
        for row in ROWS:
            delta = row.trainer_T - row.sampler_T
            assert row.advantage_T is not None
            if name in JUDGED:
                own = list(JUDGED[name](delta, row.sampler_T, float(row.advantage_T[0]), threshold))
            else:
                own = list(DEFINED[name](delta, threshold))
            weights += own
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
    assert catalogue().remedies.keys() == DEFINED.keys() | JUDGED.keys() | {"dvp", "opsm", "dppo_tv"}


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
        of_the_move = {"opsm", "dppo_tv", "cispo", *JUDGED}
        assert key[0] in of_the_move or one.ess == replayed(moved)[key].ess


def test_a_weight_that_overflows_is_said() -> None:
    row = LoggedRow("here", np.full(3, -400.0), np.full(3, -1.0))
    found = replayed([*ROWS, row])
    assert found["sequence_is", math.inf].largest == math.inf and found["sequence_is", math.inf].ess == 0
    assert found["sequence_tis", 2.0].largest == 2.0


def test_a_weight_whose_square_overflows_counts_nothing_at_a_token_without_an_advantage() -> None:
    """0 times an infinity would be NaN, and the gradient's direction with it."""
    of_tokens = np.array([[0.0, 1.0], [0.0, 1.0], [1.0, 1.0]])
    first_T, sequence_T = np.ones(2, bool), np.arange(2)
    known = PartSums(np.zeros(2), np.ones(2), sequence_T, first_T, {"advantage": of_tokens})
    found = weight_sums(np.array([1e200, 2.0]), known)
    assert (found["advantage_squared_aa"], found["advantage_squared_a"]) == (4.0, 4.0)
    assert found["advantage_squared_1"] == math.inf and found["advantage_weight_aa"] == 2.0


def test_lines_of_configuration() -> None:
    found = {one.framework: one for one in configuration("token_mask", 5.0)}
    assert found.keys() == {"verl", "TRL", "NeMo-RL", "slime", "SkyRL", "OpenRLHF", "tailrl"}
    assert "rollout_is_threshold='\"0.2_5\"'" in found["verl"].text
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


BENCHMARK = yaml.safe_load((Path(__file__).parents[3] / "benchmarks/remedies.yaml").read_text(encoding="utf-8"))


def shape(block: object) -> object:
    """What a remedy does, without its thresholds; two spellings of one rejection are one."""
    if not isinstance(block, Correction):
        return (type(block), getattr(block, "loss", None), getattr(block, "proximal", None))
    rules = {(rule.of, rule.by, rule.when) for rule in block.reject}
    sequence = block.sequence
    if sequence in ("reject_k1", "reject_k3"):
        rules, sequence = rules | {(sequence[-2:], "mean", "always")}, "none"
    vetoes = (block.veto is not None, block.veto_above is not None)
    lower = (block.token_lower is not None, block.sequence_lower is not None)
    return (block.token, sequence, lower, frozenset(rules), vetoes, block.normalise, block.centering)


def lost(known: Catalogue) -> list[str]:
    """Entries of the benchmarks' catalogue that are neither replayed nor listed as not replayed, or are both."""
    shapes = {shape(given) for remedy in known.remedies.values() for _, given in remedy.settings()}
    listed = [name for one in known.not_replayed for name in one.entries]
    assert len(listed) == len(set(listed)) and set(listed) <= {one["name"] for one in BENCHMARK}
    found = []
    for one in BENCHMARK:
        arm = Arm.model_validate({"deliberate": True, **one["arm"]})
        set_here = [block for block in (arm.clip, arm.correction, arm.vocabulary) if block in _changed(arm)]
        replayed_here = (
            len(set_here) == 1
            and arm.reference_kl is None
            and arm.vocabulary.side != "replay"
            and shape(set_here[0]) in shapes
        )
        if replayed_here == (one["name"] in listed):
            found.append(one["name"])
    return found


def _changed(arm: Arm) -> list[object]:
    default = {"clip": None, "correction": Correction(), "vocabulary": Vocabulary()}
    return [getattr(arm, name) for name, value in default.items() if getattr(arm, name) != value]


def test_each_remedy_of_the_benchmarks_is_replayed_or_listed_with_its_reason() -> None:
    assert not lost(catalogue())
    assert all(one.words for one in catalogue().not_replayed)


def test_a_remedy_that_is_left_out_is_seen() -> None:
    known = catalogue()
    for number, reason in enumerate(known.not_replayed):
        others = known.not_replayed[:number] + known.not_replayed[number + 1 :]
        assert lost(known.model_copy(update={"not_replayed": others})) == [
            one["name"] for one in BENCHMARK if one["name"] in reason.entries
        ]
    seen = set()
    for entry in ({shape(given) for _, given in remedy.settings()} for remedy in known.remedies.values()):
        kept = {
            name: remedy
            for name, remedy in known.remedies.items()
            if not entry & {shape(given) for _, given in remedy.settings()}
        }
        seen |= set(lost(known.model_copy(update={"remedies": kept})))
    listed = {name for one in known.not_replayed for name in one.entries}
    assert seen == {one["name"] for one in BENCHMARK} - listed


def test_a_printed_preset_is_what_was_replayed() -> None:
    named = 0
    for name, remedy in catalogue().remedies.items():
        for threshold, given in remedy.settings():
            [*_, own] = configuration(name, threshold)
            printed = yaml.safe_load(own.text)
            block = (given.whole() if isinstance(given, Kinds) else type(given)).__name__.lower()
            if "preset" in printed.get("correction", {}):
                named += 1
                assert own.text.splitlines()[1].startswith("# the same: " + block)
                others = {"clip", "correction", "vocabulary"} - {block}
                arm = Arm.model_validate(printed)
                assert all(getattr(arm, other) == getattr(Arm(), other) for other in others)
            parsed = getattr(Arm.model_validate({"deliberate": True, **printed}), block)
            limit = getattr(parsed, "log_ratio_limit", None)
            assert ("with log-ratios clamped to 20 nats" in own.text) == (limit is not None)
            assert (parsed.model_copy(update={"log_ratio_limit": None}) if limit else parsed) == given
    assert named >= 12


def test_a_preset_of_the_logs_framework_comes_first() -> None:
    for framework, preset in (("", "verl"), ("skyrl", "skyrl"), ("prime-rl", "verl")):
        [*_, own] = configuration("token_tis", 2.0, framework)
        assert own.text.startswith(f"correction: {{preset: {preset}/")
    assert preset_of(Correction(token="tis", token_threshold=1.5)) is None


OLD = [replace(row, recomputed_T=row.sampler_T) for row in ROWS]  # the mismatch is between the trainer's own numbers
COARSE = [response(20, 0.15) for _ in range(30)]
HOPELESS = [LoggedRow("here", np.full(1, -9.0 * (i == 0)), np.full(1, -9.0 * (i > 0))) for i in range(50)]
CLEAN = [response(8, 0.01) for _ in range(30)]


@pytest.mark.parametrize(
    ("rows", "causes", "kind", "name"),
    [
        (CLEAN, [], "none", None),
        ([LoggedRow("here", np.array([np.nan]), np.array([-1.0]))], [], "fix", None),
        (CLEAN, [Cause("temperature", 0.9, ())], "fix", None),  # too small for weights
        (CLEAN, [Cause("precision", 0.9, ())], "none", None),
        (ROWS, [Cause("precision", 0.9, ())], "fix", None),  # larger than number formats give
        (COARSE, [Cause("precision", 0.9, ())], "ask", None),
        (ROWS, [Cause("routing", 0.9, ())], "none", None),
        (ROWS, [Cause("shift", 0.9, ()), Cause("stale", 0.8, ())], "fix", None),
        (OLD, [Cause("stale", 0.9, ()), Cause("prompt", 0.8, ())], "fix", "reject_k3"),  # what can be mended first
        (ROWS, [Cause("temperature", 0.4, ())], "fix", None),
        (ROWS, [], "fix", None),
        (ROWS, [Cause("stale", 0.9, ())], "fix", None),  # no age is seen: the weights may be others
        (OLD, [Cause("stale", 0.9, ())], "remedy", "token_tis"),
        (HOPELESS, [Cause("stale", 0.9, ())], "fix", None),
        (HOPELESS, [], "fix", None),
        (ROWS, [Cause("floor", 0.9, ())], "beyond", None),  # nothing takes this mismatch away
    ],
)
def test_the_rule_of_advice(rows: list[LoggedRow], causes: list[Cause], kind: str, name: str | None) -> None:
    measured, table = measure([("a", pack(rows))]), tuple(replayed(rows).values())
    found = advise(measured, causes, table)
    assert (found.kind, found.name) == (kind, name) and found.words.endswith(".")


def test_until_a_cause_is_fixed_its_responses_are_dropped() -> None:
    """One response in ten has another prompt; in SkyRL's lines, where it has some."""
    rows = [response(20, 2.0 if i % 10 == 0 else 0.01) for i in range(60)]
    measured, table = measure([("a", pack(rows))]), tuple(replayed(rows).values())
    causes = [Cause("prompt", 0.9, ())]
    found = advise(measured, causes, table)
    assert (found.kind, found.name, found.threshold) == ("fix", "reject_k3", 0.1)
    assert "90% of the responses" in found.gives
    assert advise(measured, causes, table, framework="SkyRL").name == "geometric"


def test_each_rule_of_advice_names_what_there_is() -> None:
    root = Path(__file__).parents[3]
    for rule in advice_rules().rules:
        assert rule.fact is None or rule.fact in FACTS
        assert set(rule.causes or ()) <= set(cause_words())
        assert not rule.finding or (root / rule.finding).is_file(), rule.finding
        assert rule.finding or rule.kind == "fix", "what helps or is not needed has been seen somewhere"
        for choice in rule.remedies:
            assert rule.kind != "fix" or "tis" not in choice.name, "no weights where a cause is to be fixed"
            thresholds = [threshold for threshold, _ in catalogue().remedies[choice.name].settings()]
            assert choice.threshold in (None, *thresholds), rule.name
    last = advice_rules().rules[-1]
    assert last.fact is None and last.causes is None and math.isinf(last.k3_upto)
    assert set(cause_words()) == {name for rule in advice_rules().rules for name in rule.causes or ()}


def test_dvp_is_advised_where_it_takes_the_mismatch_away() -> None:
    """One token in ten is drawn at random from a tail of 1e-5, where the sampler has 1e-3."""
    train = np.log(np.where(np.arange(200) % 10 == 3, 1e-5, 0.5))
    infer = np.log(np.where(np.arange(200) % 10 == 3, 1e-3, 0.499))
    top = np.full(200, np.log(0.5))
    rows = [LoggedRow("here", infer, train, trainer_top_T=top, sampler_top_T=top)]
    measured, table = measure([("a", pack(rows))]), tuple(replayed(rows).values())
    found = advise(measured, [Cause("floor", 0.9, ())], table)
    assert (found.kind, found.name, found.threshold) == ("remedy", "dvp", 1e-4)
    assert "keeps 90.0% of the tokens" in found.gives
