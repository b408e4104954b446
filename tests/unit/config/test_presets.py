"""Presets: what they expand to, what is refused, and that the frameworks' own code was executed beside each.

`make peers` executes the frameworks and writes `docs/results/presets.csv`; no framework's formula stands here.
"""

import csv
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from peer_presets import NAMES, lines_of
from peer_sources import peers

from tailrl.config.arm import Arm, Correction
from tailrl.config.load import parse_study
from tailrl.config.presets import frameworks, presets
from tailrl.objective.centering import expected_score
from tailrl.objective.corrections import correct, normaliser
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[3]
LN = math.log
ALWAYS_EXECUTED = ("verl", "trl", "skyrl", "openrlhf", "ms-swift")  # their packages are on the index


@pytest.fixture(scope="module")
def table() -> dict[str, dict[str, str]]:
    with (ROOT / "docs" / "results" / "presets.csv").open(encoding="utf-8", newline="") as file:
        return {row["preset"]: row for row in csv.DictReader(file)}


def weights(preset: str, ratios: list[list[float]], advantages: list[float] | None = None) -> list[list[float]]:
    """The weights of tokens with these ratios, whose probability under the sampler is 0.04."""
    correction = Arm.model_validate({"correction": {"preset": preset}}).correction
    sequence = torch.tensor([n for n, row in enumerate(ratios) for _ in row])
    delta = torch.tensor([LN(r) for row in ratios for r in row], dtype=torch.float64)
    infer, inside = torch.full_like(delta, LN(0.04)), torch.zeros_like(sequence, dtype=torch.bool)
    advantage = torch.tensor(advantages or [1.0] * len(ratios), dtype=torch.float64)[sequence]
    found = correct(delta, inside, sequence, len(ratios), correction, None, infer, advantage)
    flat = (found.weight_T / normaliser(correction, found.ratio_X)).tolist()
    return [[flat.pop(0) for _ in row] for row in ratios]


def test_every_preset_is_an_arm_and_says_where_it_was_read() -> None:
    assert len(presets()) > 40 and all(f"{name}/default" in presets() for name in frameworks())
    for name, preset in presets().items():
        if preset.refused:
            continue
        arm = Arm.model_validate({"correction": {"preset": name}})
        assert preset.source and arm.correction == Correction.model_validate(preset.correction)
        assert (arm.clip is None) == (preset.clip is None)


def test_a_study_records_what_a_preset_expands_to() -> None:
    """The name of the preset is not recorded, so that its settings say everything; those beside it count more."""
    arms = {
        "a": {"correction": {"preset": "verl/decoupled_token_icepop", "token_threshold": 3.0}},
        "b": {"correction": {"token": "mask", "token_threshold": 3.0, "token_lower": 0.5, "log_ratio_limit": 20.0}},
        "c": {"correction": {"preset": "verl/bypass_ppo_clip_k3_rs"}},
    }
    study = parse_study({"name": "s", "arms": arms})
    assert study.arms["a"] == study.arms["b"]
    assert "preset" not in str(study.model_dump()) and study.arms["c"].clip is not None
    again = parse_study(study.model_dump(mode="json"))
    assert again == study


@pytest.mark.parametrize(
    ("arm", "words"),
    [
        ({"correction": {"preset": "verl/token_tis"}}, "correction.preset: must be one of verl/default, "),
        (
            {"correction": {"preset": "verl/bypass_ppo_clip"}, "clip": {"ratio": "recompute"}},
            "correction.preset: verl/bypass_ppo_clip sets clip: leave it out, or the preset",
        ),
        (
            {"correction": {"preset": "verl/decoupled_seq_is", "token": "tis"}},
            "correction: token: tis and sequence: tis both weigh by the ratio",
        ),
    ],
)
def test_a_preset_that_does_not_fit_is_refused(arm: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError) as caught:
        parse_study({"name": "s", "arms": {"a": arm}})
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("preset", [name for name, preset in presets().items() if preset.refused])
def test_a_preset_that_its_framework_has_left_is_refused(preset: str) -> None:
    """The sentence says what moved, since when, and what to write instead."""
    with pytest.raises(StudyError) as caught:
        parse_study({"name": "s", "arms": {"a": {"correction": {"preset": preset}}}})
    framework = preset.partition("/")[0]
    assert f"preset: {preset} is refused: " in str(caught.value) and "\n" not in str(caught.value)
    instead = [name for name in presets() if name in str(caught.value) and name != preset]
    assert all(name.startswith(f"{framework}/") and not presets()[name].refused for name in instead)
    assert instead or "write correction." in str(caught.value)


def test_a_preset_with_a_clip_needs_an_arm() -> None:
    with pytest.raises(ValueError, match=r"preset: verl/bypass_ppo_clip sets an arm's clip too"):
        Correction(preset="verl/bypass_ppo_clip")
    assert Correction(preset="trl/sequence_mask") == Correction(sequence="mis", sequence_threshold=3.0)


FAR = [[1.0, math.exp(-30.0)], [math.exp(30.0), math.exp(-25.0)]]
"""Ratios beyond e^±20, where verl and SkyRL clamp."""
LOW_20, HIGH_20 = math.exp(-20.0), math.exp(20.0)
FAR_CASES: dict[str, list[list[float]]] = {
    # exp(clamp(Δ, −20, 20)), at most 2.
    "verl/decoupled_token_is": [[1.0, LOW_20], [2.0, LOW_20]],
    "skyrl/tis_token": [[1.0, LOW_20], [2.0, LOW_20]],
    # exp(clamp(−30, −20, 20)), and of the second response exp(5), at most 2 or 5.
    "verl/decoupled_seq_is": [[LOW_20] * 2, [2.0] * 2],
    "skyrl/tis_sequence": [[LOW_20] * 2, [5.0] * 2],
    # k1 of the second is −20 + 20 = 0; of the first 20.
    "verl/decoupled_seq_is_rs": [[0.0] * 2, [2.0] * 2],
    # TRL and slime clamp no weight.
    "trl/token_truncate": [[1.0, math.exp(-30.0)], [3.0, math.exp(-25.0)]],
    "slime/tis": [[1.0, math.exp(-30.0)], [2.0, math.exp(-25.0)]],
}


@pytest.mark.parametrize("preset", FAR_CASES)
def test_a_preset_clamps_as_its_framework_does(preset: str) -> None:
    for own, wanted in zip(weights(preset, FAR), FAR_CASES[preset], strict=True):
        assert own == pytest.approx(wanted, rel=1e-9, abs=1e-300)


def test_only_frameworks_that_clamp_have_limits() -> None:
    """Of their weights, and of the ratios of their losses; a mask's or a veto's limits lie within e^±20 anyway."""
    limited = {name: preset for name, preset in presets().items() if "log_ratio_limit" in str(preset)}
    assert {name.partition("/")[0] for name in limited} == {"verl", "skyrl", "slime", "trl", "prime-rl"}
    assert [name for name in limited if name.startswith(("slime/", "trl/"))] == ["trl/vespo", "slime/mis"]
    for name, preset in presets().items():
        if preset.refused:
            continue
        arm = Arm.model_validate({"correction": {"preset": name}})
        block = arm.clip if arm.clip and arm.clip.loss not in ("cispo",) else arm.correction
        clamps = name.startswith("verl/") and (preset.correction or preset.clip)
        if clamps and not (arm.clip and arm.clip.loss == "cispo"):
            assert block.log_ratio_limit == (10.0 if arm.clip and arm.clip.loss == "gspo" else 20.0), name


# Σ_H c of the k head tokens, with q = 0.98/k, p = 0.8/k there, and so ρ = 0.02/0.2, 1/ρ = 10; c = q w − ρ w(1/ρ) p.
CENTERED_CASES: dict[str, float] = {
    # w = 1: 0.98 − 0.1 · 0.8.
    "nemo-rl/score_centering": 0.9,
    "slime/score_centering": 0.9,
}


@pytest.mark.parametrize("preset", CENTERED_CASES)
def test_centering_that_no_framework_could_be_executed_for_is_worked_out_by_hand(preset: str) -> None:
    """The gradient by the logits of Σ_H c log p: c − (Σ_H c) p_v in the head, −(Σ_H c) p_v in the tail."""
    correction = Arm.model_validate({"correction": {"preset": preset}}).correction
    k, total = correction.centering_k or 0, CENTERED_CASES[preset]
    assert k == (20 if preset.startswith("nemo-rl/") else 128)
    tail = 2 * k  # none of its tokens is as likely as one of the head
    p, q = (torch.tensor([m / k] * k + [(1 - m) / tail] * tail, dtype=torch.float64) for m in (0.8, 0.98))
    logits = p.log()[None].requires_grad_()
    term_T = expected_score(logits.log_softmax(-1), q.log()[None], correction)
    (found,) = torch.autograd.grad(term_T.sum(), logits)
    wanted = [total * (1 - 0.8) / k] * k + [-total * 0.2 / tail] * tail
    assert found[0].tolist() == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("mode", ["bypass_ppo_clip", "bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs"])
def test_verls_bypass_has_the_dual_clip(mode: str) -> None:
    """At r = 10 and A = −1 the loss is 3 and its gradient 0; the rejections of two modes drop the response."""
    arm = Arm.model_validate({"correction": {"preset": f"verl/{mode}"}})
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    zero, inside = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.bool)
    scored = TokenLogprobs(logp, logp.detach(), logp.detach() * 0, zero, logp.detach() * 0, inside)
    infer, advantage = logp.detach() - math.log(10), torch.tensor([-1.0], dtype=torch.float64)
    loss = surrogate(scored, infer, advantage, zero, 1, 1, arm.correction, arm.clip).loss
    assert loss.item() == pytest.approx(3.0 if mode == "bypass_ppo_clip" else 0.0, rel=1e-12)
    assert torch.autograd.grad(loss, logp)[0].item() == 0.0


def test_each_preset_is_in_the_published_table_at_the_version_of_the_list(table: dict[str, dict[str, str]]) -> None:
    assert list(table) == list(presets())
    for name, framework in frameworks().items():
        assert framework.version == peers()[name].label, f"presets.yaml and peers.yaml differ on {name}"
    for preset, row in table.items():
        name = preset.partition("/")[0]
        assert row["version"] == peers()[name].label, f"{preset} was executed at another version: make peers"


def test_no_framework_computes_another_loss(table: dict[str, dict[str, str]]) -> None:
    for preset, row in table.items():
        of = presets()[preset]
        if of.refused or of.unexecuted:
            assert row["compared"] == ("refused" if of.refused else "not executed")
            assert row["reason"] == (of.refused or of.unexecuted)
            continue
        assert row["compared"].startswith(("value, gradient", "gradient")) and row["function"] and not row["reason"]
        moved = f"{row['function']} of {row['version']} differs from {preset} by {row['largest_difference']}"
        assert 0 <= float(row["largest_difference"]) <= 1e-6, moved
        assert int(row["tokens"]) > 1000 and row["beside"] in {"", *presets()}


def test_a_package_that_can_be_downloaded_is_executed() -> None:
    assert not [name for name, preset in presets().items() if preset.unexecuted and name.startswith(ALWAYS_EXECUTED)]
    assert all(bool(peer.package and peer.version) != bool(peer.commit) and peer.date for peer in peers().values())
    assert all(peers()[name].package for name in ALWAYS_EXECUTED)


LINES_OF = ("verl", "trl", "skyrl", "openrlhf", "ms-swift", "slime", "nemo-rl", "prime-rl", "areal", "roll")


def test_each_line_that_diagnose_shows_was_parsed_and_executed_by_its_framework() -> None:
    with (ROOT / "docs" / "results" / "preset_lines.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    found = {(row["framework"], f"{row['remedy']} at {row['threshold']}") for row in rows}
    assert found == {(NAMES.get(name, name), key) for name in LINES_OF for key in lines_of(name)}
    for row in rows:
        assert 0 <= float(row["largest_difference"]) <= 1e-6 and not row["reason"], row
    versions = {NAMES.get(name, name): peers()[name].label for name in LINES_OF}
    assert all(row["version"] == versions[row["framework"]] for row in rows)


def test_a_shell_leaves_verls_lines_what_hydra_takes_for_text() -> None:
    """Hydra reads 0.5_2 as the number 0.52, and splits at a comma; only text in quotes of its own stays as it is."""
    values = [word.partition("=")[2] for text, _ in lines_of("verl").values() for word in shlex.split(text)]
    names = {value for value in values if value.startswith(("token_k", "seq_")) and "," not in value}
    listed = [value for value in values if ("_" in value or "," in value) and value not in names]
    assert len(listed) > 10 and all(value[0] == value[-1] == '"' for value in listed)


def test_openrlhfs_lines_are_of_its_options_since_0_11_2() -> None:
    for text, _ in lines_of("openrlhf").values():
        words = shlex.split(text)
        options = {word.removeprefix("--algo.advantage.is_correction_") for word in words if word.startswith("--")}
        assert options - {"gating"} == {"level", "mode", "threshold"}
