"""TRL's losses under the adapter: gradients against the study's own update, and real training on a CPU."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from pages_fixture import blocks
from step_fixture import DVP, RHO, make_rollouts, run_of, samples_of
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast
from trl import RLOOTrainer
from trl_fixture import LONGEST, TEMPERATURE, TRAINERS, batch_of, gradients, make_trainer, reward

from tailrl.integrations.trl import Correction
from tailrl.model.policy import named_weights
from tailrl.objective.safe_set import token_logprobs
from tailrl.rollout.types import Rollout
from tailrl.training.scorer import make_scorer, score_all
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

CORRECTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "mis": {"sequence": "mis", "veto": 1e-4},
    "veto": {"veto": 0.3},
}
# What a loss of GRPOTrainer is divided by, and ours is not: (tokens, responses) → number.
SCALES = {"dr_grpo": lambda tokens, count: LONGEST, "dapo": lambda tokens, count: tokens / count}  # noqa: ARG005


@pytest.fixture
def exact(model: PreTrainedModel) -> PreTrainedModel:
    """The tiny policy in float64, as the study trains it."""
    return model.double()


def compare(theirs: dict[str, torch.Tensor], ours: dict[str, torch.Tensor]) -> None:
    assert theirs.keys() == ours.keys()
    for name in ours:
        assert ours[name].abs().max() > 0, name
        # float64, but for Llama's norms: they compute in float32.
        torch.testing.assert_close(theirs[name], ours[name], rtol=1e-5, atol=1e-6 * ours[name].abs().max().item())


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", ["rloo", *SCALES])
def test_gradients_are_those_of_the_study(
    exact: PreTrainedModel,
    policy_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    loss: str,
    correction: str,
) -> None:
    """Prompts and responses of many lengths, 4 tokens outside the set in 3 of 7 responses."""
    rollouts, advantages = make_rollouts()
    run = run_of({"vocabulary": DVP, "correction": CORRECTIONS[correction]}, temperature=TEMPERATURE)
    _, record = accumulate_gradients(exact, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    metrics = record.metrics()
    kept = record.weights.used_N
    # Something is kept and something dropped: by the threshold of MIS too, not only for its outside tokens.
    assert metrics["dvp/sampled_outside_train_support_count"] == 4
    assert {"none": 7, "mis": 3, "veto": 4}[correction] == (kept > 0).sum()
    kind, settings = ("rloo", {}) if loss == "rloo" else ("grpo", {"loss_type": loss})
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, run.correction, torch.float64, **settings)
    batch = batch_of(rollouts, advantages)
    if kind == "rloo":
        batch |= old_batch(trainer, batch)
    # Before the backward: Llama's norms round to float32 on the way.
    scale = 1.0 if kind == "rloo" else SCALES[loss](batch["num_items_in_batch"].item(), len(rollouts))
    (scale * trainer._compute_loss(trainer.model, batch)).backward()
    compare(gradients(trainer.model), gradients(exact))
    logged = {name: values for name, values in trainer._metrics["train"].items() if name in metrics}
    assert len(logged) == 7
    for name, values in logged.items():
        assert values == [pytest.approx(metrics[name], rel=1e-5, abs=1e-9)], name


def test_a_count_is_a_sum_over_processes_and_a_fraction_their_mean(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes, of which the other one has 3 more tokens outside, twice the fraction and no weight."""
    rollouts, advantages = make_rollouts()
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path)
    batch = batch_of(rollouts, advantages)
    trainer._compute_loss(trainer.model, batch)
    alone = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    fraction, count, weight = (
        *(f"dvp/sampled_outside_train_support_{kind}" for kind in ("fraction", "count")),
        "rollout_corr/rollout_is_mean",
    )
    assert alone[count] > 0
    gathered: list[torch.Tensor] = []

    def gather(own: torch.Tensor) -> torch.Tensor:
        if own.shape != (1, 7):
            return own
        other = own.clone()
        other[0, [1, 2, 4]] = torch.tensor([2 * alone[fraction], alone[count] + 3, torch.nan])
        gathered.append(other)
        return torch.cat([own, other])

    monkeypatch.setattr(trainer.accelerator, "gather", gather)
    trainer._compute_loss(trainer.model, batch)
    together = {name: trainer._metrics["train"][name][-1] for name in (fraction, count, weight)}
    assert len(gathered) == 1
    expected = {fraction: 1.5 * alone[fraction], count: 2 * alone[count] + 3, weight: alone[weight]}
    assert together == pytest.approx(expected)


def old_batch(trainer: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What generation adds: the trainer's log-probs, in chunks of 3 rows."""
    ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
    with torch.no_grad():
        trainer._get_per_token_logps_and_entropies(trainer.model, ids, mask, batch["completion_ids"].shape[1], 3)
    found: dict[str, torch.Tensor] = trainer._old
    if isinstance(trainer, RLOOTrainer):
        found = found | {"old_logps": (found["old_per_token_logps"] * batch["completion_mask"]).sum(1)}
    return found


@pytest.mark.parametrize("correction", [{}, {"sequence": "tis"}])
def test_several_updates_on_the_same_rollouts(
    exact: PreTrainedModel,
    policy_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
    correction: dict[str, Any],
) -> None:
    """Weights from the log-probs before the first update, ratios from there too; a token outside either set drops."""
    rollouts, advantages = make_rollouts()
    arm = {"vocabulary": DVP, "correction": correction, "clip": {"ratio": "recompute"}}
    run = run_of(arm, temperature=TEMPERATURE, minibatches=2)
    samples = samples_of(rollouts, advantages, run)
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path, run.correction, torch.float64, loss_type="dapo")
    batch = batch_of(rollouts, advantages)
    batch |= old_batch(trainer, batch)
    old = score_all(exact, samples, make_scorer(run))
    move(exact, trainer.model)
    new = score_all(exact, samples, make_scorer(run))
    left_T, right_T = (torch.cat([own.outside_T for own in logprobs]) for logprobs in (old, new))
    _, record = accumulate_gradients(exact, samples, make_scorer(run), Stopwatch(), old)
    assert (left_T & ~right_T).any() and (right_T & ~left_T).any() and record.clipped_T.any()
    loss = trainer._compute_loss(trainer.model, batch)
    assert loss.isfinite()
    (batch["num_items_in_batch"] / len(rollouts) * loss).backward()
    compare(gradients(trainer.model), gradients(exact))


def test_a_ratio_of_a_response_leaves_out_what_is_outside(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """RLOOTrainer's loss, Σ_y −min(r A, clip(r) A) / N, from the definition of the constrained log-probs."""
    rollouts, advantages = make_rollouts()
    trainer = make_trainer("rloo", policy_folder, tokenizer, tmp_path, None, torch.float64, epsilon=0.5)
    batch = batch_of(rollouts, advantages)
    plain = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float64, attn_implementation="eager")
    batch |= old_batch(trainer, batch)
    before = [definition(plain, rollout) for rollout in rollouts]
    move(plain, trainer.model)
    loss, clipped, returned = torch.zeros((), dtype=torch.float64), 0, 0
    for rollout, advantage, (old_T, gone_T) in zip(rollouts, advantages, before, strict=True):
        logp_T, outside_T = definition(plain, rollout)
        returned += int((gone_T & ~outside_T).sum())
        ratio = (logp_T - old_T.detach())[~(outside_T | gone_T)].sum().exp()
        terms = [ratio * advantage, ratio.clamp(0.5, 1.5) * advantage]
        clipped += int(terms[1] < terms[0])
        loss = loss - torch.minimum(*terms) / len(rollouts)
    assert 0 < clipped < len(rollouts) and returned
    loss.backward()
    found = trainer._compute_loss(trainer.model, batch)
    found.backward()
    assert found.item() == pytest.approx(loss.item(), rel=1e-6)
    compare(gradients(trainer.model), gradients(plain))


def move(model: PreTrainedModel, other: PreTrainedModel) -> None:
    """The same small step of both, which takes tokens out of the set and others into it."""
    torch.manual_seed(7)
    for name, weight in named_weights(model):
        weight += 0.004 * torch.randn_like(weight)
        other.state_dict()[name].copy_(weight)


def definition(model: PreTrainedModel, rollout: Rollout) -> tuple[torch.Tensor, torch.Tensor]:
    """Constrained log-probs of a response and which of its tokens lie outside, by `vocabulary`, alone in its row."""
    row = torch.tensor([[*rollout.prompt_tokens, *rollout.tokens]])
    logits_TV = model(row).logits[0, len(rollout.prompt_tokens) - 1 : -1] / TEMPERATURE
    found = token_logprobs(logits_TV, row[0, len(rollout.prompt_tokens) :], "min_p", math.log(RHO))
    return found.logp_T, found.outside_T


# --- training ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TRAINERS)
def test_two_steps_of_training(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str
) -> None:
    correction = Correction(sequence="mis", veto=1e-4)
    # Half a batch at a time: TRL shuffles and splits what generation left.
    halves = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, correction, **halves)
    before = {name: weight.clone() for name, weight in trainer.model.state_dict().items()}
    trainer.train()
    assert any(not torch.equal(weight, before[name]) for name, weight in trainer.model.state_dict().items())
    steps = [line for line in trainer.state.log_history if "dvp/kept_mass_train_mean" in line]
    assert len(steps) == 2
    for line in steps:
        # transformers samples with the trainer's own weights and, but for its cache, its own arithmetic.
        assert 0 <= line["rollout_corr/k3_kl"] < 1e-9
        assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-4)
        assert line["dvp/sampled_outside_train_support_fraction"] == 0
        assert line["rollout_corr/rollout_rs_seq_masked_fraction"] == line["rollout_corr/veto_seq_fraction"] == 0
        assert 0 < line["dvp/kept_mass_train_mean"] < 0.9
        assert 0 < line["grad_norm"] < math.inf
    found = trainer.evaluate(trainer.train_dataset)
    assert math.isfinite(found["eval_loss"]) and 0 < found["eval_dvp/kept_mass_train_mean"] < 1


@pytest.mark.parametrize(
    "settings",
    [
        {"num_iterations": 2},
        {"steps_per_generation": 2, "per_device_train_batch_size": 4},
        {"num_iterations": 2, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        {"num_iterations": 3, "steps_per_generation": 2, "per_device_train_batch_size": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", TRAINERS)
def test_the_policys_own_updates_are_no_mismatch(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    """transformers samples with the weights from before the first update; an update moves k3 by 0.01 or more.

    Rounding, which such large updates amplify, moves it by 1e-10 to 1e-7, by the processor.
    """
    updates = {"max_steps": 6, "learning_rate": 0.01, "max_grad_norm": 100.0}
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, **(updates | settings))
    trainer.train()
    steps = [line for line in trainer.state.log_history if "rollout_corr/k3_kl" in line]
    assert len(steps) == 6 and max(line["grad_norm"] for line in steps) > 0
    for line in steps:
        assert 0 <= line["rollout_corr/k3_kl"] < 1e-5
        assert line["dvp/sampled_outside_train_support_count"] == 0


@pytest.mark.parametrize("kind", TRAINERS)
def test_advantages_are_of_the_weighted_sum_of_several_rewards(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str
) -> None:
    """RLOO's: the sum minus the mean of the group's others. GRPO's: minus the mean of all, over their deviation."""
    sampled: list[list[int]] = []

    def first_token(completion_ids: Any, **_: Any) -> list[float]:
        sampled[:] = completion_ids
        return [float(tokens[0] % 7) for tokens in completion_ids]

    given = {"reward_funcs": [reward, first_token]}
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, given=given, reward_weights=[1.0, 0.5])
    batch = trainer._generate_and_score_completions([{"prompt": "1+2="}] * 4 + [{"prompt": "8-9="}] * 4)
    total = torch.tensor([sum(tokens) % 2 + 0.5 * (tokens[0] % 7) for tokens in sampled]).view(2, 4)
    centred = total - total.mean(1, keepdim=True)
    expected = centred * 4 / 3 if kind == "rloo" else centred / (total.std(1, keepdim=True) + 1e-4)
    torch.testing.assert_close(batch["advantages"], expected.flatten())
    trainer.train()
    [line, _] = [line for line in trainer.state.log_history if "rewards/first_token/mean" in line]
    assert line["reward"] == pytest.approx(line["rewards/reward/mean"] + 0.5 * line["rewards/first_token/mean"])
    assert 0 < line["grad_norm"] < math.inf and 0 <= line["rollout_corr/k3_kl"] < 1e-9


def test_a_batchs_metrics_stay_as_the_policy_moves(
    exact: PreTrainedModel, policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    """A second loss on a batch, after an update, logs what the first one did."""
    trainer = make_trainer("grpo", policy_folder, tokenizer, tmp_path, None, torch.float64)
    batch = batch_of(*make_rollouts())
    batch |= old_batch(trainer, batch)
    trainer._compute_loss(trainer.model, batch)
    move(exact, trainer.model)
    trainer._compute_loss(trainer.model, batch)
    assert len(trainer._metrics["train"]["rollout_corr/k3_kl"]) == 2
    for name, values in trainer._metrics["train"].items():
        if name.startswith(("dvp/", "rollout_corr/")):
            assert values[0] == values[1], name


@pytest.mark.parametrize("kind", TRAINERS)
def test_nothing_to_learn_from(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str
) -> None:
    """Every response was cut and is masked: no token, a loss without a gradient."""
    trainer = make_trainer(kind, policy_folder, tokenizer, tmp_path, mask_truncated_completions=True)
    batch = batch_of(*make_rollouts())
    batch["completion_mask"].zero_()
    if kind == "rloo":
        batch |= old_batch(trainer, batch)
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    assert loss.isfinite()
    assert all(parameter.grad.abs().max() == 0 for parameter in trainer.model.parameters())


def test_the_lines_that_a_user_copies(policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the tutorial, on the tiny policy, two steps, in the mixed precision that TRL has by itself."""
    code, with_alarms = blocks("tutorials/train-with-trl.md", "python")
    small = "max_completion_length=4, max_steps=2, use_cpu=True, save_strategy='no', report_to='none'"
    code = code.replace("max_completion_length=512", small).replace("Qwen/Qwen3-0.6B", str(policy_folder))
    names: dict[str, Any] = {"reward": reward, "problems": Dataset.from_dict({"prompt": ["1+2=", "3+4="]})}
    monkeypatch.chdir(tmp_path)
    exec(code, names)
    trainer = names["trainer"]
    assert trainer.args.bf16 and trainer.state.global_step == 2
    exec(with_alarms, names)
    assert names["Trainer"].__name__ == "WatchedLoggedDVPRLOOTrainer"
    [line] = [line for line in trainer.state.log_history if "rollout_corr/k3_kl" in line]
    # It samples in float32 and trains in bfloat16.
    assert 1e-9 < line["rollout_corr/k3_kl"] < 1e-3
    assert line["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=0.2)
