"""Sums and differences with worked solutions: a task that a policy of a million parameters can learn.

Our own generator rather than reasoning-gym's: a warm start needs worked solutions (reasoning-gym gives a
question and an answer), and every answer lies between 0 and 999, as AIME's do.

    prompt     17+15-12=
    solution   17+15=32,32-12=20,\\boxed{20}

A corpus with slips (wrong digits, carried on to the end) makes a base policy of a known accuracy: one that can
calculate, and that imitates a corpus which often does not.
"""

import random

from tailrl.config.task import ArithmeticTask
from tailrl.tasks.loaded import Loaded, generated
from tailrl.tasks.problem import Problem


def load(task: ArithmeticTask) -> Loaded:
    """Different problems, deterministic under the task's seed; raises StudyError where too few exist."""
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
    return Problem(id=text, prompt=f"{text}=\n", answer=str(answer), solution="".join(steps) + f"\\boxed{{{written}}}")


def _slip(rng: random.Random, value: int) -> int:
    """The value with one of its digits replaced by another one."""
    digits = str(value)
    place = rng.randrange(len(digits))
    wrong = rng.choice([d for d in "0123456789" if d != digits[place]])
    return int(digits[:place] + wrong + digits[place + 1 :])
