"""A plain PyTorch loop with DVP and MIS, on a small recurrent policy that learns to repeat its prompt: seconds.

    python examples/loops/plain.py

The sampler disagrees with the trainer: it lifts every token to at least FLOOR / V. The loss is made from hidden states
and the head's weight, so that no logits of a whole batch are held.
"""

import math

import torch
from torch import Tensor, nn

from tailrl.losses import ESTIMATORS, Correction, LossInputs, constrained_logprobs, loss, safe_set

V, LENGTH, PROMPTS, GROUP = 16, 5, 7, 16
FLOOR = 0.05
LOG_RHO = math.log(0.05)
MIS = Correction(sequence="mis", sequence_threshold=2.0, veto=1e-4)


class Policy(nn.Module):
    """A GRU; `hidden` gives hidden states [N, L, H] of tokens [N, L]."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(V, width)
        self.mix = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, V, bias=False)

    def hidden(self, tokens_NL: Tensor) -> Tensor:
        return self.mix(self.embed(tokens_NL))[0]


@torch.no_grad()
def sample(policy: Policy, prompt_N: Tensor) -> tuple[Tensor, Tensor]:
    """Prompts with responses [N, 1 + L], and the log-probs [N, L] of the pruned distribution that was drawn from."""
    rows, logps = prompt_N[:, None], []
    for _ in range(LENGTH):
        probs = (1 - FLOOR) * policy.head(policy.hidden(rows)[:, -1]).softmax(-1) + FLOOR / V
        safe = safe_set(probs.log(), "min_p", LOG_RHO)
        logp = probs.log().masked_fill(~safe, -torch.inf).log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1)
        rows = torch.cat([rows, token], 1)
        logps.append(logp.gather(1, token))
    return rows, torch.cat(logps, 1)


def train(steps: int = 40) -> list[dict[str, float]]:
    """Trains a new policy; returns each step's metrics and reward."""
    torch.manual_seed(0)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.02)
    history = []
    for _ in range(steps):
        prompt_N = torch.arange(1, PROMPTS + 1).repeat_interleave(GROUP)
        rows, logp_sampler_NL = sample(policy, prompt_N)
        reward_N = (rows[:, 1:] == prompt_N[:, None]).any(1).float()
        advantage_N = ESTIMATORS["rloo"](reward_N.view(PROMPTS, GROUP)).flatten()
        # Packed: T = N × L tokens, each with the number of its response.
        sequence_T = torch.arange(len(rows)).repeat_interleave(LENGTH)
        hidden_TH = policy.hidden(rows[:, :-1]).flatten(0, 1)
        scored = constrained_logprobs(hidden_TH, policy.head.weight, rows[:, 1:].flatten(), "min_p", LOG_RHO)
        inputs = LossInputs(
            trainer=scored,
            logp_sampler_T=logp_sampler_NL.flatten(),
            advantage_T=advantage_N[sequence_T],
            sequence_T=sequence_T,
            sequences=len(rows),
            denominator=len(rows),
        )
        outputs = loss(inputs, correction=MIS)
        optimizer.zero_grad()
        outputs.loss.backward()
        optimizer.step()
        history.append(outputs.metrics | {"reward": reward_N.mean().item()})
    return history


if __name__ == "__main__":
    for number, metrics in enumerate(train()):
        if number % 10 == 0:
            print(number, {name: round(value, 4) for name, value in metrics.items()})
