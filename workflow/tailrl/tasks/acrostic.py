"""Words with given initials: a task whose answer is open text with a form that can be checked.

    prompt     k b o\\n
    solution   \\boxed{king bread owl}

Any different words of the list with these initials in this order are right: 4 * 8 * 5 lines here. So a problem's answer
is its letters.

In a corpus with slips any other word of the list may replace a word. In a corpus with a habit the words are often in
alphabetical order of their initials, whatever the order of the letters. Then the most probable answer of its base
policy is wrong, unless the letters are in alphabetical order themselves.
"""

import random

from tailrl.config.tasks.acrostic import AcrosticTask
from tailrl.tasks.problem import Problem
from tailrl.tasks.word_list import WORDS


def draw(rng: random.Random, task: AcrosticTask) -> Problem:
    """A problem, with its worked solution."""
    words = rng.sample(WORDS, rng.randint(*task.letters))
    letters = " ".join(word[0] for word in words)
    by_initial = sorted(words, key=lambda word: word[0])
    chosen = by_initial if by_initial != words and rng.random() < task.habit else words
    written = [rng.choice(WORDS) if rng.random() < task.slip else word for word in chosen]
    return Problem(letters, f"{letters}\n", letters, f"\\boxed{{{' '.join(written)}}}", compared="initials")
