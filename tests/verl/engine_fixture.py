"""verl's FSDP engine on a CPU, a batch for it, and the same scores and gradients by our objective in float64."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from cpu_platform import add_engine
from policy_fixture import VOCABULARY
from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig

from tailrl.integrations.verl.scores import FILL
from tailrl.integrations.verl.workers import constrain_engine
from tailrl.objective.safe_set import token_logprobs

LOG_RHO = -3.0
TEMPERATURE = 0.8
LENGTHS = ((3, 6), (5, 9), (2, 4), (4, 1))  # of prompts and responses


def add_attention() -> str:
    """verl's exchange of sequences and heads around attention, with plain attention in place of flash-attn's kernel.

    verl changes flash attention alone (models/transformers/monkey_patch.py, line 551), whose kernel needs a GPU.
    """
    from transformers.modeling_utils import AttentionInterface
    from verl.models.transformers import monkey_patch

    def kernel(
        query_BLHD: Tensor, key_BLHD: Tensor, value_BLHD: Tensor, *_: Any, position_ids: Tensor, **__: Any
    ) -> Tensor:
        sequence_L = (position_ids[0] == 0).cumsum(0)
        seen_LL = (sequence_L[:, None] == sequence_L).tril()
        query, key, value = (heads.transpose(1, 2) for heads in (query_BLHD, key_BLHD, value_BLHD))
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen_LL, enable_gqa=True)
        return attended.transpose(1, 2)

    def attention(
        _: Any, query_BHLD: Tensor, key_BHLD: Tensor, value_BHLD: Tensor, mask: Any, **named: Any
    ) -> tuple[Tensor, None]:
        query, key, value = (heads.transpose(1, 2) for heads in (query_BHLD, key_BHLD, value_BHLD))
        return monkey_patch._ulysses_flash_attention_forward(query, key, value, mask, query.shape[1], **named), None

    monkey_patch._flash_attention_forward = kernel
    AttentionInterface.register("exchanged", attention)
    return "exchanged"


def engine_of(policy: Path, lora: Mapping[str, Any] | None = None, **settings: Any) -> Any:
    """verl's FSDP engine in this rank; `lora` has its model's settings of adapters, the rest are of the engine."""
    from verl.workers.engine.base import EngineRegistry

    add_engine()
    packed = settings.pop("use_remove_padding", True)
    strategy = settings.pop("strategy", "fsdp2")
    attention = "eager"
    if settings.get("ulysses_sequence_parallel_size", 1) > 1:
        attention = add_attention()
    model_config = HFModelConfig(
        path=str(policy), load_tokenizer=False, use_remove_padding=packed, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": attention}, **(lora or {}),
    )  # fmt: skip
    precision = {name: settings.get("precision", "fp32") for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    settings.pop("precision", None)
    engine_config = FSDPEngineConfig(
        strategy=strategy, model_dtype="fp32", use_torch_compile=False, mixed_precision=precision,
        use_remove_padding=packed, **settings,
    )  # fmt: skip
    engine = EngineRegistry.new(
        model_type="language_model", backend=strategy, model_config=model_config, engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10), checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    return engine


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (sum(lengths),), generator=generator) for lengths in LENGTHS]


def batch(packed: bool, part: Sequence[int] = range(len(LENGTHS)), **more: Any) -> Any:
    """The sequences of a rank as verl's engine takes them; `more` are settings of the batch."""
    rows = [(sequences()[i], *LENGTHS[i]) for i in part]
    jagged: dict[str, Any] = {
        "input_ids": [ids_L for ids_L, _, _ in rows],
        "position_ids": [torch.arange(len(ids_L)) for ids_L, _, _ in rows],
        "loss_mask": [torch.ones(response, dtype=torch.int64) for _, _, response in rows],
        "prompts": [ids_L[:prompt] for ids_L, prompt, _ in rows],
        "responses": [ids_L[prompt:] for ids_L, prompt, _ in rows],
        "response_mask": [torch.ones(response, dtype=torch.int64) for _, _, response in rows],
    }
    tensors = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in jagged.items()}
    return tu.get_tensordict(
        tensors,
        non_tensor_dict={
            "temperature": TEMPERATURE, "use_remove_padding": packed, "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2, "use_fused_kernels": False, "calculate_entropy": True, **more,
        },
    )  # fmt: skip


def oracle(
    policy: Path, score: Callable[[Tensor, Tensor], Tensor], adapted: Callable[[Any], Any] = lambda model: model
) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Scores [T] of each sequence's tokens in float64, one sequence at a time; gradients of the responses' sum."""
    from transformers import LlamaForCausalLM

    model = adapted(LlamaForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="eager"))
    rows = []
    for ids_L, (prompt, _) in zip(sequences(), LENGTHS, strict=True):
        scores_T = score(model(ids_L[None]).logits[0, :-1] / TEMPERATURE, ids_L[1:])
        (scores_T[prompt - 1 :] * weights(len(scores_T) - prompt + 1)).sum().backward()
        rows.append(scores_T.detach())
    return rows, {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def weights(count: int) -> Tensor:
    """Advantages of either sign."""
    return torch.linspace(-1.0, 2.0, count)


def ours(logits_TV: Tensor, tokens_T: Tensor) -> Tensor:
    found = token_logprobs(logits_TV, tokens_T, "min_p", LOG_RHO)
    return torch.where(found.outside_T, FILL, found.logp_T)


def loss_of(model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict[str, Any]]:  # noqa: ARG001
    """The weighted sum of the responses' log-probs, times the ranks over which FSDP takes a mean, as verl's losses."""
    total = torch.zeros(())
    rows = zip(model_output["log_probs"].unbind(), data["prompts"].offsets().diff().tolist(), strict=True)
    for logp_L, prompt in rows:
        of_response = logp_L[prompt - 1 : -1]
        total = total + (of_response * weights(len(of_response))).sum()
    return total * data["dp_size"], {}


def constrained(engine: Any) -> str:
    """Constrains the engine as a worker of verl's trainers holds it; the line that is printed."""
    worker = SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=engine), ref=None)})
    return constrain_engine(worker, LOG_RHO)


def scored(engine: Any, data: Any) -> Any:
    """The engine's outputs, one entry a sequence."""
    with engine.eval_mode():
        return engine.infer_batch(data, loss_function=None)["model_output"]


def gradients_of(engine: Any, data: Any) -> dict[str, Tensor]:
    """Whole gradients in float64, by the names of the parameters that are trained."""
    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(data, loss_function=loss_of)
        version_1 = isinstance(engine.module, FullyShardedDataParallel)
        gathered = FullyShardedDataParallel.summon_full_params(engine.module, with_grads=True)
        with gathered if version_1 else nullcontext():
            return {
                name.replace("_fsdp_wrapped_module.", ""): whole(parameter.grad).double()
                for name, parameter in engine.module.named_parameters()
                if parameter.requires_grad
            }


def whole(tensor: Tensor) -> Tensor:
    """All of a tensor whose parts FSDP 2 keeps on several ranks; a copy of any other."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()
