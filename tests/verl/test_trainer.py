"""The plugin in verl's own trainers: their classes, configuration and queue. No model is trained here."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transfer_queue as tq
from conftest import DVP
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls

from tailrl import diagnose
from tailrl.integrations.verl.scores import FILL
from tailrl.integrations.verl.workers import KEPT, SIZE, TOP
from tailrl.runtime.errors import StudyError

PROMPTS = [[5, 6], [5, 6], [7], [7], [7]]
RESPONSES = [[11, 12, 13], [14], [15, 16], [17, 18], [19]]
INFER = [[-1.0, 0.0, -0.25], [-2.0], [-3.0, -0.125], [-0.5, -0.5], [-1.0]]
TRAIN = [[-1.5, -9.0, -0.25], [-1.0], [FILL, -0.25], [-0.5, -0.75], [-1.0]]
MASKS = [[1, 0, 1], [1], [1, 1], [1, 1], [1]]  # the second token of the first response is a tool's
KEPT_LOGS = [[-0.1, -9.0, -0.2], [-0.3], [-0.4, -0.1], [0.0, -0.1], [-9.0]]
REWARDS = [[0.0, 0.0, 1.0], [0.0], [0.0, 0.0], [0.0, 1.0], [0.0]]
GROUPS = ["a", "a", "b", "b", "b"]
FILLS_UP = [False, False, False, False, True]  # the last response fills the batch up
LOG = ("trainer.v1.trainer_mode=tailrl", "actor_rollout_ref.rollout.calculate_log_probs=true")


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def of_engine(rows: list[list[float]]) -> torch.Tensor:
    """As an engine gives it: for the prompt too, each number at the token before; 7 belongs to no response."""
    return jagged([[7.0] * (len(p) - 1) + row + [7.0] for p, row in zip(PROMPTS, rows, strict=True)])


def in_queue(name: str, without: str = "", constrained: bool = True) -> Any:
    """The batch in verl's queue, as its trainer has it before advantages."""
    fields: dict[str, Any] = {
        "prompts": jagged(PROMPTS),
        "responses": jagged(RESPONSES),
        "response_mask": jagged(MASKS),
        "rollout_log_probs": jagged(INFER),
        "old_log_probs": jagged(TRAIN),
        "rm_scores": jagged(REWARDS),
    }
    fields.pop(without, None)
    if constrained:
        sizes = [[float(len(row))] * len(row) for row in RESPONSES]
        fields |= {KEPT: of_engine(KEPT_LOGS), SIZE: of_engine(sizes), TOP: of_engine(KEPT_LOGS)}
    fields["uid"] = NonTensorStack(*GROUPS)
    fields["data_source"] = NonTensorStack(*(f"set {group}" for group in GROUPS))
    keys = [f"{name}{group}_{i}_0" for i, group in enumerate(GROUPS)]
    tags = [{"is_padding": fills, "min_global_steps": i % 2} for i, fills in enumerate(FILLS_UP)]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=len(keys)), tags=tags)


def trainer_of(config: Any, step: int = 2) -> Any:
    """verl's trainer by the configuration's own name of it, made as verl makes it, at a step."""
    trainer = get_trainer_cls(config.trainer.v1.trainer_mode)(config=config)
    trainer.global_steps = step
    trainer.tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids.tolist()))
    return trainer


def column(batch: Any, name: str) -> list[list[float]]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])
    return [row.tolist() for row in data[name].unbind()]


# --- which class runs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_each_trainer_of_verls_has_one_of_ours_that_verl_takes_for_its_own(mode: str) -> None:
    kind = get_trainer_cls("tailrl" if mode == "sync" else f"tailrl_{mode}")
    assert issubclass(kind, get_trainer_cls(mode)) and kind is not get_trainer_cls(mode)
    assert kind.mode == mode


def test_verl_sees_its_own_trainers_name(configured: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    """verl compares the name with `sync` in six places."""
    config = configured(*DVP)
    trainer = trainer_of(config)
    assert trainer.trainer_mode == config.trainer.v1.trainer_mode == "sync"
    assert type(trainer.replay_buffer).__name__ == "ReplayBuffer"
    assert "DVP with ln ρ = -3, no log, no alarms" in capsys.readouterr().out


def test_an_installed_plugin_changes_nothing_in_a_run_that_does_not_ask(configured: Callable[..., Any]) -> None:
    config = configured()
    assert config.trainer.use_v1 and config.trainer.v1.trainer_mode == "sync"
    kind = get_trainer_cls("sync")
    assert kind.__module__ == "verl.trainer.ppo.v1.trainer_sync"
    changed = {name for name, value in vars(PPOTrainer).items() if "tailrl" in str(getattr(value, "__module__", ""))}
    assert changed == {"__init__"}
    assert type(kind(config)) is kind


def test_verls_own_trainer_does_not_ignore_our_key(configured: Callable[..., Any]) -> None:
    config = configured("+tailrl.dvp.log_rho=-13")
    with pytest.raises(StudyError, match=r"does not read the key tailrl: set trainer\.v1"):
        get_trainer_cls("sync")(config)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (LOG, "nothing is asked of it"),
        ((*LOG, "+tailrl.dvp.log_rho=3"), "dvp.log_rho"),
        ((*LOG, "+tailrl.dpv.log_rho=-3"), "dpv is not a known key"),
        ((DVP[0], DVP[1], "actor_rollout_ref.rollout.calculate_log_probs=false"), "calculate_log_probs=true"),
        ((*DVP, "algorithm.rollout_correction.bypass_mode=true"), "bypass_mode=false"),
        ((*DVP, "actor_rollout_ref.rollout.name=sglang"), "SGLang's log-probs are not renormalised"),
        ((*DVP, "actor_rollout_ref.rollout.logprobs_mode=raw_logprobs"), "logprobs_mode=processed_logprobs"),
        ((*DVP, "actor_rollout_ref.rollout.top_p=0.9"), "prune by more than min-p"),
        ((*DVP, "actor_rollout_ref.rollout.top_k=20"), "prune by more than min-p"),
        ((*DVP, "actor_rollout_ref.rollout.temperature=0"), "must be random"),
        ((*DVP, "actor_rollout_ref.model.use_fused_kernels=true"), "fused kernels score without"),
        ((*DVP, "actor_rollout_ref.actor.strategy=megatron"), "splits the vocabulary over ranks"),
        ((*DVP, "actor_rollout_ref.actor.strategy=automodel"), "fsdp or fsdp2: it scores in a module of its own"),
        ((*DVP, "actor_rollout_ref.actor.strategy=torchtitan"), "fsdp or fsdp2: it scores in a module of its own"),
        ((*DVP, "actor_rollout_ref.actor.strategy=veomni"), "fsdp or fsdp2: it scores in a module of its own"),
        ((*DVP, "actor_rollout_ref.actor.strategy=another"), "needs fsdp or fsdp2: it is not known"),
        ((*DVP, "actor_rollout_ref.actor.use_kl_loss=true"), "KL between policies on two sets is infinite"),
        ((*DVP, "algorithm.use_kl_in_reward=true"), "KL between policies on two sets is infinite"),
        ((*DVP, "actor_rollout_ref.actor.entropy_coeff=0.01"), "entropy is of the whole vocabulary"),
        ((*DVP, "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"), "loss_mode=gspo"),
        ((*DVP, "algorithm.adv_estimator=optimal_token_baseline"), "whole vocabulary"),
        ((*DVP, "actor_rollout_ref.model.mtp.enable=true", "actor_rollout_ref.model.mtp.enable_rollout=true"),
         "speculative"),
    ],
)  # fmt: skip
def test_a_run_that_would_not_do_what_it_asks_ends_at_its_start(
    configured: Callable[..., Any], lines: tuple[str, ...], words: str
) -> None:
    with pytest.raises(StudyError, match=words) as ended:
        trainer_of(configured(*lines))
    assert "\n" not in str(ended.value)


# --- a step ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("queue")
def test_a_step_is_masked_measured_and_logged(configured: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(configured(*DVP, f"+tailrl.log.folder={tmp_path}"))
    metrics: dict[str, Any] = {}
    batch = trainer._compute_advantage(in_queue("step"), metrics)

    assert column(batch, "response_mask") == [[1, 0, 1], [1], [0, 1], [1, 1], [1]]
    assert column(batch, "old_log_probs")[2][0] == FILL, "the loss gets a finite number"
    ours = {name.removeprefix("tailrl/"): value for name, value in metrics.items() if name.startswith("tailrl/")}
    kept = [math.exp(x) for x in (-0.1, -0.2, -0.3, -0.4, -0.1, 0.0, -0.1)]
    deltas = (-0.5, 0.0, 1.0, -0.125, 0.0, -0.25)  # of the six tokens inside, without the tool's
    assert ours == pytest.approx(
        {
            "dvp/kept_mass_train_mean": sum(kept) / 7,
            "dvp/kept_vocab_per_token_train": (3 + 3 + 1 + 2 + 2 + 2 + 2) / 7,
            "dvp/sampled_outside_train_support_fraction": 1 / 7,
            "dvp/sampled_outside_train_support_count": 1.0,
            "rollout_corr/k3_kl": sum(math.exp(x) - x - 1 for x in deltas) / 6,
        }
    )
    assert metrics["rollout_corr/k3_kl"] > 5, "verl's own still has the fill in it"

    rows = [json.loads(line) for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    assert [row["token_ids"] for row in rows] == [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)][:4]
    assert [row["mask"] for row in rows] == [[1, 0, 1], [1], [0, 1], [1, 1]]
    assert [row["sampler_logprobs"] for row in rows] == INFER[:4]
    assert [row["trainer_logprobs"] for row in rows] == TRAIN[:4]
    assert rows[0]["trainer_top_logprobs"] == pytest.approx(KEPT_LOGS[0])
    assert [row["trainer_set_size"] for row in rows] == [[3, 3, 3], [1], [2, 2], [2, 2]]
    assert [row["version"] for row in rows] == [1, 2, 1, 2] and {row["step"] for row in rows} == {2}
    assert [row["data_source"] for row in rows] == ["set a", "set a", "set b", "set b"]
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0, 1.0] and rows[0]["text"] == "[11, 12, 13]"
    assert rows[0]["advantage"][0] > 0 > rows[1]["advantage"][0]
    measured = diagnose(tmp_path).measured
    assert (measured.sequences, measured.tokens) == (4, 6), "the tool's token and the one outside are left out"
    assert measured.extremes["abs_logp_max"] == 1.0


@pytest.mark.usefixtures("queue")
def test_a_rejection_leaves_the_log_whole(configured: Callable[..., Any], tmp_path: Path) -> None:
    """verl takes what it rejects out of the mask, and makes its advantage 0."""
    lines = (
        "algorithm.rollout_correction.rollout_rs=seq_max_k2",
        "algorithm.rollout_correction.rollout_rs_threshold=0.2",
    )
    trainer = trainer_of(configured(*LOG, f"+tailrl.log.folder={tmp_path}", *lines))
    batch = trainer._compute_advantage(in_queue("rejected", constrained=False), {})
    assert column(batch, "response_mask") == [[1, 0, 1], [0], [0, 0], [1, 1], [1]]
    rows = [json.loads(line) for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    assert [row["mask"] for row in rows] == MASKS[:4], "without DVP a log-prob of -50 is a finding"
    assert rows[1]["advantage"] == [None] and rows[2]["advantage"] == [None, None]
    assert all(isinstance(value, float) for value in rows[3]["advantage"])
    assert diagnose(tmp_path).measured.tokens == 7


@pytest.mark.usefixtures("queue")
def test_a_log_is_no_larger_than_was_asked(
    configured: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configured(*LOG, f"+tailrl.log.folder={tmp_path}", "+tailrl.log.every=3", "+tailrl.log.responses=2",
                        "+tailrl.log.format=parquet")  # fmt: skip
    trainer = trainer_of(config, step=1)
    for step in range(1, 8):
        trainer.global_steps = step
        trainer._compute_advantage(in_queue(f"size{step}", constrained=False), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.parquet", "6.parquet"]
    said = [line for line in capsys.readouterr().out.splitlines() if "responses logged" in line]
    assert len(said) == 1 and "2 of 4 responses logged" in said[0] and "MB in 1,000 steps" in said[0]
    measured = diagnose(tmp_path).measured
    assert measured.sequences == 4 and measured.tokens >= 4


@pytest.mark.usefixtures("queue")
def test_a_step_of_several_updates_is_several_files(configured: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(configured(*LOG, f"+tailrl.log.folder={tmp_path}"))
    trainer.parameter_sync_step = 2
    for trainer.local_trigger_step in (0, 1):
        trainer._compute_advantage(in_queue(f"part{trainer.local_trigger_step}", constrained=False), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2_0.jsonl", "2_1.jsonl"]


@pytest.mark.usefixtures("queue")
def test_an_engine_that_did_not_prune_ends_the_run(configured: Callable[..., Any]) -> None:
    trainer = trainer_of(configured(*DVP))
    with pytest.raises(StudyError, match="an engine returned no kept mass"):
        trainer._compute_advantage(in_queue("plain", constrained=False), {})


@pytest.mark.usefixtures("queue")
def test_a_batch_without_the_samplers_log_probs_is_one_sentence(configured: Callable[..., Any], tmp_path: Path) -> None:
    trainer = trainer_of(configured(*LOG, f"+tailrl.log.folder={tmp_path}"))
    with pytest.raises(StudyError, match="verl's batch has no rollout_log_probs"):
        trainer._compute_advantage(in_queue("lacking", without="rollout_log_probs", constrained=False), {})


# --- the alarms --------------------------------------------------------------------------------------------


def with_mismatch(name: str, nats: float, lags: int) -> tuple[Any, np.ndarray]:
    """Sixteen responses of eight tokens to four prompts, in the queue; and each token's ℓ, of these nats."""
    rng = np.random.default_rng(int(name))
    infer = rng.uniform(-3, -0.5, (16, 8)).astype(np.float32)
    train = (infer + rng.choice([-1, 1], infer.shape) * nats).astype(np.float32)
    fields: dict[str, Any] = {
        "prompts": jagged([[float(i // 4 + 1), float(rng.integers(1000))] for i in range(16)]),
        "responses": jagged(rng.integers(0, 1000, infer.shape).tolist()),
        "response_mask": jagged([[1] * 8] * 16),
        "rollout_log_probs": jagged(infer.tolist()),
        "old_log_probs": jagged(train.tolist()),
        "rm_scores": jagged([[0.0] * 7 + [float(i % 2)] for i in range(16)]),
        "uid": NonTensorStack(*(f"{i // 4}" for i in range(16))),
        "num_turns": NonTensorStack(*[2] * 16),
    }
    step = int(name)
    tags = [{"is_padding": False, "min_global_steps": step - 1 - lags, "max_global_steps": step - 1} for _ in range(16)]
    keys = [f"watched{name}_{i}_0" for i in range(16)]
    batch = tq.kv_batch_put(keys=keys, partition_id="watched", fields=TensorDict(fields, batch_size=16), tags=tags)
    return batch, train.astype(np.float64) - infer


@pytest.mark.usefixtures("queue")
def test_alarms_and_the_table_by_lag_are_metrics_of_verls(
    configured: Callable[..., Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trainer_of(configured(*LOG, "+tailrl.watch=true"))
    monkeypatch.setattr(trainer, "_get_n_gpus_for_throughput", lambda: 1)
    raised = {}
    for step in range(1, 8):
        trainer.global_steps = step
        metrics: dict[str, Any] = {"actor/lr": 1e-6, "actor/grad_norm": 1.0}
        lag = int(step == 3)
        batch, delta = with_mismatch(str(step), 0.2 if step == 7 else 0.002, lags=lag)
        trainer._compute_advantage(batch, metrics)
        timing = {"step": 1.0, "gen": 1.0}
        trainer._compute_metrics(batch, metrics, timing, global_steps=step, epoch=0)
        raised[step] = metrics["tailrl/alarms"]
        row = f"tailrl/lag/{lag}"
        assert metrics[f"{row}/responses"] == 16 and metrics[f"{row}/tokens"] == 128
        assert metrics[f"{row}/mean_abs"] == pytest.approx(np.abs(delta).mean())
        ratio = np.exp(delta)
        assert metrics[f"{row}/ess"] == pytest.approx(ratio.sum() ** 2 / (128 * (ratio**2).sum()))
        assert f"tailrl/lag/{1 - lag}/tokens" not in metrics, "each step begins anew"
    assert raised == {1: 0, 2: 0, 3: 0, 4: 0, 5: 0, 6: 0, 7: raised[7]} and raised[7] >= 1
    assert metrics["tailrl/alarm/floor_jump"] == 1.0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("tailrl:   ALARM")]
    assert len(said) == raised[7] and any("floor_jump" in line for line in said)


@pytest.mark.usefixtures("queue")
def test_parts_of_a_step_are_judged_together(configured: Callable[..., Any]) -> None:
    trainer = trainer_of(configured(*LOG, "+tailrl.watch=true"))
    for part in ("3", "4"):
        trainer._compute_advantage(with_mismatch(part, 0.01, lags=0)[0], {})
    values, _ = trainer._watching.end(2, {"actor/lr": math.nan, "rollout_corr/k3_kl": math.nan})
    assert values["tailrl/lag/below_0/responses"] == 32
    assert values["tailrl/alarm/negative_lag"] == values["tailrl/alarm/not_finite"] == 1


# --- the older trainer -------------------------------------------------------------------------------------


def older(config: Any) -> Any:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    trainer = RayPPOTrainer.__new__(RayPPOTrainer)
    trainer.config, trainer.global_steps = config, 2
    trainer.tokenizer = SimpleNamespace(
        decode=lambda ids, **_: str(ids.tolist()), batch_decode=lambda rows, **_: [str(row) for row in rows]
    )
    trainer._dump_generations = lambda **_: None
    return trainer


def test_the_older_trainer_is_logged_too(configured: Callable[..., Any], tmp_path: Path) -> None:
    from verl import DataProto

    config = configured(
        "trainer.use_v1=false", f"+tailrl.log.folder={tmp_path}", f"trainer.rollout_data_dir={tmp_path / 'texts'}",
        "actor_rollout_ref.rollout.calculate_log_probs=true", "+tailrl.log.responses=3",
    )  # fmt: skip
    trainer = older(config)
    with pytest.raises(AttributeError):  # verl's own `fit` begins, and misses its workers
        trainer.fit()

    def padded(rows: list[list[Any]], left: bool = False) -> torch.Tensor:
        side = "left" if left else "right"
        return torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)

    ones = [[1] * len(row) for row in RESPONSES]
    batch = {
        "prompts": padded(PROMPTS, left=True), "responses": padded(RESPONSES), "response_mask": padded(MASKS),
        "attention_mask": torch.cat([padded([[1] * len(row) for row in PROMPTS], left=True), padded(ones)], 1),
        "rollout_log_probs": padded(INFER), "old_log_probs": padded(TRAIN), "token_level_scores": padded(REWARDS),
        "advantages": padded([[0.5] * len(row) for row in RESPONSES]),
    }  # fmt: skip
    trainer._log_rollout_data(DataProto.from_dict(batch), {}, {}, str(tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "2.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    for row in rows:
        i = [p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)].index(row["token_ids"])
        assert row["sampler_logprobs"] == INFER[i] and row["mask"] == MASKS[i] and row["reward"] == sum(REWARDS[i])
    assert diagnose(tmp_path / "2.jsonl").measured.sequences == 3


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["+tailrl.dvp.log_rho=-3"], "set trainer.use_v1=true"),
        (["+tailrl.watch=true"], "set trainer.use_v1=true"),
        (["+tailrl.log.folder=x"], r"set trainer\.rollout_data_dir"),
        (["+tailrl.log.folder=x", "trainer.rollout_data_dir=y", "algorithm.rollout_correction.rollout_rs=token_k1"],
         "rollout_rs takes"),
    ],
)  # fmt: skip
def test_the_older_trainer_refuses_what_it_cannot_do(
    configured: Callable[..., Any], lines: list[str], words: str
) -> None:
    with pytest.raises(StudyError, match=words):
        older(configured("actor_rollout_ref.rollout.calculate_log_probs=true", *lines)).fit()
