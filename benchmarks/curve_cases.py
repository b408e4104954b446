"""Small real runs whose mismatch has a known cause: their curves are what `tailrl diagnose` is tested on.

    python benchmarks/curve_cases.py --out tests/fixtures/curves

Each run trains a Llama of 60,000 parameters with RLOO, float32 in the trainer and bfloat16 in the sampler. One thing is
wrong with the sampler. A run writes its metrics as JSON lines under verl's names. All seven take a minute on one core.
"""

import argparse
import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import tailrl

VOCABULARY = 64  # tokens; a prompt is one of them
LENGTH = 6  # tokens of a response
PROMPTS = 16  # prompts of a step
GROUP = 8  # responses to each
STEPS = 150
RATE = 3e-4  # AdamW's learning rate
LAG = 12  # updates by which old samples are old
PERIOD = 15  # updates between two transfers
CHANGE = 90  # the step at which the engine is started again with other weights
HALF = (60, 110)  # the steps of a transfer that came half


@dataclass
class Run:
    """The trainer's model, the weights after each update so far, and the sampler's model."""

    model: LlamaForCausalLM
    history: list[dict[str, Tensor]]
    engine: LlamaForCausalLM


Transfer = Callable[[Run, int], None]


def load(run: Run, weights: dict[str, Tensor]) -> None:
    """Puts weights into the sampler, rounded to bfloat16."""
    run.engine.load_state_dict(weights)


def every_step(run: Run, step: int) -> None:
    """The present weights: nothing is wrong."""
    load(run, run.history[step])


def old_samples(run: Run, step: int) -> None:
    """Weights that are LAG updates old."""
    load(run, run.history[max(0, step - LAG)])


def never(run: Run, _: int) -> None:
    """The first weights, for ever."""
    load(run, run.history[0])


def now_and_then(run: Run, step: int) -> None:
    """Weights that arrive every PERIOD updates."""
    load(run, run.history[step - step % PERIOD])


def other_format(run: Run, step: int) -> None:
    """From CHANGE on the engine has 4-bit weights, one scale a row."""
    weights = run.history[step]
    if step >= CHANGE:
        weights = {name: rounded(weight, 7) if weight.dim() > 1 else weight for name, weight in weights.items()}
    load(run, weights)


def half_a_transfer(run: Run, step: int) -> None:
    """At the steps of HALF every second tensor is as it was at the start."""
    weights = dict(run.history[step])
    if step in HALF:
        weights |= {name: run.history[0][name] for name in list(weights)[::2]}
    load(run, weights)


def quantised_again(run: Run, step: int) -> None:
    """The engine rounds its own weights to 8 bits again and again, up or down by chance: errors add up."""
    if not step:
        load(run, run.history[0])
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for weight in run.engine.parameters():
            if weight.dim() > 1:
                noise = torch.rand(weight.shape, generator=generator) - 0.5
                weight.copy_(rounded(weight.float(), 127, noise))


def rounded(weight: Tensor, levels: int, noise: Tensor | float = 0.0) -> Tensor:
    """A matrix on a symmetric grid of so many levels a side, one scale a row."""
    scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-8) / levels
    return (weight / scale + noise).round().clamp(-levels, levels) * scale


CASES: dict[str, tuple[Transfer, float]] = {
    "flat": (every_step, RATE),
    "old_samples": (old_samples, RATE),
    "no_transfer": (never, RATE),
    "rare_transfer": (now_and_then, RATE),
    "restart": (other_format, RATE),
    "half_transfer": (half_a_transfer, RATE),
    "rate_zero": (quantised_again, 0.0),
}


@torch.no_grad()
def sample(engine: LlamaForCausalLM, prompts: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Responses [N, LENGTH + 1], each behind its prompt, and the log-probs of their tokens [N, LENGTH]."""
    rows, logps = prompts[:, None], []
    for _ in range(LENGTH):
        logp = engine(rows).logits[:, -1].float().log_softmax(-1)
        token = torch.multinomial(logp.exp(), 1, generator=generator)
        logps.append(logp.gather(1, token))
        rows = torch.cat([rows, token], dim=1)
    return rows, torch.cat(logps, dim=1)


def train(transfer: Transfer, rate: float, seed: int = 0) -> list[dict[str, float]]:
    """The metrics of one run, a row a step. A response earns the share of its tokens above half of the vocabulary."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=0.2, **shape))
    run = Run(model, [], copy.deepcopy(model).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(seed)
    rows_of_metrics = []
    mask = torch.ones(PROMPTS * GROUP, LENGTH, dtype=torch.bool)
    for step in range(STEPS):
        run.history.append({name: weight.detach().clone() for name, weight in model.state_dict().items()})
        transfer(run, step)
        prompts = torch.randint(VOCABULARY, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
        rows, logp_infer = sample(run.engine, prompts, generator)
        tokens = rows[:, 1:]
        rewards = (tokens % 8 == prompts[:, None] % 8).float().mean(1)
        advantage = tailrl.ESTIMATORS["rloo"](rewards.view(PROMPTS, GROUP)).flatten()
        loss, metrics = tailrl.batch_loss(
            model(rows[:, :-1]).logits, tokens, mask, logp_infer, advantage, tailrl.Vocabulary()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rows_of_metrics.append(
            {
                "step": step,
                "rollout_corr/k3_kl": float(f"{metrics['k3_kl']:.4g}"),
                "actor/lr": rate,
                "critic/score/mean": float(f"{rewards.mean().item():.4g}"),
            }
        )
    return rows_of_metrics


def main() -> None:
    """Trains all cases and writes their metrics."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="a folder for CASE.jsonl")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    for name, (transfer, rate) in CASES.items():
        rows = train(transfer, rate)
        (out / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        print(name, rows[0]["rollout_corr/k3_kl"], rows[-1]["rollout_corr/k3_kl"], rows[-1]["critic/score/mean"])


if __name__ == "__main__":
    main()
