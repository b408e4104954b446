"""Sums and differences with worked solutions: a task that a policy of a million parameters can learn.

The generator is our own because a warm start needs worked solutions; reasoning-gym has none. Every answer lies between
0 and 999, as in AIME.

    prompt     17+15-12=
    solution   17+15=32,32-12=20,\\boxed{20}

A corpus with slips (wrong digits, carried on to the end) makes a base policy of known accuracy: it can calculate, but
it imitates a corpus with errors. A corpus with a habit has the same error wherever a carry or a borrow occurs: the most
probable answer of its base policy is wrong there, and a lower temperature brings nothing.
"""

import random

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.tasks.problem import Problem


def draw(rng: random.Random, task: ArithmeticTask) -> Problem:
    """A problem, with its worked solution."""
    answer = written = rng.randint(0, task.largest)  # `written` is the running result in the solution
    text, steps = str(answer), []
    for _ in range(rng.randint(*task.terms) - 1):
        operand = rng.randint(0, task.largest)
        sign = rng.choice("+-") if min(answer, written) >= operand else "+"
        before, change = written, operand if sign == "+" else -operand
        answer, written = answer + change, written + change
        if rng.random() < task.slip:
            written = _slip(rng, written)
        # Without a habit no number is drawn: corpora of before it stay what they are.
        elif task.habit and (wrong := _by_habit(before, change)) != written and rng.random() < task.habit:
            written = wrong
        text += f"{sign}{operand}"
        steps.append(f"{before}{sign}{operand}={written},")
    solution = "".join(steps) + f"\\boxed{{{written}}}"
    return Problem(text, f"{text}=\n", str(answer), solution, compared="integer")


def _by_habit(value: int, change: int) -> int:
    """Column by column: the last digit of a sum, the smaller digit from the larger; right without carry or borrow."""
    result = 0
    for place in (100, 10, 1):
        digit, other = value // place % 10, abs(change) // place % 10
        result = 10 * result + ((digit + other) % 10 if change >= 0 else abs(digit - other))
    return result


def _slip(rng: random.Random, value: int) -> int:
    """The value with one digit replaced by another."""
    digits = str(value)
    position = rng.randrange(len(digits))
    wrong = rng.choice([d for d in "0123456789" if d != digits[position]])
    return int(digits[:position] + wrong + digits[position + 1 :])
