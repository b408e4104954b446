"""Words to sort: a task whose answer is text, and whose tail consists of useful words.

    prompt     owl bread king\\n
    solution   \\boxed{bread king owl}

In a corpus with slips any other word of the list may replace a word. A base policy that imitates it gives each of them
a little probability; arithmetic has ten digits only.
"""

import random

from tailrl.config.tasks.words import WordsTask
from tailrl.tasks.problem import Problem
from tailrl.tasks.word_list import WORDS


def draw(rng: random.Random, task: WordsTask) -> Problem:
    """A problem, with its worked solution."""
    words = rng.sample(WORDS, rng.randint(*task.words))
    written = [rng.choice(WORDS) if rng.random() < task.slip else word for word in sorted(words)]
    text = " ".join(words)
    solution = f"\\boxed{{{' '.join(written)}}}"
    return Problem(text, f"{text}\n", " ".join(sorted(words)), solution, compared="text")
