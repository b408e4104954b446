"""TRL's own loop with sharded weights, by accelerate: two gloo processes take one step, whose update is the study's.

accelerate shards on accelerators alone (accelerate/state.py, `AcceleratorState.__init__`: FSDP's branch leaves
MULTI_CPU out, and DeepSpeed's asks for `not cpu`). Here it takes a CPU for one.
"""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import DistributedType, PartialState
from peft import LoraConfig, TaskType
from ranks_fixture import on_ranks
from step_fixture import DVP, make_rollouts, run_of, samples_of
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, training_args
from trl_fixture import TEMPERATURE, batch_of, make_trainer

from tailrl.integrations.trl import Correction, with_doctor
from tailrl.training.scorer import make_scorer
from tailrl.training.step import accumulate_gradients
from tailrl.training.stopwatch import Stopwatch

pytestmark = pytest.mark.slow

MIS = {"sequence": "mis", "veto": 1e-4}
RESPONSES, RANKS = 8, 2
RATE = 64.0  # so large that float32 weights show the gradient to six digits
OUTSIDE_COUNT = "dvp/sampled_outside_train_support_count"
WAYS = {
    "fsdp2": ("FSDPLlamaForCausalLM", "DTensor"),
    "fsdp2, the head too": ("FSDPLlamaForCausalLM", "DTensor"),
    "fsdp1": ("FullyShardedDataParallel", "Parameter"),
    "zero2": ("DeepSpeedEngine", "Parameter"),
    "zero3": ("DeepSpeedEngine", "Parameter"),
}

FSDP = {"ACCELERATE_USE_FSDP": "true", "FSDP_CPU_RAM_EFFICIENT_LOADING": "false"}
BY_LAYER = {"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP", "FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer"}
HEAD_TOO = BY_LAYER | {"FSDP_TRANSFORMER_CLS_TO_WRAP": "LlamaDecoderLayer,Linear"}
ADAPTERS = LoraConfig(r=4, lora_alpha=8, task_type=TaskType.CAUSAL_LM, target_modules=["q_proj", "v_proj"])
ENVIRONMENTS = {
    "fsdp2": FSDP | BY_LAYER | {"FSDP_VERSION": "2"},
    "fsdp2, the head too": FSDP | HEAD_TOO | {"FSDP_VERSION": "2"},
    "fsdp1": FSDP | BY_LAYER | {"FSDP_VERSION": "1", "FSDP_USE_ORIG_PARAMS": "true"},
}


def as_accelerators() -> None:
    """accelerate takes this process for one of several with an accelerator, whose device is the CPU."""

    def device(state: PartialState) -> None:
        state.device = torch.device("cpu")

    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_HPU)
    PartialState.set_device = device
    training_args.is_torch_bf16_gpu_available = lambda: True


def free_port() -> str:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return str(server.getsockname()[1])


def trainer_of(kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast, out: Path, **settings: Any) -> Any:
    """This rank's trainer, on a CPU that accelerate takes for an accelerator."""
    rank = str(dist.get_rank())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    as_accelerators()
    small = {"use_cpu": False, "per_device_train_batch_size": RESPONSES // RANKS, "max_grad_norm": 0.0}
    return make_trainer(kind, folder, tokenizer, out / rank, Correction(**MIS), **(small | settings))


def take_step(
    kind: str, folder: Path, tokenizer: PreTrainedTokenizerFast, out: Path, environment: dict[str, str], settings: Any
) -> dict[str, Any]:
    """One step of TRL's loop on this rank's half of the batch: the whole weights after it, and what was logged."""
    os.environ.update(environment)
    sgd = {"max_steps": 1, "optim": "sgd", "learning_rate": RATE, "lr_scheduler_type": "constant"}
    trainer = trainer_of(kind, folder, tokenizer, out, **sgd, **settings)
    rollouts, advantages = make_rollouts(RESPONSES)
    half = slice(dist.get_rank(), None, RANKS)
    batch = batch_of(rollouts[half], advantages[half])
    batch["num_items_in_batch"] = torch.tensor(float(sum(len(one.tokens) for one in rollouts)))

    def sampled(_: Any) -> dict[str, Any]:
        if kind == "rloo":
            batch["old_logps"] = trainer.score_batch(batch).masked_fill(batch["completion_mask"] == 0, 0.0).sum(1)
            batch.update(trainer._old)
        return batch

    trainer._generate_and_score_completions = sampled
    trainer.train()
    return {"weights": whole_weights(trainer), "log": trainer.state.log_history[0], "model": names(trainer)}


def take_sampled_steps(
    folder: Path, tokenizer: PreTrainedTokenizerFast, out: Path, environment: dict[str, str], settings: Any
) -> dict[str, Any]:
    """Two steps of TRL's loop with its own generation, and what was logged."""
    os.environ.update(environment)
    trainer = trainer_of("grpo", folder, tokenizer, out, **settings)
    scored: list[torch.dtype] = []
    score = trainer._score

    def noted(*arguments: Any) -> Any:
        result = score(*arguments)
        scored.append(result.logp_T.dtype)
        return result

    trainer._score = noted
    trainer.__class__ = with_doctor(type(trainer))
    trainer.train()
    counted = [step.responses for step in trainer._alarms._past]
    return {"log": trainer.state.log_history, "model": names(trainer), "dtypes": scored, "responses": counted}


def names(trainer: Any) -> tuple[str, str]:
    """The classes of the wrapped model and of its head's weight."""
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    return type(trainer.model_wrapped).__name__, type(model.get_output_embeddings().weight).__name__


def whole_weights(trainer: Any) -> dict[str, torch.Tensor]:
    model = trainer.accelerator.unwrap_model(trainer.model_wrapped)
    if trainer.is_deepspeed_enabled:
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return {name: weight.detach().clone() for name, weight in model.named_parameters()}
    if isinstance(trainer.model_wrapped, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(trainer.model_wrapped):
            weights = model.named_parameters()
            return {name.replace("_fsdp_wrapped_module.", ""): weight.detach().clone() for name, weight in weights}
    return {name: weight.full_tensor().detach().clone() for name, weight in model.named_parameters()}


def sharded(name: str) -> tuple[dict[str, str], dict[str, Any]]:
    """The environment and the settings of a way to shard."""
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    if name in ENVIRONMENTS:
        return ENVIRONMENTS[name] | meeting, {}
    pytest.importorskip("deepspeed")
    zero = {
        "zero_optimization": {"stage": int(name[-1]), "stage3_param_persistence_threshold": 0},
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
    }
    return {"DS_ACCELERATOR": "cpu"} | meeting, {"deepspeed": zero}


@pytest.fixture
def untied(model: PreTrainedModel, tmp_path: Path) -> Path:
    """The tiny policy with a head of its own, of other weights than its embeddings, as a folder."""
    model.config.tie_word_embeddings = False
    weight = model.get_input_embeddings().weight.detach()
    model.lm_head.weight = torch.nn.Parameter(weight + 0.01 * torch.randn(weight.shape))
    model.save_pretrained(tmp_path / "untied")
    return tmp_path / "untied"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["rloo", "grpo"])
def test_a_step_is_the_studys(
    untied: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, kind: str, way: str
) -> None:
    """Each rank has half of the responses, by turns; some of their tokens lie outside the set."""
    environment, settings = sharded(way)
    settings |= {"loss_type": "dapo"} if kind == "grpo" else {}
    ranks = on_ranks(RANKS, tmp_path, take_step, kind, untied, tokenizer, tmp_path, environment, settings)
    assert {"model.embed_tokens.weight", "lm_head.weight"} <= ranks[0]["weights"].keys()
    rollouts, advantages = make_rollouts(RESPONSES)
    run = run_of({"vocabulary": DVP, "correction": MIS}, temperature=TEMPERATURE)
    _, record = accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    metrics = record.metrics()
    scale = RESPONSES / sum(len(one.tokens) for one in rollouts) if kind == "grpo" else 1.0
    assert ranks[0]["model"] == WAYS[way]
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        moved = -RATE * scale * weight.grad
        for rank in ranks:
            change = rank["weights"][name] - weight.detach()
            torch.testing.assert_close(change, moved, rtol=1e-5, atol=1e-5 * moved.abs().max().item())
    for rank in ranks:
        # Means over ranks of equal numbers of responses, and a sum.
        for key in ("rollout_corr/rollout_is_mean", "rollout_corr/veto_seq_fraction", OUTSIDE_COUNT):
            assert rank["log"][key] == pytest.approx(metrics[key], rel=1e-5), key
    assert metrics[OUTSIDE_COUNT] > 0


@pytest.mark.parametrize("kind", ["float32", "bf16", "lora"])
@pytest.mark.parametrize("way", WAYS)
def test_steps_with_trls_own_generation(
    untied: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, way: str, kind: str
) -> None:
    """In bfloat16 too the log-probs stay float32: FSDP2 by itself would round them to 0.03 nats."""
    environment, settings = sharded(way)
    bf16 = kind == "bf16"
    settings |= {"bf16": bf16, "given": {"peft_config": ADAPTERS} if kind == "lora" else {}}
    ranks = on_ranks(RANKS, tmp_path, take_sampled_steps, untied, tokenizer, tmp_path, environment, settings)
    for rank in ranks:
        assert rank["model"][1] == WAYS[way][1] and set(rank["dtypes"]) == {torch.float32}
        # Alarms are of the responses of all ranks.
        assert rank["responses"] == [RESPONSES] * 2
        steps = [line for line in rank["log"] if "rollout_corr/k3_kl" in line]
        assert len(steps) == 2 and all(line["tailrl/alarms"] == 0 for line in steps)
        for line in steps:
            assert 0 <= line["rollout_corr/k3_kl"] < (1e-3 if bf16 else 1e-9)
            assert 0 < line["dvp/kept_mass_train_mean"] < 1 and line["grad_norm"] > 0


@pytest.mark.parametrize("way", ["fsdp2", "zero3"])
def test_a_step_of_lora(
    untied: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, way: str
) -> None:
    """W + s B A with B = 0: the step moves B by s G Aᵀ, with the study's gradient G, and A not at all."""
    environment, settings = sharded(way)
    settings |= {"loss_type": "dapo", "given": {"peft_config": ADAPTERS}}
    ranks = on_ranks(RANKS, tmp_path, take_step, "grpo", untied, tokenizer, tmp_path, environment, settings)
    rollouts, advantages = make_rollouts(RESPONSES)
    run = run_of({"vocabulary": DVP, "correction": MIS}, temperature=TEMPERATURE)
    accumulate_gradients(model, samples_of(rollouts, advantages, run), make_scorer(run), Stopwatch())
    scale = RESPONSES / sum(len(one.tokens) for one in rollouts)
    for rank in ranks:
        moved = {name: weight for name, weight in rank["weights"].items() if "lora_B" in name}
        assert len(moved) == 4
        for name, weight in moved.items():
            whole = model.get_parameter(name.removeprefix("base_model.model.").replace("lora_B.default.", "")).grad
            assert whole is not None
            expected = -RATE * scale * 2 * whole @ rank["weights"][name.replace("lora_B", "lora_A")].T
            torch.testing.assert_close(weight, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())
