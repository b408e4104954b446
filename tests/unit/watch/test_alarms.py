"""Each alarm on runs whose numbers are made here: silent while nothing is wrong, raised where it is."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tailrl.runtime.errors import StudyError
from tailrl.watch import Alarms, Step
from tailrl.watch.alarms import catalogue, check_names


def clean(number: int, seed: int = 0) -> Step:
    """A step of a synchronous run: the level varies by 10 %, and 2 of 10,000 tokens are far off."""
    random = np.random.default_rng([seed, number])
    return Step(
        number,
        tokens=10_000,
        responses=64,
        lag=0.0,
        floor_tokens=10_000,
        level=0.02 * float(np.exp(random.normal(0, 0.1))),
        mean_abs=0.01 * float(np.exp(random.normal(0, 0.3))),
        k3=1e-4 * float(np.exp(random.normal(0, 0.6))),
        tail=float(random.poisson(2)),
        confident=float(random.random() < 0.02),
        unsound=0.0,
        outside=0.002,
        ess=0.999,
        unsure=4000,
        equal=float(random.poisson(20)),
        version=float(number),
        ahead=0.0,
        ahead_by=0.0,
        digest=f"digest {number}",
        clip=0.001,
        learning_rate=1e-5,
        slope=1.14,
        shift=1e-8,
        alike_prompts=0,
        alike_nats=0.0,
        prompts=frozenset(random.integers(1, 1 << 40, 8).tolist()),
        replies=frozenset(random.integers(1, 1 << 40, 60).tolist()),
    )


def raised(steps: list[Step], **options: object) -> list[list[str]]:
    alarms = Alarms(**options)  # type: ignore[arg-type]
    return [[alarm.name for alarm in alarms.step(step)] for step in steps]


def run_with(changes: dict[str, object], at: int = 12, steps: int = 13) -> list[list[str]]:
    """The alarms of a clean run whose steps from `at` on have other numbers."""
    return raised([replace(clean(n), **(changes if n >= at else {})) for n in range(steps)])


def test_2000_clean_steps_raise_nothing():
    found = [names for seed in range(10) for names in raised([clean(n, seed) for n in range(200)])]
    assert sum(map(bool, found)) <= 2


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"level": 0.065}, "floor_jump"),
        ({"tail": 60.0}, "floor_tail"),
        ({"confident": 30.0}, "confident_disagreement"),
        ({"version": 11.0}, "weights_stop"),
        ({"digest": "digest 11"}, "weights_stop"),
        ({"ahead": 3.0, "ahead_by": 1.0}, "negative_lag"),
        ({"ess": 0.4}, "ess_collapse"),
        ({"equal": 4000.0}, "copied_columns"),
        ({"unsound": 0.02}, "unsound_tokens"),
        ({"alike_prompts": 8, "alike_nats": 40.0}, "lost_seed"),
        ({"prompts": clean(11).prompts}, "stuck_batch"),
        ({"replies": clean(4).replies}, "stuck_batch"),
        ({"learning_rate": 2e-4}, "learning_rate"),
        ({"learning_rate": 1e-30}, "learning_rate"),
        ({"slope": 5.0}, "rogue_normaliser"),
        ({"slope": 0.2}, "rogue_normaliser"),
        ({"slope": -1.14}, "rogue_normaliser"),
        ({"slope": 0.0}, "rogue_normaliser"),
        ({"shift": 0.8}, "rogue_normaliser"),
        ({"slope": math.nan, "correlation": -0.6}, "rogue_normaliser"),
    ],
)
def test_a_fault_is_told_at_its_first_step(changes: dict[str, object], name: str):
    found = run_with(changes)
    assert not any(found[:12])
    assert found[12] == [name]


@pytest.mark.parametrize(
    "changes",
    [
        {"level": 0.03},
        {"level": 0.06, "level_tokens": 20},
        {"tail": 8.0},
        {"confident": 2.0},
        {"ess": 0.8},
        {"equal": 3900.0},
        {"alike_prompts": 8, "alike_nats": 10.0},  # a policy that is sure
        {"alike_prompts": 1, "alike_nats": 60.0},
        {"learning_rate": 5e-5},
        {"slope": 2.0},
        {"unsound": 0.001},
    ],
)
def test_what_chance_or_a_schedule_may_do_is_no_alarm(changes: dict[str, object]):
    assert not any(run_with(changes))


def test_a_level_that_is_noisy_needs_a_larger_jump():
    random = np.random.default_rng(1)
    noisy = [Step(n, mean_abs=0.01 * float(np.exp(random.normal(0, 0.6)))) for n in range(30)]
    assert not any(raised([*noisy, Step(30, mean_abs=0.1)]))
    steady = [Step(n, mean_abs=0.01) for n in range(30)]
    assert raised([*steady, Step(30, mean_abs=0.1)])[-1] == ["floor_jump"]


def test_two_steps_of_a_smaller_jump_are_one():
    """Each of both is within what single steps may do."""
    levels = [0.02 * (1.15 if n % 2 else 1 / 1.15) for n in range(20)]
    steps = [Step(n, level=level) for n, level in enumerate(levels)]
    one, both = [*steps, Step(20, level=0.045)], [*steps, Step(20, level=0.045), Step(21, level=0.045)]
    assert raised(one)[-1] == []
    assert raised(both)[-1] == ["floor_jump"]


def test_a_jump_stays_an_alarm_while_it_lasts():
    assert [bool(names) for names in run_with({"level": 0.2}, at=8, steps=12)] == [False] * 8 + [True] * 4


def test_steps_are_compared_with_steps_of_the_same_lag():
    steps = [
        replace(clean(n), lag=float(n % 2), level=0.02 * (1 + 9 * (n % 2)), version=float(n - n % 2)) for n in range(40)
    ]
    assert not any("floor_jump" in names for names in raised(steps))


def test_growth_tells_weights_that_stop_where_the_counter_says_otherwise():
    """From step 20 on each update adds a twentieth of the floor's level."""
    steps = [replace(clean(n), level=clean(n).level * (1 + 0.15 * max(0, n - 20))) for n in range(40)]
    found = raised(steps)
    assert not any(found[:24])
    assert "weights_stop" in [name for names in found[24:34] for name in names]


@pytest.mark.parametrize(("size", "power"), [("level", 1), ("mean_abs", 1), ("k3", 2)])
def test_slow_growth_is_told_by_tokens_and_by_each_metric_alone(size: str, power: int):
    """The size grows by 1.5 % a step: no step is a jump."""
    others = dict.fromkeys({"level", "mean_abs", "k3"} - {size}, math.nan)
    steps = [replace(clean(n), lag=math.nan, **others) for n in range(140)]
    steps = [replace(one, **{size: getattr(one, size) * 1.015 ** (power * n)}) for n, one in enumerate(steps)]
    found = raised(steps)
    assert not any("slow_growth" in names for names in found[:40])
    assert all("slow_growth" in names for names in found[120:])
    assert not any("slow_growth" in names for names in raised(steps[:1] * 3 + steps[:50]))


def test_a_mismatch_that_shrinks_is_no_growth():
    steps = [replace(clean(n), level=clean(n).level * 0.98**n) for n in range(100)]
    assert not any(raised(steps))


def test_the_first_stale_steps_may_disagree_with_confidence():
    """A fresh step may not."""
    assert not any(raised([replace(clean(n), lag=3.0, confident=9.0) for n in range(4)]))
    assert raised([replace(clean(0), confident=9.0)]) == [["confident_disagreement"]]


def test_weights_that_stop_at_once_are_told_after_a_few_steps():
    """Mean |Δ| of four steps of an engine that keeps its first weights, from a public case."""
    sizes = (0.018, 0.083, 0.117, 0.167)
    found = raised([Step(n, lag=0.0, level=size) for n, size in enumerate(sizes)])
    assert found[-1] == ["weights_stop"]
    assert not any(found[:3])


def test_an_asynchronous_run_may_begin_with_growing_lags():
    sizes = (0.01, 0.05, 0.08, 0.1, 0.1, 0.11, 0.1)
    assert not any(raised([Step(n, mean_abs=size) for n, size in enumerate(sizes)]))
    with_lags = [Step(n, lag=float(min(n, 3)), level=size) for n, size in enumerate(sizes)]
    assert not any(raised(with_lags))


def test_a_sync_every_four_steps_is_no_stop():
    steps = [replace(clean(n), version=float(n - n % 4), digest="") for n in range(40)]
    assert not any(raised(steps))
    stopped = [replace(clean(n), version=float(min(n - n % 4, 20)), digest="") for n in range(26)]
    assert [names for names in raised(stopped) if names] == [["weights_stop"], ["weights_stop"]]


def test_versions_that_come_irregularly_may_stay_twice_as_long():
    versions = [0, 0, 1, 2, 2, 2, 3, 4, 4, 5, 6, 6, 6, 7, 8, 8, 8, 8, 8, 9, 10]
    steps = [replace(clean(n), version=float(version), digest="") for n, version in enumerate(versions)]
    assert not any(raised(steps))


def test_a_digest_that_never_changes():
    found = raised([replace(clean(n), digest="same", version=math.nan) for n in range(8)])
    assert [bool(names) for names in found] == [False] * 5 + [True] * 3


def test_an_idle_clip_is_one_beside_ratios_that_leave_it():
    idle = [replace(clean(n), clip=0.0, outside=0.05) for n in range(12)]
    assert [names for names in raised(idle) if names] == [["idle_clip"]] * 3
    near = [replace(clean(n), clip=0.0) for n in range(12)]
    assert not any(raised(near))
    acts = [replace(clean(n), clip=1e-4 if n % 7 == 0 else 0.0, outside=0.05) for n in range(30)]
    assert not any(raised(acts))
    by_metrics = [Step(n, clip=0.0, k3=0.02 + 0.001 * (n % 3)) for n in range(12)]
    assert [names for names in raised(by_metrics) if names] == [["idle_clip"]] * 3


def test_learning_rates_of_common_schedules_are_no_alarm():
    warm_up = [1e-5 * min(1, n / 20) for n in range(60)]
    cosine = [1e-5 * (1 + math.cos(math.pi * n / 60)) / 2 for n in range(61)]
    steps = [0.0, 0.0, *[1e-6] * 10, *[1e-7] * 10]
    for rates in (warm_up, cosine, steps):
        assert not any(raised([Step(n, learning_rate=rate) for n, rate in enumerate(rates)]))


def test_a_rate_that_stays_zero():
    assert raised([Step(n, learning_rate=0.0) for n in range(6)])[4:] == [["learning_rate"]] * 2
    assert raised([Step(n, learning_rate=1e-5 if n < 8 else 0.0) for n in range(11)])[10] == ["learning_rate"]


def test_an_exact_engine_has_equal_columns():
    steps = [replace(clean(n), equal=4000.0) for n in range(5)]
    assert all(names == ["copied_columns"] for names in raised(steps))
    assert not any(raised(steps, exact=True))


def test_an_alarm_can_be_left_out():
    assert not any(raised([Step(0, ahead=1.0, ahead_by=1.0)], without=["negative_lag"]))
    with pytest.raises(StudyError, match="no alarm is called negative_lags; there are floor_jump"):
        check_names(["negative_lags"])


def test_steps_without_numbers_raise_nothing():
    assert not any(raised([Step(n) for n in range(30)]))


def test_every_alarm_has_its_words_its_limits_and_a_source():
    assert all(words.source and words.do and words.says for words in catalogue().values())


def test_an_alarm_has_its_numbers_in_words():
    alarms = Alarms()
    for n in range(12):
        alarms.step(clean(n))
    (alarm,) = alarms.step(replace(clean(12), confident=30.0))
    assert alarm.says.startswith("30 of 10,000 tokens have at least 50 %")
    assert (alarm.step, alarm.numbers["count"]) == (12, 30)
