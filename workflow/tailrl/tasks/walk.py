"""Walks on a cycle of letters: a task whose responses have 20 to 800 tokens, 8 for a step.

    prompt     03:e,a>d,b>f,c>a,d>g,e>b,f>h,g>j,h>i,i>c,j>e\\n
    solution   03:e>b so 02:b>f then 01:f>h so \\boxed{h}

The prompt gives the number of steps, the first letter, and which letter follows which. It has the same length for every
walk. Each step is the same work: count down, and look one letter up. Any word may follow a step. These words give
responses of every length about the same entropy a token.

The letters form one cycle. So a wrong step makes the answer wrong, unless another wrong step mends it.
"""

import random

from tailrl.config.tasks.walk import WalkTask
from tailrl.tasks.loaded import Loaded, generated
from tailrl.tasks.problem import Problem

LETTERS = "abcdefghij"
FREE_WORDS = ("so", "then", "now", "next", "and", "thus", "here", "well")
"""Words between steps; the k-th is drawn with a probability proportional to 1/k."""

_WEIGHTS = [1 / rank for rank in range(1, len(FREE_WORDS) + 1)]


def load(task: WalkTask) -> Loaded:
    """Different problems, deterministic under the task's seed."""
    return generated(task, lambda rng: _draw(rng, task))


def _draw(rng: random.Random, task: WalkTask) -> Problem:
    order = rng.sample(LETTERS, len(LETTERS))
    follows = dict(zip(order, order[1:] + order[:1], strict=True))
    count = rng.randint(*task.steps)
    answer = written = order[0]
    text = f"{count:02}:{written}," + ",".join(f"{letter}>{follows[letter]}" for letter in LETTERS)
    solution = ""
    for left in range(count, 0, -1):
        before, written, answer = written, follows[written], follows[answer]
        if rng.random() < task.slip:
            written = rng.choice([letter for letter in LETTERS if letter != written])
        (word,) = rng.choices(FREE_WORDS, _WEIGHTS)
        solution += f"{left:02}:{before}>{written} {word} "
    return Problem(text, f"{text}\n", answer, f"{solution}\\boxed{{{written}}}", compared="text")
