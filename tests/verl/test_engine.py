"""verl's FSDP engine under DVP beside our objective in float64: log-probs, gradients, sets; padded and packed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fixture import (
    LENGTHS,
    LOG_RHO,
    batch,
    constrained,
    engine_of,
    gradients_of,
    oracle,
    ours,
    scored,
    sequences,
)
from peft import LoraConfig, get_peft_model
from policy_fixture import write_policy
from verl.utils.torch_functional import logprobs_from_logits

from tailrl.integrations.verl.scores import FILL, score_logits
from tailrl.integrations.verl.workers import KEPT, SIZE, TOP, constrain_module
from tailrl.objective.safe_set import token_logprobs


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = tmp_path_factory.mktemp("gloo") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


LAYOUTS = {
    "padded": {"use_remove_padding": False},
    "packed": {"use_remove_padding": True},
    "pad_to_length": {"use_remove_padding": True, "pad_to_length": True, "pad_to_length_bucket": 32},
    "entropy_in_chunks": {"use_remove_padding": True, "entropy_from_logits_with_chunking": True},
}
DYNAMIC = {"use_dynamic_bsz": True, "max_token_len_per_gpu": 16}  # micro-batches of at most 16 tokens


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dealt", [{}, DYNAMIC], ids=["two sequences at once", "dynamic batch"])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_engine_scores_and_learns_as_our_objective(
    policy: Path, layout: dict[str, Any], dealt: dict[str, Any]
) -> None:
    engine = engine_of(policy, **layout)
    line = constrained(engine)
    assert "ln ρ = -3 in FSDPEngineWithLMHead" in line and "verl 0.9" in line
    packed = layout["use_remove_padding"]
    output = scored(engine, batch(packed, **dealt))
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
    learned = gradients_of(engine, batch(packed, **dealt))
    assert learned.keys() == gradients.keys()
    torch.testing.assert_close(learned, gradients, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
def test_lora_scores_and_learns_as_our_objective(policy: Path, packed: bool) -> None:
    """Adapters whose second factor is no longer 0, as after some steps."""
    settings = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    engine = engine_of(policy, settings, use_remove_padding=packed)
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for name, parameter in engine.module.named_parameters():
        if parameter.requires_grad:
            factors[name] = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.data.to_local().copy_(factors[name])
    constrained(engine)

    def adapted(model: Any) -> Any:
        adapters = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
        wrapped = get_peft_model(model, adapters).double()
        wrapped.load_state_dict(factors, strict=False)
        return wrapped

    expected, gradients = oracle(policy, ours, adapted)
    without, _ = oracle(policy, ours)
    assert any((a - b).abs().max() > 0.1 for a, b in zip(expected, without, strict=True)), "the adapters act"
    for logp_L, expected_T in zip(scored(engine, batch(packed))["log_probs"].unbind(), expected, strict=True):
        torch.testing.assert_close(logp_L[:-1].double(), expected_T, atol=1e-5, rtol=0)
    learned = gradients_of(engine, batch(packed))
    assert learned.keys() == gradients.keys() == factors.keys()
    torch.testing.assert_close(learned, gradients, atol=1e-5, rtol=1e-5)


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
    sampled_T = torch.multinomial(logits_TV.softmax(-1), 1, generator=generator).squeeze(1)
    tokens_T = torch.where(torch.arange(300) < 200, sampled_T, torch.randint(1000, (300,), generator=generator))
    for log_rho in (-13.0, -3.0, -0.5):
        exact = token_logprobs(logits_TV.double(), tokens_T, "min_p", log_rho)
        assert 40 < exact.outside_T.sum() < 250
        found = score_logits(logits_TV, tokens_T, log_rho)
        expected_T = torch.where(exact.outside_T, FILL, exact.logp_T)
        # Beside it the last bit of a float32, 1e-6 at -13.
        torch.testing.assert_close(found.logp_T.double(), expected_T, atol=1e-6, rtol=1e-7)
        assert torch.equal(found.set_size_T.long(), exact.kept_vocab_T)
    everything = score_logits(logits_TV, tokens_T, -1e9)
    torch.testing.assert_close(everything.logp_T, logprobs_from_logits(logits_TV, tokens_T), atol=1e-5, rtol=0)
