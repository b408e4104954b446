"""Presets: what they expand to, and the weights of each on cases worked out by hand from its framework's lines.

The numbers here come from the peer's lines alone; which file and line they are, `config/data/presets.yaml` says under
`source`, at the version that stands there. `docs/results/presets.csv` has the presets whose function was executed.
"""

import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tailrl.config.arm import Arm, Correction
from tailrl.config.load import parse_study
from tailrl.config.presets import frameworks, presets, version_of
from tailrl.objective.centering import expected_score
from tailrl.objective.corrections import correct, normaliser
from tailrl.objective.reference_kl import kl_loss, reward_penalty
from tailrl.runtime.errors import StudyError

RESULTS = Path(__file__).parents[3] / "docs" / "results"
LN = math.log


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


def test_a_preset_with_a_clip_needs_an_arm() -> None:
    with pytest.raises(ValueError, match=r"preset: verl/bypass_ppo_clip sets an arm's clip too"):
        Correction(preset="verl/bypass_ppo_clip")
    assert Correction(preset="trl/default") == Correction(sequence="mis", sequence_threshold=3.0)


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
        arm = Arm.model_validate({"correction": {"preset": name}})
        block = arm.clip if arm.clip and arm.clip.loss not in ("cispo",) else arm.correction
        clamps = name.startswith("verl/") and "_sc" not in name and (preset.correction or preset.clip)
        if clamps and not (arm.clip and arm.clip.loss == "cispo"):
            assert block.log_ratio_limit == (10.0 if arm.clip and arm.clip.loss == "gspo" else 20.0), name


ROWS = [[1.0, 2.5, 0.25], [0.9, 1.1], [6.0, 0.5]]
CASES: dict[str, list[list[float]]] = {
    # min(r, 3), per token and of the product: 0.625, 0.99, 3.
    "trl/token_truncate": [[1.0, 2.5, 0.25], [0.9, 1.1], [3.0, 0.5]],
    "trl/sequence_truncate": [[0.625] * 3, [0.99] * 2, [3.0] * 2],
    # r where r ≤ 3, the upper bound included.
    "trl/token_mask": [[1.0, 2.5, 0.25], [0.9, 1.1], [0.0, 0.5]],
    "trl/sequence_mask": [[0.625] * 3, [0.99] * 2, [3.0] * 2],
    "trl/default": [[0.625] * 3, [0.99] * 2, [3.0] * 2],
    # r within [0.5, 5].
    "nemo-rl/icepop": [[1.0, 2.5, 0.0], [0.9, 1.1], [0.0, 0.5]],
    "openrlhf/icepop": [[1.0, 2.5, 0.0], [0.9, 1.1], [0.0, 0.5]],
    "verl/decoupled_token_icepop": [[1.0, 2.5, 0.0], [0.9, 1.1], [0.0, 0.5]],
    # r where the geometric mean lies within [0.999, 1.002]; of these three it is 0.855, 0.995 and 1.73.
    "nemo-rl/seq-mask-tis": [[0.0] * 3, [0.0] * 2, [0.0] * 2],
    "openrlhf/tis": [[1.0, 2.5, 0.5], [0.9, 1.1], [5.0, 0.5]],
    # The product within [0.5, 2].
    "skyrl/mask_product": [[1.0] * 3, [1.0] * 2, [0.0] * 2],
    "verl/decoupled_seq_is_rs": [[0.625] * 3, [0.99] * 2, [0.0] * 2],
    # min(r, 2) over its mean (1 + 2 + 0.25 + 0.9 + 1.1 + 2 + 0.5) / 7; tokens beyond [1/2, 2] are dropped.
    "slime/mis": [[7 / 7.75, 0.0, 0.0], [0.9 * 7 / 7.75, 1.1 * 7 / 7.75], [0.0, 0.5 * 7 / 7.75]],
    "slime/tis": [[1.0, 2.0, 0.25], [0.9, 1.1], [2.0, 0.5]],
    # With q = 0.04: p − q = 0.2 at r = 6, which is not above 0.2.
    "prime-rl/default": [[1.0, 2.5, 0.25], [0.9, 1.1], [6.0, 0.5]],
    # min(r, 3); and of r = 6 the binary KL is 0.04 ln(1/6) + 0.96 ln(0.96/0.76) = 0.153.
    "verl/dppo_tv": [[1.0, 2.5, 0.25], [0.9, 1.1], [3.0, 0.5]],
    "verl/dppo_kl": [[1.0, 2.5, 0.25], [0.9, 1.1], [3.0, 0.5]],
}
AT_A_LIMIT = ("prime-rl/default", "verl/dppo_tv")
"""Where a ratio of 6 at q = 0.04 is at a limit, and rounding decides."""


@pytest.mark.parametrize("preset", CASES)
def test_a_preset_is_what_its_lines_compute(preset: str) -> None:
    rows = [[r * (1 - 1e-12) for r in row] for row in ROWS] if preset in AT_A_LIMIT else ROWS
    found = weights(preset, rows)
    for own, wanted in zip(found, CASES[preset], strict=True):
        assert own == pytest.approx(wanted, rel=1e-9)


def test_a_sequence_mask_keeps_what_is_near_one() -> None:
    near = [[1.001, 1.002], [0.9995, 0.9995], [1.003, 1.003]]
    assert weights("nemo-rl/seq-mask-tis", near) == [pytest.approx(row) for row in [*near[:2], [0.0, 0.0]]]
    assert weights("trl/sequence_mask", [[3.01], [2.99]]) == [[0.0], [pytest.approx(2.99)]]


def test_what_only_counts_on_one_side_of_the_advantage() -> None:
    """OPSM drops a response with A < 0 and a mean of log(q/p) above 0.5; DPPO a token that A pushes further out."""
    far = [[0.5, 0.5], [0.5, 0.5], [0.9, 0.9]]
    assert weights("trl/off_policy_mask", far, [-1.0, 1.0, -1.0]) == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    rows = [[8.0], [8.0]]  # p − q = 0.28
    assert weights("skyrl/dppo_binary_tv", rows, [1.0, -1.0]) == [[0.0], [pytest.approx(8.0)]]
    for preset in ("verl/dppo_tv", "verl/dppo_kl"):  # the KL is 0.04 ln(1/8) + 0.96 ln(0.96/0.68) = 0.248
        assert weights(preset, rows, [1.0, -1.0]) == [[0.0], [pytest.approx(3.0)]]
        low = [[0.25], [0.25]]  # p − q = −0.03
        assert weights(preset, low, [1.0, -1.0]) == [[pytest.approx(0.25)]] * 2


# Σ_H c of the k head tokens, with q = 0.98/k, p = 0.8/k there, and so ρ = 0.02/0.2, 1/ρ = 10; c = q w − ρ w(1/ρ) p.
CENTERED_CASES: dict[str, float] = {
    # w = 1: 0.98 − 0.1 · 0.8.
    "nemo-rl/score_centering": 0.9,
    "slime/score_centering": 0.9,
    "verl/bypass_pg_sc": 0.9,
    # w = min(r, 2), r = 0.8/0.98 in the head: 0.8 − 0.1 · 2 · 0.8.
    "verl/bypass_pg_token_tis_sc": 0.64,
    # r within [0.5, 5], where 10 is not: 0.8 − 0.
    "verl/bypass_pg_token_icepop_sc": 0.8,
}


@pytest.mark.parametrize("preset", CENTERED_CASES)
def test_a_presets_centering_is_what_its_lines_compute(preset: str) -> None:
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


POLICY, BASE = [[0.5, 0.2, 0.1], [0.1, 0.3]], [[0.25, 0.1, 0.2], [0.4, 0.3]]
"""Probabilities of the tokens of two responses: log(p/base) is ln 2, ln 2, −ln 2, and −2 ln 2, 0."""

REWARD_CASES: dict[str, list[float]] = {
    # beta × the sum of old_per_token_logps − ref_per_token_logps over a response, with beta 0.05.
    "trl/rloo": [0.05 * LN(2), -0.1 * LN(2)],
    # init_coef × compute_approx_kl with k1, p − q of log-probs, with 0.01.
    "openrlhf/default": [0.01 * LN(2), -0.02 * LN(2)],
}
LOSS_CASES: dict[str, list[float]] = {
    # The derivative by log p of 0.01 w (r − 1 − log r), with r = base/p and w of value 1 and derivative 1: the weight's
    # own is r − 1 − log r, the bracket's is 1 − r. Their sum is −log r = log(p/base).
    "nemo-rl/default": [0.01 * LN(2), 0.01 * LN(2), -0.01 * LN(2), -0.02 * LN(2), 0.0],
}


def test_a_presets_kl_is_what_its_lines_compute() -> None:
    logp_T, ref_T = (torch.tensor([LN(p) for row in rows for p in row], dtype=torch.float64) for rows in (POLICY, BASE))
    sequence_T = torch.tensor([0, 0, 0, 1, 1])
    inside_T = torch.zeros(5, dtype=torch.bool)
    for preset, wanted in REWARD_CASES.items():
        settings = Arm.model_validate({"correction": {"preset": preset}}).reference_kl
        assert settings is not None and settings.where == "reward"
        found = reward_penalty(settings, logp_T, ref_T, inside_T, sequence_T, 2)
        assert found.tolist() == pytest.approx(wanted, rel=1e-9)
    for preset, wanted in LOSS_CASES.items():
        settings = Arm.model_validate({"correction": {"preset": preset}}).reference_kl
        assert settings is not None and settings.where == "loss"
        own_T = logp_T.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(kl_loss(settings, own_T, ref_T, inside_T, 1), own_T)
        assert gradient.tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-12)


def test_the_published_comparison_is_of_these_presets() -> None:
    """`benchmarks/peer_presets.py` executed the peers' functions; the rest has a case above, or ships nothing."""
    with (RESULTS / "presets.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert all(version_of(row["preset"]) == row["version"] for row in rows)
    assert all(float(row["largest_difference"]) < 1e-6 for row in rows)
    executed = {row["preset"] for row in rows}
    nothing = {name for name, own in presets().items() if not (own.correction or own.clip or own.reference_kl)}
    with_kl = {name for name, own in presets().items() if own.reference_kl}
    assert with_kl == REWARD_CASES.keys() | LOSS_CASES.keys()
    centered = {name for name, own in presets().items() if own.correction.get("centering")}
    assert centered == CENTERED_CASES.keys()
    assert set(presets()) - executed - with_kl <= CASES.keys() | CENTERED_CASES.keys() | nothing
    assert any(float(row["dropped"]) > 0 for row in rows)
