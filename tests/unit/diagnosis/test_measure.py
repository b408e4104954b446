"""The numbers of a log against plain loops, against this project's own metrics, and in any cut of the log."""

import math
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from diagnosis_fixture import noisy_rows
from log_fixture import write_lines

from tailrl.diagnosis import readers
from tailrl.diagnosis.diagnosis import Diagnosis, diagnose_parts
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import LOGIT_CELLS, NATS_EDGES, POSITION_EDGES, SEQUENCE_GROUPS, Measured, measure
from tailrl.diagnosis.metrics import frameworks, named_metrics, quantity
from tailrl.diagnosis.page import html_page, terminal_page
from tailrl.diagnosis.signals import LOGIT_EDGE, log_odds
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.stats.verl import verl_metrics

RANDOM = np.random.default_rng(5)
LENGTHS = [*RANDOM.integers(1, 30, 40).tolist(), 200]
TRAIN = [-RANDOM.exponential(1.5, n) for n in LENGTHS]
INFER = [np.minimum(x + RANDOM.normal(0, 0.3, len(x)), 0.0) for x in TRAIN]
ROWS = [LoggedRow("here", infer, train) for train, infer in zip(TRAIN, INFER, strict=True)]
TRAIN_T, INFER_T = np.concatenate(TRAIN), np.concatenate(INFER)


@pytest.fixture
def measured() -> Measured:
    return measure([("a", pack(ROWS[:7])), ("a", pack(ROWS[7:]))])


def test_the_numbers_of_every_framework_against_loops(measured: Measured) -> None:
    p, q = np.exp(TRAIN_T), np.exp(INFER_T)
    m, n = (p + q) / 2, len(p)
    weight_T = np.minimum(p / q, 2)
    difference = [np.mean(b) - np.mean(a) for a, b in zip(TRAIN, INFER, strict=True)]
    whole = [math.exp(sum(a - b)) for a, b in zip(TRAIN, INFER, strict=True)]
    of_responses = [ratio if ratio <= 3 else 0.0 for ratio in whole]
    expected = {
        "training/rollout_probs_diff_mean": sum(abs(p - q)) / n,
        "training/rollout_probs_diff_std": torch.tensor(abs(p - q)).std().item(),
        "training/rollout_probs_diff_max": max(abs(p - q)),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "rollout_corr/rollout_is_mean": sum(weight_T) / n,
        "rollout_corr/rollout_is_eff_sample_size": n / sum((weight_T / (weight_T.mean() + 1e-8)) ** 2),
        "rollout_corr/ppl_ratio": sum(math.exp(d) for d in difference) / len(LENGTHS),
        "sampling/sampling_logp_difference/mean": sum(abs(np.log(p / q))) / n,
        "sampling/sampling_logp_difference/max": max(abs(np.log(p / q))),
        "sampling/importance_sampling_ratio/min": min(of_responses),
        "sampling/importance_sampling_ratio/mean": sum(of_responses) / len(LENGTHS),
        "sampling/importance_sampling_ratio/max": max(of_responses),
        "token_mult_prob_error": sum(np.maximum(p / q, q / p)) / n,
        "gen_kl_error": sum(p / q - 1 - np.log(p / q)) / n,
        "policy_kl_error": sum(q / p - 1 - np.log(q / p)) / n,
        "js_divergence_error": sum((p / m - 1 - np.log(p / m)) / 2 + (q / m - 1 - np.log(q / m)) / 2) / n,
        "mismatch_kl": sum(p / q - np.log(p / q) - 1) / n,
        "train_rollout_logprob_abs_diff": np.mean([abs(a - b).mean() for a, b in zip(TRAIN, INFER, strict=True)]),
        "optim/kl_sample_train_v1": sum(np.log(q / p)) / n,
        "optim/kl_sample_train_v2": sum(np.log(q / p) ** 2) / 2 / n,
    }
    found = {one.name: one.value.mean for one in named_metrics(measured)}
    assert found.keys() == {name for metrics in frameworks().values() for name in metrics}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name


def test_verls_numbers_are_those_of_training(measured: Measured) -> None:
    """Those that the training loop logs of the same tokens."""
    trainer_T, sampler_T = torch.tensor(TRAIN_T), torch.tensor(INFER_T)
    sequence_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    ours = log_ratio_metrics(trainer_T, sampler_T, sequence_T, len(LENGTHS))
    ours |= verl_metrics(TRAIN_T - INFER_T, sequence_T.numpy(), len(LENGTHS), most=2.0, by_response=False)
    found = {one.name: one.value.mean for one in named_metrics(measured) if one.name.startswith("rollout_corr/")}
    assert len(found) == 10
    for name, value in found.items():
        assert value == pytest.approx(ours[name.removeprefix("rollout_corr/")], rel=1e-6), name


def test_huge_ratios_are_bounded_as_verl_bounds_them() -> None:
    """Log-ratios of 30 and −30 nats count as 20 and −20 in χ²; by TRL's defaults the response has ratio 1."""
    row = LoggedRow("here", np.array([-31.0, -1.0]), np.array([-1.0, -31.0]))
    measured = measure([("a", pack([row]))])
    assert quantity(measured, "chi2_token").mean == pytest.approx((math.exp(40) + math.exp(-40)) / 2 - 1)
    assert quantity(measured, "trl_ratio_mean").mean == 1


def test_trls_ratio_is_of_a_response_and_zero_above_its_cap() -> None:
    """Three responses with ratios 2, 4 and 1/2; of the second none is left."""
    ratios = [[4.0, 0.5], [2.0, 2.0], [0.5]]
    rows = [LoggedRow("here", np.full(len(row), -9.0), -9.0 + np.log(row)) for row in ratios]
    measured = measure([("a", pack(rows))])
    names = ("trl_ratio_min", "trl_ratio_mean", "trl_ratio_max")
    assert [quantity(measured, name).mean for name in names] == pytest.approx([0, 2.5 / 3, 2])


def test_a_cut_changes_nothing(measured: Measured) -> None:
    whole = measure([("a", pack(ROWS))])
    for name in ("k3", "ess_seq", "pearson", "abs_logp_max", "training_ppl"):
        one, other = (astuple(quantity(found, name)) for found in (whole, measured))
        assert one == pytest.approx(other, rel=1e-12, nan_ok=True)
    for name in whole.bins:
        np.testing.assert_allclose(whole.bins[name], measured.bins[name], rtol=1e-12)


@pytest.mark.slow  # its parts equal a whole
def test_an_interval_holds_as_often_as_it_says() -> None:
    """Of 400 logs, whose sequences differ, the true mean lies in the interval of 95 %: 362 to 397 at 99.99 %."""
    random, hits = np.random.default_rng(0), 0
    for _ in range(400):
        rows = []
        for _ in range(60):
            size = random.integers(5, 40)
            train = np.full(size, -5.0)
            rows.append(LoggedRow("here", train - random.normal(0.2, 0.3), train))
        value = quantity(measure([("a", pack(rows))]), "k1")
        hits += value.low <= -0.2 <= value.high
    assert 362 <= hits <= 397


def test_the_signature(measured: Measured) -> None:
    place_T = np.array(
        [next(i for i in range(len(NATS_EDGES) - 1) if NATS_EDGES[i] <= -x < NATS_EDGES[i + 1]) for x in TRAIN_T]
    )
    for i in range(len(NATS_EDGES) - 1):
        assert measured.bins["tokens"][:, i].sum() == (place_T == i).sum()
        size = abs(TRAIN_T - INFER_T)[place_T == i].sum()
        assert measured.bins["size"][:, i].sum() == pytest.approx(size, rel=1e-12)


def test_odd_tokens_are_counted_and_left_out() -> None:
    train = np.array([-1.0, np.nan, -np.inf, 0.5, -2.0, 1e-6])
    infer = np.array([np.nan, -1.0, -1.0, -1.0, -2.5, -1e-6])
    measured = measure([("a", pack([LoggedRow("here", infer, train)]))])
    assert measured.tokens == 2
    assert +measured.odd == {"trainer's NaN": 1, "trainer's -inf": 1, "trainer's above 0": 1, "sampler's NaN": 1}
    assert quantity(measured, "abs_logp").mean == pytest.approx((0.5 + 1e-6) / 2)
    page = terminal_page(diagnose_parts([("a", pack([LoggedRow("here", infer, train)]))]))
    assert "Warning: 1 token left out: the sampler's NaN." in page


def test_nothing_sound_is_a_page_too() -> None:
    nothing = measure([("a", pack([LoggedRow("here", np.array([np.nan]), np.array([-1.0]))]))])
    assert "0 tokens with log-probs of both sides" in terminal_page(Diagnosis(nothing, (), (), ()))


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"sampler_logprobs": infer.tolist(), "trainer_logprobs": train.tolist(), "text": "<script>alert(1)</script>"}
        for train, infer in zip(TRAIN, INFER, strict=True)
    ]
    monkeypatch.setattr(readers, "CHUNK", 50)
    log = write_lines(tmp_path / "log.jsonl", rows)
    diagnosis = diagnose_parts(readers.read_log([log]))
    page = terminal_page(diagnosis)
    assert "the documented JSONL or Parquet: 41 responses" in page
    assert "Not in the log: token ids, " in page and "script" not in page
    whole = html_page(diagnosis)
    assert "token_mult_prob_error" in whole and "no sign of an error is at most 1.05" in whole


def test_sums_equal_a_loop_over_tokens() -> None:
    log = pack(noisy_rows(5, [1, 2, 3, 9, 70]))
    measured = Measured()
    measured.add("t", log)
    found = measured
    for n, low in enumerate(POSITION_EDGES[:8]):
        high = POSITION_EDGES[n + 1]
        chosen = [i for i, place in enumerate(log.position_T) if low <= place < high]
        assert found.positions["tokens"][:, n].sum() == len(chosen)
        size = sum(abs(float(log.trainer_T[i] - log.sampler_T[i])) for i in chosen)
        assert found.positions["size"][:, n].sum() == pytest.approx(size)
    assert found.joint.sum() == len(log.trainer_T)
    odds = log_odds(log.trainer_T)
    row = int(np.argmax(found.joint.sum(axis=1)))
    edges = np.linspace(-LOGIT_EDGE, LOGIT_EDGE, LOGIT_CELLS + 1)
    assert found.joint[row].sum() == np.sum((odds >= edges[row]) & (odds < edges[row + 1]))


def test_bins_are_as_many_for_a_long_response_and_the_joint_picture_holds_extremes() -> None:
    log = pack([LoggedRow("", np.array([0.0, -90.0]), np.array([-1e-12, -50.0]))])
    one = Measured()
    one.add("t", replace(log, position_T=np.array([0, 10**7])))
    assert one.positions["size"].shape == (SEQUENCE_GROUPS, len(POSITION_EDGES) - 1)
    assert one.positions["tokens"][0, -1] == 1 and one.joint[-1, -1] == one.joint[0, 0] == 1


def test_the_floor_is_the_trainer_against_itself() -> None:
    measured = Measured()
    measured.add("t", log := pack(noisy_rows(5, 30)))
    assert measured.floor is not None
    expected = np.abs(log.trainer_T - log.again_T).mean()
    assert measured.floor.token_mean("abs_logp").mean == pytest.approx(expected)
    assert measured.floor.floor is None
