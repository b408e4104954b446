"""Corrections that count a mismatch twice, or say something without effect: each is refused with the reason."""

from typing import Any

import pytest
from refusal_fixture import FILL, MIN_P, refusal, study_with

from tailrl.config.arm import Clip, Correction
from tailrl.config.load import parse_study

WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("sequence", {"sequence": "mis"}),
    ("sequence", {"sequence": "geometric"}),
    ("sequence", {"sequence": "reject_k3"}),
    ("reject", {"reject": [{"of": "k3", "by": "mean", "above": 0.1}]}),
    ("reject", {"reject": [{"of": "k2", "by": "token", "above": 1.0}]}),
    ("veto", {"veto": 1e-4, "token": "tis"}),
    ("veto_above", {"veto_above": 100.0}),
]
"""What drops whole responses, or tokens by another rule than their weight's."""


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
        ({"centering": "top_k"}, "centering: top_k needs centering_k"),
        ({"centering": "full", "centering_k": 5}, "centering: full does not use centering_k"),
        *(
            ({"centering": "full", **block}, f"own term, of which {name} is no part: a drift would stay; leave out one")
            for name, block in WHOLE
        ),
        ({"token_threshold": 3.0}, "token: none does not use token_threshold"),
        ({"token": "is", "token_threshold": 3.0}, "token: is does not use token_threshold"),
        ({"token": "tis", "rejects": "r_ppo"}, "sequence: none does not use rejects"),
        ({"log_ratio_limit": 20.0, "veto": 1e-4}, "log_ratio_limit clamps the log-ratios of weights, k1, k2 and k3"),
        ({"log_ratio_limit": 20.0, "sequence": "reject_k3"}, "log_ratio_limit clamps the log-ratios of weights"),
        ({"normalise": True, "sequence": "reject_k3"}, "normalise divides by the mean of the weights by the ratio"),
    ],
)
def test_thresholds_that_do_not_fit_their_weight(correction: dict[str, Any], words: str) -> None:
    assert words in refusal({"correction": correction})


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        *(({"loss": loss, "low": 0.1}, f"loss: {loss} does not use low") for loss in ("free", "sapo", "vespo")),
        *(({"loss": loss, "high": 0.3}, f"loss: {loss} does not use high") for loss in ("free", "sapo", "vespo")),
        ({"loss": "cispo", "log_ratio_limit": 20.0}, "loss: cispo does not use log_ratio_limit"),
    ],
)
def test_bounds_that_do_not_act(clip: dict[str, Any], words: str) -> None:
    assert refusal({"clip": {"ratio": "bypass", **clip}}) == f"arms.a.clip: {words}"


def test_a_job_reads_every_setting_at_its_default() -> None:
    """Settings of a job and of a record name each field, those without an effect too."""
    arm = {"clip": {"ratio": "bypass", "loss": "sapo", "low": 0.2, "high": 0.2}, "correction": {"token_threshold": 2.0}}
    assert study_with(arm).arms["a"] == study_with({"clip": {"ratio": "bypass", "loss": "sapo"}}).arms["a"]


def test_an_ablation_of_a_kind_leaves_out_what_its_base_sets_for_another() -> None:
    arms = {
        "naive": {},
        "mask": {"correction": {"token": "mask", "token_threshold": 5.0, "token_lower": 0.5}},
        "clip": {"clip": {"ratio": "bypass", "low": 0.1}},
        "dvp": {"vocabulary": MIN_P},
    }
    ablations = {
        "token": {"base": "mask", "field": "correction.token", "values": ["none", "is", "tis", "mask"]},
        "loss": {"base": "clip", "field": "clip.loss", "values": ["sapo", "cispo"]},
        "rule": {"base": "dvp", "field": "vocabulary.rule", "values": ["full", "entropy"]},
    }
    study = parse_study({"name": "s", "arms": arms, "ablations": ablations})
    of_token = study.ablation_arms("token")
    assert list(of_token) == ["naive", "token=is", "token=tis", "mask"]
    assert of_token["token=is"].correction == Correction(token="is")
    assert of_token["token=tis"].correction == Correction(token="tis", token_threshold=5.0, token_lower=0.5)
    of_loss = study.ablation_arms("loss")
    assert of_loss["loss=sapo"].clip == Clip(ratio="bypass", loss="sapo")
    assert of_loss["loss=cispo"].clip == Clip(ratio="bypass", loss="cispo", low=0.1)
    assert list(study.ablation_arms("rule")) == ["naive", "rule=entropy"]


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
    for side in ("replay", "sampler"):
        assert f"outside says nothing with side: {side}" in refusal({"vocabulary": {**FILL, "side": side}})
