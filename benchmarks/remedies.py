"""CPU time of one update under every remedy of the catalogue, beside naive's, and score centering at V = 49,152.

    OMP_NUM_THREADS=1 python benchmarks/remedies.py --out docs/results/remedies_cost.csv
    OMP_NUM_THREADS=1 python benchmarks/remedies.py --memory --out docs/results/centering_memory.csv

The first: a random policy of config.yaml's sizes answers 8 prompts 8 times with 28 tokens. All arms get these tokens,
float32, one thread; each round makes one update of each in turn, another first, metrics included. What an engine does
more to return whole rows of logits is not in it. The second: forward and backward of the log-probs and the expected
scores of 2,048 tokens, from hidden states of 576. Whole logits and chunks each have a process of their own. Memory is
that beyond the inputs, among which are the sampler's logits.
"""

import argparse
import copy
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from rloo import make_optimizer
from shaped import shaped_policy
from table import ratios, show

from tailrl.config.arm import Correction
from tailrl.config.load import parse_study, read_study
from tailrl.config.vocabulary import Vocabulary
from tailrl.kernels.whole_rows import whole_row_scores
from tailrl.model.forward import PACKED_ATTENTION
from tailrl.model.policy import named_weights
from tailrl.model.quantized import round_activations
from tailrl.objective.centering import expected_score
from tailrl.objective.safe_set import token_logprobs
from tailrl.planning.shapes import shape_of
from tailrl.rollout.types import Rollout
from tailrl.training.reference import with_reference
from tailrl.training.samples import Sample
from tailrl.training.step import update
from tailrl.training.stopwatch import Stopwatch

ROOT = Path(__file__).parents[1]
CATALOGUE = Path(__file__).with_suffix(".yaml")
PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 8, 8, 16, 28
WIDE, HIDDEN, TOKENS = 49_152, 576, 2_048


def measure(repeats: int) -> dict[str, list[float]]:
    """CPU seconds of each remedy's update in each round; the first round, which warms up, is left out."""
    entries = yaml.safe_load(CATALOGUE.read_text(encoding="utf-8"))
    arms = {f"arm_{n}": entry["arm"] for n, entry in enumerate(entries)}
    sizes = {"prompts": PROMPTS, "group_size": GROUP, "max_new_tokens": NEW_TOKENS}
    study = parse_study({"name": "remedies", "arms": arms, "training": sizes})
    shape = shape_of(read_study(ROOT / "config.yaml").policy)
    model = shaped_policy(shape, 64, end=1)
    model.config._attn_implementation = PACKED_ATTENTION
    rollouts, rewards_PG = _rollouts(shape.vocabulary)
    steps = {}
    for (arm, _), entry in zip(arms.items(), entries, strict=True):
        own, run = copy.deepcopy(model), study.run(arm)
        if run.sampler.few_bit_trainer and run.sampler.formats:
            round_activations(own, run.sampler.formats)
        steps[entry["name"]] = _step(own, run, rollouts, rewards_PG)
    names = list(steps)
    rounds = []
    for turn in range(repeats + 1):  # another remedy is first in each round
        first = turn * len(names) // (repeats + 1)
        rounds.append({name: steps[name]() for name in names[first:] + names[:first]})
    return {name: [one[name] for one in rounds[1:]] for name in names}


def _rollouts(vocabulary: int) -> tuple[list[Rollout], Any]:
    """Random responses with a nearly uniform sampler's log-probs and whole rows; one right answer of four."""
    rng = np.random.default_rng(0)
    rollouts = []
    for _ in range(PROMPTS):
        prompt = tuple(rng.integers(2, vocabulary, PROMPT_TOKENS).tolist())
        for _ in range(GROUP):
            tokens = rng.integers(2, vocabulary, NEW_TOKENS)
            rows_KV = 0.1 * rng.standard_normal((NEW_TOKENS, vocabulary), dtype=np.float32)
            logp_T = rows_KV[np.arange(NEW_TOKENS), tokens] - np.log(np.exp(rows_KV).sum(-1))
            zeros_T, kept_T = np.zeros(NEW_TOKENS, np.float32), np.full(NEW_TOKENS, vocabulary, np.int32)
            given = (prompt, tuple(tokens.tolist()), logp_T, zeros_T, kept_T)
            rollouts.append(Rollout(*given, stopped=True, logits_sampler_KV=tuple(rows_KV)))
    return rollouts, np.tile(np.array([1, 0, 0, 0], np.float32), (PROMPTS, GROUP // 4))


def _step(model: Any, run: Any, rollouts: list[Rollout], rewards_PG: Any) -> Any:
    """A function that makes one update and returns its CPU seconds."""
    optimizer, threshold = make_optimizer(model), run.vocabulary.threshold(model.config.vocab_size)
    reference = [(name, weight.clone()) for name, weight in named_weights(model)]
    advantages = (rewards_PG - rewards_PG.mean()).ravel().tolist()
    pairs = zip(rollouts, advantages, strict=True)
    samples = [Sample(rollout, advantage, threshold, n) for n, (rollout, advantage) in enumerate(pairs)]

    def step() -> float:
        begun = time.process_time()
        given = with_reference(model, samples, rewards_PG, run, reference, Stopwatch())
        _, _, record = update(model, optimizer, given, run, 0, Stopwatch())
        record.metrics(run.correction)
        return time.process_time() - begun

    return step


def wide(chunked: bool) -> dict[str, object]:
    """CPU seconds, and bytes beyond the inputs, of score centering's forward and backward at V = 49,152."""
    torch.manual_seed(0)
    hidden_TH = torch.randn(TOKENS, HIDDEN, requires_grad=True)
    weight_VH = (0.05 * torch.randn(WIDE, HIDDEN)).requires_grad_()
    logits_infer_TV, tokens_T = torch.randn(TOKENS, WIDE), torch.randint(WIDE, (TOKENS,))
    correction, vocabulary, threshold_T1 = Correction(centering="full"), Vocabulary(), torch.zeros(TOKENS, 1)
    before, begun = _peak(), time.process_time()
    if chunked:
        rows = (hidden_TH, weight_VH, tokens_T, logits_infer_TV, threshold_T1, 1.0, vocabulary, correction)
        scored, expected_T = whole_row_scores(*rows)
    else:
        logits_TV = hidden_TH @ weight_VH.T
        scored = token_logprobs(logits_TV, tokens_T, "full")
        expected_T = expected_score(logits_TV.log_softmax(-1), logits_infer_TV.log_softmax(-1), correction)
    assert expected_T is not None
    (scored.logp_T - expected_T).sum().backward()  # type: ignore[no-untyped-call]
    megabytes = (_peak() - before) / 1e6
    name = "in chunks" if chunked else "whole logits"
    seconds = time.process_time() - begun
    logits = 4 * TOKENS * WIDE / 1e6
    return {"case": name, "cpu_seconds": f"{seconds:.1f}", "megabytes": f"{megabytes:.0f}", "logits": f"{logits:.0f}"}


def _peak() -> int:
    """The most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--memory", action="store_true", help="score centering at V = 49,152 instead")
    parser.add_argument("--case", choices=["whole", "chunks"], help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="write a CSV file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.case:
        print(yaml.safe_dump(wide(arguments.case == "chunks")))
        return
    if arguments.memory:
        calls = [[sys.executable, __file__, "--memory", "--case", case] for case in ("whole", "chunks")]
        rows = [yaml.safe_load(subprocess.run(call, check=True, capture_output=True).stdout) for call in calls]
    else:
        seconds = measure(arguments.repeats)
        rows = [
            {
                "remedy": name,
                "cpu_ms": round(1e3 * statistics.median(values), 1),
                **ratios("ratio_to_naive", values, seconds["naive"]),
            }
            for name, values in seconds.items()
        ]
    show(rows, arguments.out)


if __name__ == "__main__":
    main()
