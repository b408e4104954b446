"""The gate: limits, verdicts and exit codes."""

import math

import numpy as np
import pytest

from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.gate import BEYOND, CANNOT_TELL, WITHIN, exit_code, judge, read_limits
from tailrl.diagnosis.measure import Measured
from tailrl.runtime.errors import StudyError


def measured_of(size: float, responses: int = 200) -> Measured:
    """Responses of 20 tokens whose Δ is ± size: k3 is cosh(size) − 1 on average."""
    generator = np.random.default_rng(0)
    trainer = -1 - generator.random((responses, 20))
    delta = size * generator.choice([-1.0, 1.0], trainer.shape)
    return diagnose({"trainer_logprobs": trainer.tolist(), "sampler_logprobs": (trainer - delta).tolist()}).measured


@pytest.mark.parametrize("name", ["k3", "rollout_corr/k3_kl", "gen_kl_error", "mismatch_kl"])
def test_a_number_by_any_of_its_names(name: str) -> None:
    measured, k3 = measured_of(0.1), math.cosh(0.1) - 1
    within, beyond = judge(measured, read_limits([f"{name}={2 * k3}", f"{name}={k3 / 2}"], []))
    assert (within.code, beyond.code) == (WITHIN, BEYOND)
    assert within.value.mean == pytest.approx(k3, rel=0.02)
    assert f"{name} is 0.005" in within.words


def test_a_limit_within_the_interval_cannot_be_told() -> None:
    measured = measured_of(0.1, responses=5)
    [verdict] = judge(measured, read_limits([f"k3={measured.token_mean('k3').mean}"], []))
    assert verdict.code == CANNOT_TELL and "log more responses" in verdict.words


def test_at_least_and_extremes() -> None:
    measured = measured_of(0.1)
    verdicts = judge(measured, read_limits(["abs_logp_max=0.11", "abs_logp_max=0.09"], ["ess=0.5", "ess=0.999"]))
    assert [verdict.code for verdict in verdicts] == [WITHIN, BEYOND, WITHIN, BEYOND]


def test_the_worst_verdict_decides() -> None:
    measured = measured_of(0.1)
    few = measured_of(0.1, responses=5)
    unsure = judge(few, read_limits([f"k3={few.token_mean('k3').mean}"], []))
    assert exit_code(judge(measured, read_limits(["k3=1"], []))) == 0
    assert exit_code([*judge(measured, read_limits(["k3=1"], [])), *unsure]) == 2
    assert exit_code([*judge(measured, read_limits(["k3=1e-9"], [])), *unsure]) == 1
    assert exit_code(judge(Measured(), read_limits(["k3=1"], []))) == 2  # an empty log tells nothing


@pytest.mark.parametrize(
    ("largest", "least", "words"),
    [
        (["k3"], [], "--max k3: write it as NAME=NUMBER, such as k3=1e-3"),
        (["k3=nan"], [], "write it as NAME=NUMBER"),
        (["k3=a"], [], "write it as NAME=NUMBER"),
        (["k9=1"], [], "no number is called k9"),
        (["ess=0.5"], [], "of ess more is better; give --min ess=0.5"),
        ([], ["=1"], "no number is called"),
    ],
)
def test_other_forms_are_refused(largest: list[str], least: list[str], words: str) -> None:
    with pytest.raises(StudyError, match=words):
        read_limits(largest, least)
