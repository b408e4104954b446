"""min-p in the sampler alone, as `--min_p` of ms-swift 4.6 does it: `diagnose` names it, and finds nothing with DVP."""

import math
from typing import Any

import torch
from pages_fixture import DOCS

from tailrl import diagnose
from tailrl.losses import token_logprobs

RESPONSES, TOKENS, V = 64, 40, 300
LOG_RHO = math.log(0.05)


def rows(own_set: bool) -> list[dict[str, Any]]:
    """Responses drawn with min-p from distributions of many shapes; the trainer's logits are rounded to bfloat16."""
    draw = torch.Generator().manual_seed(1)
    sharpness_T1 = 1 + 5 * torch.rand(TOKENS * RESPONSES, 1, generator=draw)
    logits_TV = sharpness_T1 * torch.randn(TOKENS * RESPONSES, V, generator=draw)
    safe_TV = logits_TV >= logits_TV.amax(1, keepdim=True) + LOG_RHO
    probs_TV = logits_TV.masked_fill(~safe_TV, -torch.inf).softmax(1)
    token_T = torch.multinomial(probs_TV, 1, generator=draw).squeeze(1)
    sampler_T = token_logprobs(logits_TV, token_T, "min_p", LOG_RHO).logp_T
    scored = token_logprobs(logits_TV.bfloat16().float(), token_T, "min_p", LOG_RHO)
    trainer_T = scored.logp_T if own_set else scored.logp_full_T
    inside_T = ~scored.outside_T if own_set else torch.ones_like(scored.outside_T)
    columns = {
        "token_ids": token_T,
        "sampler_logprobs": sampler_T,
        "trainer_logprobs": trainer_T,
        "mask": inside_T.int(),
    }
    parts = {name: values_T.view(RESPONSES, TOKENS).tolist() for name, values_T in columns.items()}
    return [{name: values[n] for name, values in parts.items()} | {"step": 0} for n in range(RESPONSES)]


def bias(logged: list[dict[str, Any]]) -> tuple[float, float]:
    """The mean of log π_train − log π_infer of a token and of a response, nats."""
    sums, tokens = [], 0
    for row in logged:
        sides = zip(row["sampler_logprobs"], row["trainer_logprobs"], row["mask"], strict=True)
        deltas = [trainer - sampler for sampler, trainer, inside in sides if inside]
        sums.append(sum(deltas))
        tokens += len(deltas)
    return sum(sums) / tokens, sum(sums) / len(sums)


def test_pruning_in_the_sampler_alone_is_named_and_the_page_has_its_size() -> None:
    logged = rows(own_set=False)
    [cause] = [cause for cause in diagnose(logged).causes if cause.sure > 0.5]
    assert cause.name == "truncation"
    token, response = bias(logged)
    assert f"{token:.2f} | {response:.1f} | `truncation`, {cause.sure:.0%} sure |" in page()


def test_the_trainers_own_set_leaves_rounding() -> None:
    logged = rows(own_set=True)
    assert not [cause for cause in diagnose(logged).causes if cause.sure > 0.5]
    token, response = bias(logged)
    assert f"{token:.4f} | {response:.2f} | no cause above 50 % |" in page()


def page() -> str:
    return (DOCS / "how-to/skyrl-ms-swift.md").read_text(encoding="utf-8").replace("−", "-")
