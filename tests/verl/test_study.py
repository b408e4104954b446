"""An arm of a study trained by verl: its lines by verl's own configuration and code, and a study from end to end."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from two_trainers import run_study, step_rows
from verl.trainer.ppo.core_algos import (
    compute_grpo_outcome_advantage,
    compute_rloo_outcome_advantage,
    get_policy_loss_fn,
)
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.utils.config import omega_conf_to_dataclass

from tailrl.artifacts.metrics import read_metrics
from tailrl.artifacts.tokens import read_token_arrays
from tailrl.config.jobs import Run
from tailrl.config.study import Study
from tailrl.config.verl import check, train_lines
from tailrl.integrations.verl.checks import check_run
from tailrl.integrations.verl.trainer import settings_of
from tailrl.objective.advantages import advantages_of
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import TokenLogprobs
from tailrl.tracking import metrics as keys

RESPONSES, TOKENS = 40, 9
STEPS = 3

ARMS: dict[str, dict[str, Any]] = {
    "naive": {},
    "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}},
    "dvp_mis": {
        "vocabulary": {"rule": "min_p", "rho": "1e-2"},
        "correction": {"sequence": "mis", "sequence_threshold": 2.0},
    },
    "token_tis": {"correction": {"token": "tis", "token_threshold": 1.5}},
    "icepop": {"correction": {"token": "mask", "token_threshold": 1.6}},
    "icepop_wide": {"correction": {"token": "mask", "token_threshold": 5.0, "token_lower": 0.5}},
    "sequence_tis": {"correction": {"sequence": "tis", "sequence_threshold": 3.0}},
    "mis": {"correction": {"sequence": "mis", "sequence_threshold": 2.0, "sequence_lower": 0.4}},
    "geometric": {"correction": {"sequence": "geometric", "sequence_threshold": 1.1}},
    "veto": {"correction": {"veto": 1e-4}},
    "mis_veto": {"correction": {"sequence": "mis", "veto": 1e-4}},
    "geometric_veto": {"correction": {"sequence": "geometric", "sequence_threshold": 1.1, "veto": 1e-4}},
    "normalised": {"correction": {"token": "tis", "normalise": True}},
    "ppo": {"clip": {"ratio": "recompute"}, "training": {"minibatches": 2}},
    "dual": {"clip": {"ratio": "recompute", "low": 0.1, "high": 0.3, "dual": 1.5}, "training": {"minibatches": 2}},
    "decoupled": {"clip": {"ratio": "decoupled"}, "training": {"minibatches": 2}},
    "grpo": {"estimator": "grpo"},
}


def run_of(arm: dict[str, Any]) -> Run:
    training = {"prompts": 4, "group_size": 4, "backend": "verl"} | arm.get("training", {})
    study = Study(name="s", arms={"a": arm | {"training": {}}}, training=training)
    return study.runs()["a"]


def lines_of(run: Run) -> list[str]:
    return train_lines(run, vocabulary_size=100, seed=7)


def tokens(run: Run) -> dict[str, Tensor]:
    """Log-probs of sampled tokens in float64: the sampler's, the trainer's before and after an update; masks."""
    generator = torch.Generator().manual_seed(5)

    def normal(spread: float) -> Tensor:
        return torch.randn((RESPONSES, TOKENS), generator=generator, dtype=torch.float64) * spread

    sampler = -normal(1.0).abs() - 0.01
    old = (sampler + normal(0.3)).clamp(max=-1e-6)
    old[::9, 3] -= 12.0  # what a veto drops
    now = (old + normal(0.3)).clamp(max=-1e-6) if run.training.minibatches > 1 else old.clone()
    outside = torch.rand((RESPONSES, TOKENS), generator=generator) < (0.02 if run.vocabulary.prunes else 0.0)
    advantage = torch.randn(RESPONSES, generator=generator, dtype=torch.float64)
    return {"sampler": sampler, "old": old, "now": now, "outside": outside, "advantage": advantage}


def gradient_by_verl(configured: Callable[..., Any], run: Run, given: dict[str, Tensor]) -> Tensor:
    """The gradient of verl's own loss by the present log-probs, by its own weights, rejections and configuration."""
    config = configured(*lines_of(run))
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    actor.global_batch_info.update(dp_size=1, batch_num_tokens=RESPONSES * TOKENS, global_batch_size=RESPONSES)
    corrections = config.algorithm.rollout_correction
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize", "rollout_rs", "rollout_rs_threshold")
    fill = given["old"].masked_fill(given["outside"], -50.0)
    mask = torch.ones((RESPONSES, TOKENS), dtype=torch.int64)
    asked = {name: corrections.get(name) for name in names}
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(fill, given["sampler"], mask, **asked)
    now = given["now"].clone().requires_grad_()
    loss, _ = get_policy_loss_fn(actor.policy_loss.loss_mode)(
        old_log_prob=given["old"],
        log_prob=now,
        advantages=given["advantage"][:, None].expand(-1, TOKENS),
        response_mask=kept * ~given["outside"],
        loss_agg_mode=actor.loss_agg_mode,
        config=actor,
        rollout_is_weights=weights.batch["rollout_is_weights"] if weights is not None else None,
    )
    (gradient,) = torch.autograd.grad(loss, now)
    return gradient


def gradient_by_us(run: Run, given: dict[str, Tensor]) -> Tensor:
    now = given["now"].clone().requires_grad_()
    outside_T, zeros_T = given["outside"].flatten(), torch.zeros(RESPONSES * TOKENS, dtype=torch.float64)
    found = surrogate(
        TokenLogprobs(
            logp_T=now.flatten().masked_fill(outside_T, 0.0),
            logp_full_T=now.detach().flatten(),
            log_kept_T=zeros_T,
            kept_vocab_T=zeros_T,
            entropy_T=zeros_T,
            outside_T=outside_T,
        ),
        given["sampler"].flatten(),
        given["advantage"].repeat_interleave(TOKENS),
        torch.arange(RESPONSES).repeat_interleave(TOKENS),
        RESPONSES,
        RESPONSES,
        run.correction,
        run.clip,
        given["old"].flatten(),
    )
    loss = found.loss
    if run.correction.normalise:
        loss = loss / found.weights.ratio_X.double().mean()
    (gradient,) = torch.autograd.grad(loss, now)
    return gradient


@pytest.mark.parametrize("name", ARMS)
def test_verls_own_loss_has_the_gradient_of_the_arm(configured: Callable[..., Any], name: str) -> None:
    """Where no token is outside: there verl's weight of a response counts the fill, which MIS alone sets to 0."""
    run = run_of(ARMS[name])
    given = tokens(run)
    theirs, ours = gradient_by_verl(configured, run, given), gradient_by_us(run, given)
    assert (ours != 0).double().mean() > 0.2
    torch.testing.assert_close(theirs, ours, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("name", ARMS)
def test_verl_takes_the_lines_and_the_plugin_does(configured: Callable[..., Any], name: str) -> None:
    run = run_of(ARMS[name])
    config = configured(*lines_of(run), "+tailrl.log.folder=tokens")
    check_run(config, settings_of(config))
    assert bool(settings_of(config).dvp) == run.vocabulary.prunes
    assert config.actor_rollout_ref.rollout.n == run.training.group_size
    # What verl's engines read: another key of nearly the same name is read by none.
    assert config.actor_rollout_ref.actor.optim.clip_grad == run.training.max_grad_norm
    assert config.actor_rollout_ref.actor.optim.lr == run.training.learning_rate


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_verls_advantages_are_ours(estimator: str) -> None:
    generator = torch.Generator().manual_seed(2)
    rewards_PG = torch.randint(0, 2, (6, 4), generator=generator).float()
    token_rewards = torch.zeros(24, 3)
    token_rewards[:, -1] = rewards_PG.flatten()
    index = [f"p{i // 4}" for i in range(24)]
    verls = {"rloo": compute_rloo_outcome_advantage, "grpo": compute_grpo_outcome_advantage}[estimator]
    theirs, _ = verls(token_rewards, torch.ones(24, 3), index=np.array(index))
    ours = advantages_of(estimator, rewards_PG).flatten()[:, None].expand(-1, 3)
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=1e-4)


REFUSED = {
    "estimator: reinforce": {"estimator": "reinforce"},
    "sampler.engine: exact": {"sampler": {"engine": "exact", "dtype": "float32"}},
    "sampler.quantization: int8": {"sampler": {"quantization": "int8"}},
    "disturbance": {"disturbance": {"noise": 0.1}},
    "reference_kl": {"reference_kl": {"coefficient": 0.1}},
    "vocabulary.rule: top_k": {"vocabulary": {"rule": "top_k", "k": 20}},
    "vocabulary.outside: paper_fill": {"vocabulary": {"rule": "min_p", "rho": "e-13", "outside": "paper_fill"}},
    "clip.loss: cispo": {"clip": {"loss": "cispo", "ratio": "recompute"}},
    "clip.ratio: bypass": {"clip": {"ratio": "bypass"}},
    "correction.sequence: is": {"correction": {"sequence": "is"}},
    "correction.reject": {"correction": {"reject": [{"of": "k3", "by": "token", "above": 0.1}]}},
    "clip.log_ratio_limit": {"clip": {"ratio": "recompute", "log_ratio_limit": 2.0}},
    "correction weighs tokens and responses": {"correction": {"token": "tis", "sequence": "mis"}, "deliberate": True},
    "correction.log_ratio_penalty": {"correction": {"log_ratio_penalty": 1e-3}},
    "correction.veto never acts": {"correction": {"veto": 1e-10}},
    "correction.veto_above": {"correction": {"veto": 1e-4, "veto_above": 100.0}},
    "training.optimizer: sgd": {"training": {"optimizer": "sgd"}},
}


@pytest.mark.parametrize("key", REFUSED)
def test_what_verl_cannot_do_is_refused_before_any_job(key: str) -> None:
    arm = REFUSED[key]
    training = {"backend": "verl"} | arm.get("training", {})
    study = {"name": "s", "arms": {"a": {**arm, "training": {}}}, "training": training}
    with pytest.raises(ValueError, match=f"arms.a: training.backend: verl: {key}"):
        Study(**study)
    check(run_of({}))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of two arms, each trained by our own loop and by verl on Ray, through Snakemake; its results' folder."""
    return run_study(tmp_path_factory.mktemp("study"), STEPS)


@pytest.mark.slow
@pytest.mark.vllm
def test_a_study_on_verl_ends_with_its_report(finished: Path) -> None:
    assert (finished / "summary.html").is_file()
    page = (finished / "summary.md").read_text()
    assert "naive_verl" in page and "dvp_mis_verl" in page
    for arm in ("naive", "dvp_mis", "naive_verl", "dvp_mis_verl"):
        metrics = read_metrics(finished / f"train/{arm}/seed0")
        assert len(metrics[keys.STEP]) == STEPS
        # Both engines compute in float32.
        assert (metrics[keys.K3_MASKED] < 1e-6).all() and (metrics[keys.REWARD] >= 0).all()
        arrays = read_token_arrays(finished / f"train/{arm}/seed0")
        assert len(arrays["step"]) == metrics[keys.LENGTH].sum() * 16
        assert (finished / f"eval/{arm}.json").is_file()
    ours, verls = (read_metrics(finished / f"train/{arm}/seed0") for arm in ("dvp_mis", "dvp_mis_verl"))
    assert (ours[keys.KEPT_MASS_TRAIN] < 1).all() and (verls[keys.KEPT_MASS_TRAIN] < 1).all()


@pytest.mark.slow
@pytest.mark.vllm
def test_our_update_on_verls_samples_makes_verls_policy(finished: Path) -> None:
    rows = step_rows(finished)
    assert len(rows) == 2 * STEPS
    # A step whose rewards are all equal has no gradient.
    assert max(float(str(row["gradient_norm_verl"])) for row in rows) > 0
    for row in rows:
        # A token on the cut, of at most ρ of the mass, may belong to one trainer's safe set alone.
        limit = 1e-4 if row["arm"] == "naive" else 1e-2
        assert float(str(row["largest_difference"])) < limit and row["outside_of_one_set"] == 0, row
        norm, repeated = (float(str(row[f"gradient_norm_{whose}"])) for whose in ("verl", "repeated"))
        assert abs(norm - repeated) <= 1e-3 * norm, row
