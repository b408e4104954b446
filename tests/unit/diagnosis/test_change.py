"""Two logs, before and after a change: what it did to the size, the cause and the groups."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from diagnosis_fixture import noisy_rows

from tailrl.diagnosis.change import change_html, change_text, compare, verdict
from tailrl.diagnosis.diagnosis import Diagnosis, diagnose_parts
from tailrl.diagnosis.log import LoggedRow, pack


def told(rows: Sequence[LoggedRow]) -> Diagnosis:
    return diagnose_parts([("the documented JSONL or Parquet", pack(rows))])


def rows_of(noise: float, seed: int = 0, prompts: bool = True) -> list[LoggedRow]:
    rows = noisy_rows(60, 30, noise, seed)
    labels = [{"source": "ab"[number % 2]} for number in range(60)]
    return [
        replace(row, prompt=float(number // 2) if prompts else np.nan, labels=own, again_T=None)
        for number, (row, own) in enumerate(zip(rows, labels, strict=True))
    ]


def test_a_change_of_the_size_is_told_with_its_interval() -> None:
    change = compare(told(rows_of(0.5)), told(rows_of(0.02, seed=1)))
    assert change.paired == 30 and change.k3.verdict == "smaller"
    assert change.k3.change.mean == pytest.approx(change.k3.after.mean - change.k3.before.mean)
    assert verdict(change).startswith(f"Smaller: k3 is {change.k3.before.mean:.2g} nats a token before and ")
    assert verdict(change).endswith("It is bad before, not bad after.")
    back = compare(told(rows_of(0.02, seed=1)), told(rows_of(0.5)))
    assert back.k3.verdict == "larger" and back.k3.change.mean == pytest.approx(-change.k3.change.mean)


def test_without_a_change_none_is_detected() -> None:
    """In all but a few of many pairs of logs of one kind."""
    words = [
        compare(told(rows_of(0.05, 2 * seed)), told(rows_of(0.05, 2 * seed + 1))).k3.verdict
        == "no detectable difference"
        for seed in range(12)
    ]
    assert sum(words) >= 10


def test_equal_logs_differ_by_nothing_and_without_an_error() -> None:
    change = compare(told(rows_of(0.1)), told(rows_of(0.1)))
    assert change.k3.change.mean == 0 and change.k3.change.low == pytest.approx(0, abs=1e-12)
    assert not verdict(change).startswith(("Smaller", "Larger"))


def test_prompts_are_paired() -> None:
    """Prompts differ much in their mismatch, and the change little: the difference of paired prompts is narrow."""
    random = np.random.default_rng(0)
    sizes = random.lognormal(-4, 1.5, 60)

    def rows(factor: float, known: bool) -> list[LoggedRow]:
        rows = []
        for number, size in enumerate(sizes):
            train = -random.exponential(1.0, 200) - 1
            noise = factor * size * random.normal(size=200)
            rows.append(LoggedRow("", train - noise, train, prompt=float(number) if known else np.nan))
        return rows

    paired = compare(told(rows(1.0, True)), told(rows(0.8, True)))
    apart = compare(told(rows(1.0, False)), told(rows(0.8, False)))
    assert paired.paired == 60 and apart.paired == 0
    widths = [one.k3.change.high - one.k3.change.low for one in (paired, apart)]
    assert widths[0] < 0.5 * widths[1]
    assert paired.k3.verdict == "smaller"


def test_a_change_in_one_group_is_seen_there() -> None:
    before, after = rows_of(0.02), rows_of(0.02, seed=1)
    shifted = [replace(row, sampler_T=row.sampler_T - 1.0) if row.labels["source"] == "b" else row for row in after]
    change = compare(told(before), told(shifted))
    groups = {one.name: one.verdict for one in change.groups}
    assert groups["source b"] == "larger" and groups["source a"] == "no detectable difference"
    assert {"the first 4 tokens of a response", "the last 3 tokens", "tokens that already occurred"} <= groups.keys()


def test_the_pages_say_it() -> None:
    change = compare(told(rows_of(0.5)), told(rows_of(0.02, seed=1)))
    text, page = change_text(change), change_html(change)
    assert text.splitlines()[2] == f"**{verdict(change)}**" and "30 prompts are in both logs and paired" in text
    assert "`--together` reads them as one" in text
    assert 'chip good">smaller' in page and "source a" in page
    nothing = told([LoggedRow("", np.array([np.nan]), np.array([-1.0]))])
    assert "Nothing can be said" in change_text(compare(nothing, nothing))


@pytest.mark.parametrize("place", ["before", "after"])
def test_nothing_is_said_of_a_log_whose_fault_hides_the_mismatch(place: str) -> None:
    """Copied columns have k3 = 0: that is no smaller mismatch."""
    sound = rows_of(0.1)
    copied = [replace(row, sampler_T=row.trainer_T) for row in sound]
    change = compare(*(told(copied if name == place else sound) for name in ("before", "after")))
    assert verdict(change).startswith(f"Nothing can be said: the log {place} has a fault. Both sides are equal")
    for text in (change_text(change), change_html(change)):
        assert f"The log {place} itself:" in text


def test_a_fault_that_hides_nothing_is_told_beside_the_verdict() -> None:
    sound = rows_of(0.1)
    rounded = [replace(row, sampler_T=row.sampler_T.astype(np.float16).astype(np.float64)) for row in sound]
    change = compare(told(sound), told(rounded))
    assert "Nothing can be said" not in verdict(change)
    assert "The log after itself: The sampler's log-probs have no more digits than" in change_text(change)
