"""vLLM's own `min_p` with `logprobs_mode=processed_logprobs` is log π'^mp as `tailrl.losses` defines it."""

import math
from pathlib import Path

import pytest
import torch

import tailrl.rollout.vllm  # noqa: F401 - the environment that vLLM reads
from tailrl.losses import safe_set, token_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

PROMPTS = [[5, 6, 7, 8], [9], [10, 11]]


def test_vllms_min_p_is_our_safe_set(policy_folder: Path) -> None:
    """float32 engine and model. A token on the edge of the set may lie on either side of it: none here does."""
    from transformers import AutoModelForCausalLM
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(
        model=str(policy_folder), dtype="float32", max_model_len=64, enforce_eager=True, skip_tokenizer_init=True,
        generation_config="vllm", logprobs_mode="processed_logprobs", seed=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    tokens, pruned = 0, 0
    for rho, temperature in ((0.22, 0.8), (0.5, 1.0), (math.exp(-13), 1.3)):
        params = SamplingParams(
            n=8,
            max_tokens=20,
            min_p=rho,
            temperature=temperature,
            logprobs=0,
            seed=3,
            detokenize=False,
            ignore_eos=True,
        )
        outputs = engine.generate([TokensPrompt(prompt_token_ids=ids) for ids in PROMPTS], params, use_tqdm=False)
        for prompt, output in ((ids, one) for ids, many in zip(PROMPTS, outputs, strict=True) for one in many.outputs):
            sampled_T = torch.tensor(output.token_ids)
            row = torch.tensor([[*prompt, *output.token_ids]])
            with torch.no_grad():
                logits_TV = model(row).logits[0, len(prompt) - 1 : -1] / temperature
            ours = token_logprobs(logits_TV, sampled_T, "min_p", math.log(rho))
            theirs_T = torch.tensor([next(iter(top.values())).logprob for top in output.logprobs])
            assert not ours.outside_T.any()
            torch.testing.assert_close(theirs_T, ours.logp_T, atol=2e-5, rtol=0)
            tokens += len(sampled_T)
            pruned += int((safe_set(logits_TV, "min_p", math.log(rho)).sum(1) < 600).sum())
    engine.llm_engine.engine_core.shutdown()
    assert tokens == 3 * len(PROMPTS) * 8 * 20 and pruned > tokens / 2
