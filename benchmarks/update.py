"""CPU time of one RLOO update, everything after the rollouts, beside TRL's RLOOTrainer on identical tokens.

    OMP_NUM_THREADS=1 python benchmarks/update.py --out docs/results/update.csv

A Llama of 4 M parameters (V = 2,048) answers 8 prompts 4 times with 64 tokens each, once, before anything is timed. Its
logits are scaled so that ρ = e⁻¹³ keeps a small part of the vocabulary, as it does in a trained model. Both sides get
these tokens, float32, one thread, the same AdamW; each round times one update of each in turn, and the matmuls that no
update can do without: of every linear layer, over the tokens it must see, forward and by both inputs.

What each side does: TRL scores the tokens without gradient for the old log-probs, then again with gradient; it decodes
the completions and calls a reward function (here a constant list). Ours scores them once, computes the metrics of the
mismatch, and under DVP the safe set. Clipping of the gradient, AdamW and the metrics of a step are in both.
"""

import argparse
import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rloo import (
    GROUP,
    NEW_TOKENS,
    PROMPT_TOKENS,
    PROMPTS,
    VOCABULARY,
    compared,
    make_model,
    make_optimizer,
    train_with_trl,
)
from table import show
from torch import Tensor, nn
from transformers import LlamaForCausalLM, PreTrainedModel, TrainerCallback

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.kernels.packing import pack
from tailrl.model.forward import PACKED_ATTENTION, hidden_states
from tailrl.model.tokenizer import prose, train_tokenizer
from tailrl.rollout.types import Rollout
from tailrl.training.samples import Sample
from tailrl.training.scorer import make_scorer, score_all
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

ARMS = {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-13"}}}


def make_tokens(model: LlamaForCausalLM) -> tuple[Tensor, Tensor]:
    """Prompts [N, 16] and completions [N, 64] of the model's own, at temperature 1."""
    prompts_ND = torch.randint(2, VOCABULARY, (PROMPTS, PROMPT_TOKENS)).repeat_interleave(GROUP, 0)
    rows = model.generate(
        prompts_ND, do_sample=True, top_k=0, min_new_tokens=NEW_TOKENS, max_new_tokens=NEW_TOKENS, pad_token_id=1
    )
    return prompts_ND, rows[:, PROMPT_TOKENS:]


def our_update(model: PreTrainedModel, run: Run, prompts_ND: Tensor, completions_NT: Tensor) -> Any:
    """A function that makes one update of ours and returns its CPU seconds."""
    samples = []
    for index, (prompt, completion) in enumerate(zip(prompts_ND.tolist(), completions_NT.tolist(), strict=True)):
        zeros = torch.zeros(NEW_TOKENS)
        rollout = Rollout(
            tuple(prompt), tuple(completion), zeros.numpy(), zeros.numpy(), zeros.int().numpy(), stopped=False
        )
        # One right answer of four: RLOO's advantages.
        advantage = 1.0 if index % GROUP == 0 else -1 / 3
        samples.append(Sample(rollout, advantage, run.vocabulary.threshold(VOCABULARY), seed=index))
    for sample, old in zip(samples, score_all(model, samples, make_scorer(run)), strict=True):
        sample.rollout.logp_sampler_T[:] = old.in_set().clamp(min=-30).numpy()  # a mismatch of zero
    optimizer = make_optimizer(model)

    def step() -> float:
        begun = time.process_time()
        _, _, record = update(model, optimizer, samples, run, 0, Stopwatch())
        record.metrics()
        return time.process_time() - begun

    return step


def matmul_floor(model: PreTrainedModel) -> Any:
    """A function that does the update's matmuls and returns their CPU seconds."""
    rows = PROMPTS * GROUP * (PROMPT_TOKENS + NEW_TOKENS - 1)
    products = [
        (PROMPTS * GROUP * NEW_TOKENS if name == "lm_head" else rows, module.weight.detach())
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    operands = [(torch.randn(n, w.shape[1]), torch.randn(n, w.shape[0]), w) for n, w in products]

    def step() -> float:
        begun = time.process_time()
        for input_PI, gradient_PO, weight_OI in operands:
            input_PI @ weight_OI.T
            gradient_PO @ weight_OI
            gradient_PO.T @ input_PI
        return time.process_time() - begun

    return step


def measure(repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each case in each round."""
    from trl import RLOOTrainer

    model = make_model()
    prompts_ND, completions_NT = make_tokens(model)
    model.config._attn_implementation = PACKED_ATTENTION
    with torch.no_grad():
        check_density(model, prompts_ND, completions_NT)
    study = parse_study({"name": "update", "arms": ARMS, "training": {"max_grad_norm": 1.0}})
    steps = {
        f"ours, {arm}": our_update(copy.deepcopy(model), study.run(arm), prompts_ND, completions_NT) for arm in ARMS
    }
    steps["matmuls alone"] = matmul_floor(model)
    seconds: dict[str, list[float]] = {"TRL": [], **{name: [] for name in steps}}
    tokenizer = train_tokenizer(VOCABULARY, [prose()])
    begun: list[float] = []

    class Trainer(RLOOTrainer):
        """TRL's trainer with the rollouts given; the clock starts where they are handed over."""

        def _generate(self, prompts: list[str]) -> tuple[list[list[int]], list[list[int]], list[str]]:
            self._metrics["train"]["num_tokens"] = [0]
            begun.append(time.process_time())
            return prompts_ND.tolist(), completions_NT.tolist(), [""] * len(prompts)

    class Rounds(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seconds["TRL"].append(time.process_time() - begun[-1])
            for name, step in steps.items():
                seconds[name].append(step())

    rewards = [float(index % GROUP == 0) for index in range(PROMPTS * GROUP)]
    texts = [f"prompt {i}" for i in range(PROMPTS * (repeats + 1))]
    with tempfile.TemporaryDirectory() as folder:
        train_with_trl(Trainer, make_model(), tokenizer, texts, lambda **_: rewards, Rounds(), folder)
    return {name: values[1:] for name, values in seconds.items()}  # the first round warms up


def check_density(model: PreTrainedModel, prompts_ND: Tensor, completions_NT: Tensor) -> None:
    """Print the share of the vocabulary that ρ = e⁻¹³ keeps."""
    rows_NL = torch.cat([prompts_ND, completions_NT], 1)
    hidden_PH = hidden_states(model, rows_NL.flatten(), pack([rows_NL.shape[1]] * len(rows_NL)))
    logits_PV = hidden_PH @ model.get_output_embeddings().weight.T
    kept = (logits_PV >= logits_PV.amax(-1, keepdim=True) - 13).float().mean()
    print(f"ρ = e⁻¹³ keeps {kept:.1%} of the vocabulary")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(arguments.repeats)
    rows = compared(seconds, {"ratio_to_trl": "TRL", "ratio_to_matmuls": "matmuls alone"})
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
