"""A step of verl's trainer under DVP, with verl's own Ray worker, engine and queue; no sampler."""

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
import transfer_queue as tq
from conftest import DVP
from policy_fixture import VOCABULARY, write_policy
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack
from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

from tailrl.integrations.verl.scores import FILL
from tailrl.integrations.verl.workers import KEPT, constrain_engine, in_each
from tailrl.objective.safe_set import token_logprobs

LOG_RHO = -3.0
LENGTHS = ((3, 6), (3, 9), (2, 4), (2, 5))  # of prompts and responses, two a group
TOOLS = {1: (4, 5)}  # of the second response, the tokens that a tool wrote


@pytest.fixture(scope="module")
def step(configured: Callable[..., Any], queue: None, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ARG001
    """The trainer, its batch in the queue, and the policy's folder; the worker's engine is constrained."""
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.workers.engine_workers import ActorRolloutRefWorker

    folder = write_policy(tmp_path_factory.mktemp("policy"))
    actor = "actor_rollout_ref.actor"
    config = configured(
        *DVP, f"actor_rollout_ref.model.path={folder}", f"{actor}.strategy=fsdp2",
        f"{actor}.fsdp_config.strategy=fsdp2",
        f"{actor}.ppo_mini_batch_size=2", f"{actor}.ppo_micro_batch_size_per_gpu=2", f"{actor}.use_torch_compile=false",
        f"{actor}.fsdp_config.use_torch_compile=false", f"{actor}.optim.lr=1e-3", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2", "data.train_batch_size=2",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager", "trainer.device=cpu",
        f"+{actor}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        "actor_rollout_ref.rollout.temperature=0.8", f"+tailrl.log.folder={folder / 'tokens'}",
        "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    )  # fmt: skip
    trainer = get_trainer_cls("tailrl")(config=config)
    worker = RayClassWithInitArgs(
        cls=ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor", distillation_config=None
    )
    pool = RayResourcePool(process_on_nodes=[1], use_gpu=False)
    group = RayWorkerGroup(
        resource_pool=pool, ray_cls_with_init=create_colocated_worker_cls({"actor": worker}), device_name="cpu"
    ).spawn(prefix_set={"actor"})["actor"]
    group.init_model()
    trainer.actor_rollout_wg = group
    trainer.global_steps = 1
    trainer.tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids.tolist()))
    lines = in_each(group.workers, constrain_engine, LOG_RHO)
    assert len(lines) == 1 and "FSDPEngineWithLMHead" in lines[0]
    return trainer, in_queue(sequences()), folder


def sequences() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (sum(lengths),), generator=generator) for lengths in LENGTHS]


def masks() -> list[torch.Tensor]:
    rows = [torch.ones(response, dtype=torch.int64) for _, response in LENGTHS]
    for row, (begin, end) in TOOLS.items():
        rows[row][begin:end] = 0
    return rows


def in_queue(ids: list[torch.Tensor]) -> Any:
    split = [(row[:prompt], row[prompt:]) for row, (prompt, _) in zip(ids, LENGTHS, strict=True)]
    rows: dict[str, list[torch.Tensor]] = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "prompts": [prompt for prompt, _ in split],
        "responses": [response for _, response in split],
        "response_mask": masks(),
        "loss_mask": masks(),
        "rollout_log_probs": [torch.full((len(response),), -1.0) for _, response in split],
        "rm_scores": [torch.eye(len(response))[-1] * (i % 2) for i, (_, response) in enumerate(split)],
    }
    fields: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(row, layout=torch.jagged) for name, row in rows.items()
    }
    fields["uid"] = NonTensorStack("a", "a", "b", "b")
    keys = [f"{uid}_{i}_0" for i, uid in enumerate("aabb")]
    tags = [{"is_padding": False, "min_global_steps": 0, "max_global_steps": 0, "seq_len": len(row)} for row in ids]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=4), tags=tags)


def column(batch: Any, name: str) -> list[torch.Tensor]:
    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=[name])
    return list(data[name].unbind())


def test_a_step_trains_on_the_trainers_own_set(step: Any) -> None:
    from transformers import LlamaForCausalLM

    trainer, batch, folder = step
    batch.extra_info["temperature"] = 0.8
    metrics: dict[str, Any] = {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    outside, kept = [], []
    for ids_L, (prompt, _), old_T in zip(sequences(), LENGTHS, column(batch, "old_log_probs"), strict=True):
        with torch.no_grad():
            logits_TV = model(ids_L[None]).logits[0, prompt - 1 : -1] / 0.8
        exact = token_logprobs(logits_TV, ids_L[prompt:], "min_p", LOG_RHO)
        expected_T = torch.where(exact.outside_T, FILL, exact.logp_T)
        torch.testing.assert_close(old_T.double(), expected_T, atol=1e-5, rtol=0)
        outside.append(exact.outside_T)
        kept.append(exact.log_kept_T)
    assert len(column(batch, KEPT)) == 4

    batch = trainer._compute_advantage(batch, metrics)
    counted = [mask_T.bool() for mask_T in masks()]
    left = [mask_T & ~out_T for mask_T, out_T in zip(counted, outside, strict=True)]
    assert [row.bool().tolist() for row in column(batch, "response_mask")] == [row.tolist() for row in left]
    share = sum(int((m & o).sum()) for m, o in zip(counted, outside, strict=True)) / sum(int(m.sum()) for m in counted)
    assert 0.1 < share < 0.9
    assert metrics["tailrl/dvp/sampled_outside_train_support_fraction"] == pytest.approx(share)
    mass = torch.cat([values_T[mask_T] for values_T, mask_T in zip(kept, counted, strict=True)]).exp().mean().item()
    assert metrics["tailrl/dvp/kept_mass_train_mean"] == pytest.approx(mass, abs=1e-6)
    assert (folder / "tokens/1.jsonl").exists()

    batch = trainer._update_actor(batch, metrics)
    assert metrics["actor/grad_norm"] > 0 and math.isfinite(metrics["actor/pg_loss"])
    assert metrics["actor/ppo_kl"] < 1, "no fill is left in verl's ratios"
    before = column(batch, "old_log_probs")
    batch = trainer._compute_old_log_prob(batch, {})
    moved = [
        (a - b)[m].abs().max().item() for a, b, m in zip(column(batch, "old_log_probs"), before, left, strict=True)
    ]
    assert max(moved) > 1e-4, "the update reached the policy"
