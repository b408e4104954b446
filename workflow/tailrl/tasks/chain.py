"""Chains of sums: a task whose responses have 32 to 1,293 tokens, 13 for a step.

    prompt     03:88+29\\n
    solution   03:88+29=17 so 02:17+29=46 then 01:46+29=75 so \\boxed{75}

The prompt says how many sums there are, the first number, and what is added each time, modulo 100. It has the same
length for every chain. Each step is the same work: count down, copy two numbers, and add them. Any word may follow a
step. These words give responses of every length about the same entropy a token.

Steps only add. So a wrong sum makes the answer wrong, unless other wrong sums make up for it.
"""

import random

from tailrl.config.tasks.chain import ChainTask
from tailrl.tasks.problem import Problem

WRAPS_AT = 100
FREE_WORDS = ("so", "then", "now", "next", "and", "thus", "here", "well")
"""Words between steps; the k-th is drawn with a probability proportional to 1/k."""

_WEIGHTS = [1 / rank for rank in range(1, len(FREE_WORDS) + 1)]


def draw(rng: random.Random, task: ChainTask) -> Problem:
    """A problem, with its worked solution."""
    count, first, added = rng.randint(*task.steps), rng.randrange(WRAPS_AT), rng.randint(1, task.largest)
    written, solution = first, ""
    for left in range(count, 0, -1):
        before, written = written, (written + added) % WRAPS_AT
        if rng.random() < task.slip:
            written = rng.choice([number for number in range(WRAPS_AT) if number != written])
        (word,) = rng.choices(FREE_WORDS, _WEIGHTS)
        solution += f"{left:02}:{before:02}+{added:02}={written:02} {word} "
    text = f"{count:02}:{first:02}+{added:02}"
    answer = (first + count * added) % WRAPS_AT
    solution += f"\\boxed{{{written:02}}}"
    return Problem(text, f"{text}\n", f"{answer:02}", solution, compared="integer")
