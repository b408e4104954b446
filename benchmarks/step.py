"""CPU time of a whole RLOO step (rollout, reward, update) beside TRL's RLOOTrainer on the same model.

    OMP_NUM_THREADS=1 python benchmarks/step.py --out docs/results/step.csv

A Llama of 4 M parameters (V = 2,048) answers 8 prompts of 16 tokens 4 times each. Its end tokens have next to no
probability, so that all responses have 64 tokens. Everybody samples their own, at temperature 1 from all tokens, and
gets the same made-up reward, which depends on the text of a response. One thread; each round times a step of everybody.

What each side does: TRL samples with transformers' `generate` in float32, decodes, calls the reward function, scores
the tokens without gradient for the old log-probs, then again with gradient, clips and steps. Ours samples with each
engine as a study has it, decodes, calls the same function, scores the tokens once, computes the mismatch's metrics,
clips, steps, and hands the weights over to the engine. AdamW is the same on both sides.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

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
    silence_ends,
    train_with_trl,
)
from table import show
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase, TrainerCallback

from tailrl.config.load import parse_study
from tailrl.config.sampler import SamplerSettings
from tailrl.model.forward import PACKED_ATTENTION, make_exact
from tailrl.model.policy import encode_prompt, named_weights
from tailrl.model.tokenizer import prose, train_tokenizer
from tailrl.objective.advantages import ESTIMATORS
from tailrl.rollout import Decoding, make_sampler
from tailrl.training.rollouts import step_requests
from tailrl.training.samples import Sample
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

ENGINES = {
    "ours, vLLM bfloat16": {"engine": "vllm"},
    "ours, vLLM bfloat16, compiled": {"engine": "vllm", "enforce_eager": False},
    "ours, exact float32": {"engine": "exact", "dtype": "float32"},
    "ours, transformers float32": {"engine": "transformers", "dtype": "float32"},
}

Seconds = tuple[float, float]
"""CPU seconds of a step, and of its rollout alone."""


def silent_model() -> LlamaForCausalLM:
    model = make_model()
    silence_ends(model)
    return model


def make_prompts(tokenizer: PreTrainedTokenizerBase, count: int) -> list[str]:
    """Texts of 16 tokens each, no two alike."""
    tokens = tokenizer.encode(prose())
    runs = (tokens[i : i + PROMPT_TOKENS] for i in range(0, len(tokens), PROMPT_TOKENS))
    texts = dict.fromkeys(tokenizer.decode(run) for run in runs if tokenizer.encode(tokenizer.decode(run)) == run)
    return [text for text in texts if len(tokenizer.encode(text)) == PROMPT_TOKENS][:count]


def reward(completions: Sequence[str], **_: Any) -> list[float]:
    """1 for about half of all texts."""
    return [float(crc32(text.encode()) % 2) for text in completions]


def our_step(
    settings: SamplerSettings, folder: Path, prompts: Sequence[str], tokenizer: PreTrainedTokenizerBase
) -> Callable[[], Seconds]:
    """A function that makes one step of ours."""
    model = silent_model()
    if settings.exact:
        make_exact(model)
    else:
        model.set_attn_implementation(PACKED_ATTENTION)
    optimizer = make_optimizer(model)
    sampler = make_sampler(settings, folder, PROMPT_TOKENS + NEW_TOKENS, 0, model)
    sampler.load_weights(named_weights(model))
    study = {"name": "step", "arms": {"naive": {"sampler": settings.model_dump()}}, "training": {"max_grad_norm": 1.0}}
    run = parse_study(study).run("naive")
    encoded = [tuple(encode_prompt(tokenizer, prompt)) for prompt in prompts]
    turn = 0

    def step() -> Seconds:
        nonlocal turn
        begun = time.process_time()
        chosen = encoded[turn * PROMPTS : (turn + 1) * PROMPTS]
        requests = step_requests(chosen, [0.0] * PROMPTS, GROUP, 0, turn)
        rollouts = sampler.generate(requests, Decoding(1.0, NEW_TOKENS))
        sampled = time.process_time()
        texts = tokenizer.batch_decode([rollout.tokens for rollout in rollouts], skip_special_tokens=True)
        advantages_PG = ESTIMATORS["rloo"](torch.tensor(reward(texts)).view(PROMPTS, GROUP))
        samples = [
            Sample(rollout, advantage, request.threshold, request.seed)
            for rollout, advantage, request in zip(rollouts, advantages_PG.flatten().tolist(), requests, strict=True)
        ]
        _, _, record = update(model, optimizer, samples, run, turn, Stopwatch())
        sampler.load_weights(named_weights(model))
        record.metrics()
        ended = time.process_time()
        assert {len(rollout.tokens) for rollout in rollouts} == {NEW_TOKENS}
        turn += 1
        return ended - begun, sampled - begun

    return step


def measure(repeats: int) -> dict[str, list[Seconds]]:
    """Each case in each round."""
    from trl import RLOOTrainer

    tokenizer = train_tokenizer(VOCABULARY, [prose()])
    prompts = make_prompts(tokenizer, PROMPTS * (repeats + 1))
    seconds: dict[str, list[Seconds]] = {"TRL": [], **{name: [] for name in ENGINES}}
    clock = {"begun": 0.0, "rollout": 0.0}

    class Trainer(RLOOTrainer):
        """TRL's trainer with its rollouts timed."""

        def _generate(self, prompts: list[str]) -> Any:
            begun = time.process_time()
            made = super()._generate(prompts)
            clock["rollout"] = time.process_time() - begun
            assert {len(tokens) for tokens in made[1]} == {NEW_TOKENS}
            return made

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        silent_model().save_pretrained(folder / "policy")
        steps = {
            engine: our_step(SamplerSettings.model_validate(settings), folder / "policy", prompts, tokenizer)
            for engine, settings in ENGINES.items()
        }

        class Rounds(TrainerCallback):
            def on_step_begin(self, *_: Any, **__: Any) -> None:
                clock["begun"] = time.process_time()

            def on_step_end(self, *_: Any, **__: Any) -> None:
                seconds["TRL"].append((time.process_time() - clock["begun"], clock["rollout"]))
                for engine, step in steps.items():
                    seconds[engine].append(step())

        train_with_trl(Trainer, silent_model(), tokenizer, prompts, reward, Rounds(), str(folder / "trl"))
    return {case: values[1:] for case, values in seconds.items()}  # the first round warms up


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seconds = measure(arguments.repeats)
    wholes = {case: [whole for whole, _ in values] for case, values in seconds.items()}
    rows = compared(wholes, {"ratio_to_trl": "TRL"})
    for row, values in zip(rows, seconds.values(), strict=True):
        row["rollout_cpu_seconds"] = round(statistics.median(rollout for _, rollout in values), 3)
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
