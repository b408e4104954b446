"""Corrections that count a mismatch twice, or say something without effect: each is refused with the reason."""

from typing import Any

import pytest
from refusal_fixture import FILL, MIN_P, refusal, study_with


@pytest.mark.parametrize(
    ("correction", "words"),
    [
        ({"sequence": "none", "sequence_threshold": 2.0}, "sequence: none does not use sequence_threshold"),
        ({"sequence": "is", "sequence_threshold": 2.0}, "sequence: is does not use sequence_threshold"),
        ({"sequence": "geometric", "sequence_threshold": 1.0}, "sequence_threshold must exceed 1"),
        ({"sequence": "geometric", "sequence_threshold": 0.001}, "sequence_threshold must exceed 1"),
        ({"token": "is", "token_lower": 0.5}, "token: is does not use token_lower"),
        ({"sequence": "is", "sequence_lower": 0.5}, "sequence: is does not use sequence_lower"),
        (
            {"sequence": "mis", "sequence_threshold": 0.5, "sequence_lower": 0.5},
            "sequence_lower must be less than C, 0.5",
        ),
        ({"centering": "top_k"}, "centering: top_k needs k"),
        ({"centering": "full", "centering_k": 5}, "centering: full does not use k"),
        ({"centering": "full", "sequence": "mis"}, "centering subtracts the expectation of a token's own term"),
        (
            {"centering": "full", "reject": [{"of": "k2", "by": "token", "above": 1.0}]},
            "centering subtracts the expectation of a token's own term",
        ),
        ({"normalise": True, "sequence": "reject_k3"}, "normalise divides by the mean of the weights by the ratio"),
    ],
)
def test_thresholds_that_do_not_fit_their_weight(correction: dict[str, Any], words: str) -> None:
    assert words in refusal({"correction": correction})


def test_ratios_count_a_mismatch_once() -> None:
    twice = {"correction": {"token": "tis", "sequence": "mis"}}
    assert refusal(twice) == (
        "arms.a: correction: token: tis and sequence: mis both weigh by the ratio, which counts the mismatch twice; "
        "use one of them, or say deliberate: true"
    )
    assert study_with({**twice, "deliberate": True}).arms["a"].correction.token == "tis"
    normalised = {"correction": {"sequence": "mis", "normalise": True}}
    assert "normalise and training.loss_mean: kept each rescale the mean" in refusal(normalised, loss_mean="kept")
    rule = {"of": "k3", "by": "mean", "above": 0.1, "ratio": "r_ppo"}
    assert "r_ppo is 1 in the first update" in refusal({"correction": {"reject": [rule]}})


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"clip": {"ratio": "bypass"}}, "correction.centering is of the plain policy gradient: leave out clip"),
        ({"sampler": {"verify": True}}, "correction.centering need a mismatch, which this arm has not"),
        (
            {"disturbance": {"noise": 0.1, "side": "both"}},
            "correction.centering need a mismatch, which this arm has not",
        ),
    ],
)
def test_centering_needs_a_mismatch_and_the_plain_gradient(arm: dict[str, Any], words: str) -> None:
    assert words in refusal({**arm, "correction": {"centering": "full"}})
    assert "set minibatches: 1" in refusal({"correction": {"centering": "full", "token": "tis"}}, minibatches=2)


def test_a_replayed_set_is_the_samplers() -> None:
    replay = {"vocabulary": {**MIN_P, "side": "replay"}}
    assert study_with(replay).run("a").needs_distributions
    assert "which this arm has not" in refusal({**replay, "sampler": {"verify": True}})
    assert "outside says nothing with side: replay" in refusal({"vocabulary": {**FILL, "side": "replay"}})
