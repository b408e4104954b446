"""Words to sort: a task whose answer is text, and whose tail consists of useful words.

    prompt     owl bread king\\n
    solution   \\boxed{bread king owl}

In a corpus with slips any other word of the list may replace a word. A base policy that imitates it gives each of them
a little probability; arithmetic has ten digits only.
"""

import random

from tailrl.config.tasks.words import WordsTask
from tailrl.tasks.problem import Problem

_LIST = """
apple arrow beach bird boat bone bread bridge brook bush cake candle castle chair cliff clock cloud coat corn crown
deer desk dove drum duck eagle farm feather fence field fire fish flag flower forest fox frog garden gate ghost glass
glove goat gold grape grass hammer hat hill honey horse house ink island jar jewel key king kite knife ladder lake
lamp leaf lemon lion loaf map meadow mill mirror moon moss mouse nail nest night oak ocean olive onion owl paper path
pearl pen piano pond queen rain ring river road rope rose sail salt sand seed sheep ship shoe silver snow song spoon
star stone storm sugar swan table tiger tower tree valley violin wagon water whale wheel window wolf wood wool
"""
WORDS = _LIST.split()


def draw(rng: random.Random, task: WordsTask) -> Problem:
    """A problem, with its worked solution."""
    words = rng.sample(WORDS, rng.randint(*task.words))
    written = [rng.choice(WORDS) if rng.random() < task.slip else word for word in sorted(words)]
    text = " ".join(words)
    solution = f"\\boxed{{{' '.join(written)}}}"
    return Problem(text, f"{text}\n", " ".join(sorted(words)), solution, compared="text")
