"""Sums and differences with worked solutions: a task that a policy of a million parameters can learn.

The generator is our own because a warm start needs worked solutions; reasoning-gym has none. Every answer lies between
0 and 999, as in AIME.

    prompt     17+15-12=
    solution   17+15=32,32-12=20,\\boxed{20}

A corpus with slips (wrong digits, carried on to the end) makes a base policy of known accuracy: it can calculate, but
it imitates a corpus with errors.
"""

import random

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.tasks.loaded import Loaded, generated
from tailrl.tasks.problem import Problem


def load(task: ArithmeticTask) -> Loaded:
    """Different problems, deterministic under the task's seed; raises StudyError if too few exist."""
    return generated(task, lambda rng: _draw(rng, task))


def _draw(rng: random.Random, task: ArithmeticTask) -> Problem:
    answer = written = rng.randint(0, task.largest)  # `written` is the running result in the solution
    text, steps = str(answer), []
    for _ in range(rng.randint(*task.terms) - 1):
        operand = rng.randint(0, task.largest)
        sign = rng.choice("+-") if min(answer, written) >= operand else "+"
        before, change = written, operand if sign == "+" else -operand
        answer, written = answer + change, written + change
        if rng.random() < task.slip:
            written = _slip(rng, written)
        text += f"{sign}{operand}"
        steps.append(f"{before}{sign}{operand}={written},")
    solution = "".join(steps) + f"\\boxed{{{written}}}"
    return Problem(text, f"{text}=\n", str(answer), solution, compared="integer")


def _slip(rng: random.Random, value: int) -> int:
    """The value with one digit replaced by another."""
    digits = str(value)
    position = rng.randrange(len(digits))
    wrong = rng.choice([d for d in "0123456789" if d != digits[position]])
    return int(digits[:position] + wrong + digits[position + 1 :])
