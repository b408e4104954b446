"""The check of `gpu_check.py` on memory: an update's, beside the plan's count.

tailrl is imported within the check, so that a missing package costs its own row alone.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from gpu_rows import LOG_RHO, Found, MissingError, Sizes
from gpu_runs import make_policy, run_of

PROMPT = 64  # tokens, where no engine samples


def memory(device: str, sizes: Sizes) -> Found:
    """What the allocator held at its highest in an update, beside the plan's count."""
    if device != "cuda":
        raise MissingError("a CPU's memory is not counted apart: benchmarks/plan.py measures it in processes")
    from tailrl.planning.machine import Machine
    from tailrl.planning.memory import peak, trainer_parts
    from tailrl.planning.shapes import Shape
    from tailrl.planning.work import work_of

    larger = replace(sizes, hidden=2 * sizes.hidden, layers=2 * sizes.layers)  # its weights outweigh fixed limits
    run = run_of(larger, "bfloat16")
    updates(larger, run)
    held = torch.cuda.max_memory_reserved()
    heads = larger.hidden // 64
    widths = (larger.hidden, larger.layers, heads, heads // 2, 64, 3 * larger.hidden, larger.policy_vocabulary)
    work = work_of(run.training, PROMPT, None, 1)
    planned = peak(trainer_parts(Shape(*widths, tied=False), run, work, Machine(reserve=0), 1))
    what = "memory of an update in bfloat16 with the plan's: the larger over the smaller"
    note = f"{held / 1e9:.3g} GB, planned {planned / 1e9:.3g} GB"
    return Found(what, max(held / planned, planned / held), 1.15, note=note)


def updates(sizes: Sizes, run: Any) -> None:
    """Two updates of a policy as a job places it; only the second has the optimizer's state from its start."""
    from tailrl.runtime import distributed
    from tailrl.training.optimizer import make_optimizer
    from tailrl.training.placement import place
    from tailrl.training.step import update
    from tailrl.training.stopwatch import Stopwatch

    distributed.join()
    model = make_policy(sizes)
    place(model, run.training)
    optimizer = make_optimizer(model, run.training)
    for turn in range(2):
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        update(model, optimizer, made_samples(sizes, run), run, turn, Stopwatch())


def made_samples(sizes: Sizes, run: Any) -> list[Any]:
    """The rollouts of a step as the trainer gets them, all of full length, that no engine made."""
    from tailrl.rollout.types import Rollout
    from tailrl.training.samples import Sample

    rng, training = np.random.default_rng(0), run.training
    samples: list[Any] = []
    for _ in range(training.prompts):
        prompt = tuple(rng.integers(2, sizes.policy_vocabulary, PROMPT).tolist())
        for member in range(training.group_size):
            tokens = tuple(rng.integers(2, sizes.policy_vocabulary, sizes.response).tolist())
            zeros = np.zeros(sizes.response, np.float32)
            logp = zeros - np.float32(np.log(sizes.policy_vocabulary))
            rollout = Rollout(prompt, tokens, logp, zeros, np.ones(sizes.response, np.int32), stopped=False)
            samples.append(Sample(rollout, 1.0 if member % 2 else -1.0, LOG_RHO, len(samples)))
    return samples
