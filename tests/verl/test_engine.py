"""verl's FSDP engine under DVP beside our objective in float64: log-probs, gradients, sets; padded and packed."""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cpu_platform import add_engine
from policy_fixture import VOCABULARY, write_policy
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.utils.torch_functional import logprobs_from_logits
from verl.workers.config import FSDPEngineConfig, HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig

from tailrl.integrations.verl.scores import FILL, score_logits
from tailrl.integrations.verl.workers import KEPT, SIZE, TOP, constrain_engine, constrain_module
from tailrl.objective.safe_set import token_logprobs

LOG_RHO = -3.0
TEMPERATURE = 0.8
LENGTHS = ((3, 6), (5, 9), (2, 4), (4, 1))  # of prompts and responses


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def engine_of(policy: Path, **settings: Any) -> Any:
    from verl.workers.engine.base import EngineRegistry

    add_engine()
    packed = settings.pop("use_remove_padding", True)
    model_config = HFModelConfig(
        path=str(policy), load_tokenizer=False, use_remove_padding=packed, enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "eager"},
    )  # fmt: skip
    precision = {name: settings.get("precision", "fp32") for name in ("param_dtype", "reduce_dtype", "buffer_dtype")}
    settings.pop("precision", None)
    engine_config = FSDPEngineConfig(
        strategy="fsdp2", model_dtype="fp32", use_torch_compile=False, mixed_precision=precision,
        use_remove_padding=packed, **settings,
    )  # fmt: skip
    engine = EngineRegistry.new(
        model_type="language_model", backend="fsdp2", model_config=model_config, engine_config=engine_config,
        optimizer_config=FSDPOptimizerConfig(lr=0.0, total_training_steps=10), checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    return engine


def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (sum(lengths),), generator=generator) for lengths in LENGTHS]


def batch(packed: bool, **more: Any) -> Any:
    ids = sequences()
    jagged: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "loss_mask": [torch.ones(response, dtype=torch.int64) for _, response in LENGTHS],
        "prompts": [row[:prompt] for row, (prompt, _) in zip(ids, LENGTHS, strict=True)],
        "responses": [row[prompt:] for row, (prompt, _) in zip(ids, LENGTHS, strict=True)],
        "response_mask": [torch.ones(response, dtype=torch.int64) for _, response in LENGTHS],
    }
    tensors = {name: torch.nested.as_nested_tensor(rows, layout=torch.jagged) for name, rows in jagged.items()}
    return tu.get_tensordict(
        tensors,
        non_tensor_dict={
            "temperature": TEMPERATURE, "use_remove_padding": packed, "use_dynamic_bsz": False,
            "micro_batch_size_per_gpu": 2, "use_fused_kernels": False, "calculate_entropy": True, **more,
        },
    )  # fmt: skip


def oracle(policy: Path, score: Callable[[Tensor, Tensor], Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Scores [T] of each sequence's tokens in float64, one sequence at a time; gradients of the responses' sum."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="eager")
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
    """The weighted sum of the responses' log-probs."""
    total = torch.zeros(())
    rows = zip(model_output["log_probs"].unbind(), data["prompts"].offsets().diff().tolist(), strict=True)
    for logp_L, prompt in rows:
        of_response = logp_L[prompt - 1 : -1]
        total = total + (of_response * weights(len(of_response))).sum()
    return total, {}


LAYOUTS = [
    {"use_remove_padding": False},
    {"use_remove_padding": True},
    {"use_remove_padding": True, "pad_to_length": True, "pad_to_length_bucket": 32},
    {"use_remove_padding": True, "entropy_from_logits_with_chunking": True},
]


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("layout", LAYOUTS, ids=["padded", "packed", "pad_to_length", "entropy_in_chunks"])
def test_the_engine_scores_and_learns_as_our_objective(policy: Path, layout: dict[str, Any]) -> None:
    engine = engine_of(policy, **layout)
    worker = SimpleNamespace(worker_dict={"actor": SimpleNamespace(actor=SimpleNamespace(engine=engine), ref=None)})
    line = constrain_engine(worker, LOG_RHO)
    assert "ln ρ = -3 in FSDPEngineWithLMHead" in line and "verl 0.9" in line
    packed = layout["use_remove_padding"]
    with engine.eval_mode():
        output = engine.infer_batch(batch(packed), loss_function=None)["model_output"]
    expected, gradients = oracle(policy, ours)
    outside = 0
    for logp_L, kept_L, size_L, top_L, expected_T, ids_L in zip(
        *(output[name].unbind() for name in ("log_probs", KEPT, SIZE, TOP)), expected, sequences(), strict=True
    ):
        torch.testing.assert_close(logp_L[:-1].double(), expected_T, atol=1e-5, rtol=0)
        outside += int((logp_L[:-1] == FILL).sum())
        assert len(ids_L) == len(kept_L) == len(size_L) == len(top_L)
        assert (logp_L[:-1] <= top_L[:-1] + 1e-5).all() and (kept_L <= 1e-6).all() and (size_L >= 1).all()
    assert 10 < outside < sum(map(len, expected)), "the batch has tokens on both sides"

    with engine.train_mode():
        engine.optimizer_zero_grad()
        engine.forward_backward_batch(batch(packed), loss_function=loss_of)
        for name, parameter in engine.module.named_parameters():
            gradient = parameter.grad.full_tensor().double()
            torch.testing.assert_close(gradient, gradients[name], atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("group")
def test_verls_own_log_probs_are_another_number(policy: Path) -> None:
    """The oracle would see it if the hook did nothing."""
    plain, _ = oracle(policy, lambda logits, tokens: logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0])
    constrained, _ = oracle(policy, ours)
    inside = [row > FILL for row in constrained]
    differences = [
        (a - b)[keep].abs().max() for a, b, keep in zip(plain, constrained, inside, strict=True) if keep.any()
    ]
    assert max(differences) > 1e-3


@pytest.mark.usefixtures("group")
def test_fused_kernels_go_past_the_hook_and_end_the_run(policy: Path) -> None:
    from verl.workers.engine.fsdp import transformer_impl

    from tailrl.runtime.errors import StudyError

    engine = engine_of(policy, use_remove_padding=True)
    constrain_module(transformer_impl, LOG_RHO)

    class Fused:
        log_probs = torch.zeros(1, sum(map(sum, LENGTHS)))
        entropy = torch.zeros(1, sum(map(sum, LENGTHS)))

    micro_batch = batch(True, use_fused_kernels=True)
    arguments = {"input_ids_rmpad_rolled": None, "temperature_rmpad": None, "pad_size": 0}
    with pytest.raises(StudyError, match="DVP would do nothing"):
        engine.prepare_model_outputs(Fused(), arguments, micro_batch, None)


def test_the_function_equals_ours_to_1e_6_and_verls_at_rho_0() -> None:
    generator = torch.Generator().manual_seed(2)
    logits_TV = torch.randn(300, 1000, generator=generator) * 4
    tokens_T = torch.randint(1000, (300,), generator=generator)
    for log_rho in (-13.0, -3.0, -0.5):
        exact = token_logprobs(logits_TV.double(), tokens_T, "min_p", log_rho)
        found = score_logits(logits_TV, tokens_T, log_rho)
        expected_T = torch.where(exact.outside_T, FILL, exact.logp_T)
        torch.testing.assert_close(found.logp_T.double(), expected_T, atol=1e-5 if log_rho < -5 else 2e-6, rtol=0)
        assert torch.equal(found.set_size_T.long(), exact.kept_vocab_T)
    everything = score_logits(logits_TV, tokens_T, -1e9)
    torch.testing.assert_close(everything.logp_T, logprobs_from_logits(logits_TV, tokens_T), atol=1e-5, rtol=0)
