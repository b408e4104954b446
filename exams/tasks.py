"""The tasks of the exam's policies, each with worked solutions; a slip writes something else in their place."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.tasks.words import WordsTask
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task

Task = Literal[
    "arithmetic", "words", "reverse", "lengths", "series", "initials", "numbers", "doubles", "signs", "evens", "clocks"
]

TASKS: dict[Task, str] = {
    "arithmetic": "solves small sums",
    "words": "sorts words",
    "reverse": "writes words in reverse order",
    "lengths": "counts the letters of words",
    "series": "goes on with a series of numbers",
    "initials": "writes the first letters of words",
    "numbers": "sorts numbers",
    "doubles": "writes the doubles of numbers",
    "signs": "says which of two numbers is larger",
    "evens": "says which numbers are even",
    "clocks": "adds minutes to times of day",
}


def problems(task: Task, count: int, seed: int, slip: float = 0.0) -> list[Problem]:
    """So many problems of a task; `slip`: the share of a solution's parts that are wrong."""
    if task == "arithmetic":
        return load_task(ArithmeticTask(problems=count, seed=seed, slip=slip)).problems
    if task in NUMBER_TASKS:
        return [NUMBER_TASKS[task](random.Random(f"{task} {seed} {i}"), slip, i) for i in range(count)]
    sorting = load_task(WordsTask(name="words", problems=count, words=(3, 5), seed=seed, slip=slip)).problems
    others = {"reverse": _reversed, "lengths": _lengths, "initials": _initials}
    return [others[task](problem, slip, seed) for problem in sorting] if task in others else sorting


def _series(rng: random.Random, slip: float, number: int) -> Problem:
    """Four numbers with a constant difference, to go on with for three more; a slip writes a random number."""
    start, step = rng.randint(1, 70), rng.choice([1, 2, 3, 5])
    values = [start + i * step for i in range(7)]
    written = [rng.randint(1, 99) if rng.random() < slip else value for value in values[4:]]
    given, rest = (", ".join(map(str, part)) for part in (values[:4], values[4:]))
    steps = " ".join(f"{a}+{step}={b}" for a, b in zip([values[3], *written], written, strict=False))
    solution = f"{steps} \\boxed{{{', '.join(map(str, written))}}}"
    return Problem(f"{number} {given}", f"go on: {given}\n", rest, solution, compared="text")


def _numbers(rng: random.Random, slip: float, number: int) -> Problem:
    """Three to five numbers, to be sorted; a slip writes another of them."""
    given = rng.sample(range(10, 60), rng.randint(3, 5))
    written = [rng.choice(given) if rng.random() < slip else value for value in sorted(given)]
    text, answer = (" ".join(map(str, part)) for part in (given, sorted(given)))
    steps = " < ".join(map(str, written))
    solution = f"{steps} \\boxed{{{' '.join(map(str, written))}}}"
    return Problem(f"{number} {text}", f"sort {text}\n", answer, solution, compared="text")


def _doubles(rng: random.Random, slip: float, number: int) -> Problem:
    """Three or four numbers, to be doubled; a slip writes a random number."""
    given = [rng.randint(10, 49) for _ in range(rng.randint(3, 4))]
    written = [rng.randint(20, 98) if rng.random() < slip else 2 * value for value in given]
    text, answer, box = (" ".join(map(str, part)) for part in (given, [2 * value for value in given], written))
    steps = ", ".join(f"twice {a} is {b}" for a, b in zip(given, written, strict=True))
    return Problem(f"{number} {text}", f"double {text}\n", answer, f"{steps} \\boxed{{{box}}}", compared="text")


def _signs(rng: random.Random, slip: float, number: int) -> Problem:
    """Three or four pairs of numbers, to be compared; a slip writes a random sign."""
    pairs = [rng.sample(range(10, 60), 2) for _ in range(rng.randint(3, 4))]
    right = ["<" if a < b else ">" for a, b in pairs]
    written = [rng.choice("<>") if rng.random() < slip else sign for sign in right]
    text = ", ".join(f"{a} {b}" for a, b in pairs)
    steps = "; ".join(f"{a} {sign} {b}" for (a, b), sign in zip(pairs, written, strict=True))
    solution = f"{steps} \\boxed{{{' '.join(written)}}}"
    return Problem(f"{number} {text}", f"signs {text}\n", " ".join(right), solution, compared="text")


def _evens(rng: random.Random, slip: float, number: int) -> Problem:
    """Four or five numbers, of which the even ones are written; a slip writes a random word of one."""
    given = [2 * rng.randint(5, 49), *rng.sample(range(10, 99), rng.randint(3, 4))]
    rng.shuffle(given)
    right = ["odd" if value % 2 else "even" for value in given]
    written = [rng.choice(["odd", "even"]) if rng.random() < slip else word for word in right]
    text, answer, box = (
        " ".join(str(a) for a, word in zip(given, words, strict=True) if word != "odd")
        for words in (["even"] * len(given), right, written)
    )
    steps = ", ".join(f"{a} {word}" for a, word in zip(given, written, strict=True))
    return Problem(f"{number} {text}", f"evens {text}\n", answer, f"{steps} \\boxed{{{box}}}", compared="text")


def _clocks(rng: random.Random, slip: float, number: int) -> Problem:
    """Two or three times of day, to each of which the same minutes are added; a slip writes a random time."""
    minutes = rng.choice([15, 20, 25, 35, 40, 45])
    given = [rng.randint(60, 1300) for _ in range(rng.randint(2, 3))]
    right = [a + minutes for a in given]
    written = [rng.randint(60, 1400) if rng.random() < slip else a for a in right]
    told, answer, box = (" ".join(f"{a // 60}:{a % 60:02}" for a in times) for times in (given, right, written))
    steps = ", ".join(f"{a} then {b}" for a, b in zip(told.split(), box.split(), strict=True))
    text = f"{told} plus {minutes}"
    return Problem(f"{number} {text}", f"clock {text}\n", answer, f"{steps} \\boxed{{{box}}}", compared="text")


NUMBER_TASKS: dict[str, Callable[[random.Random, float, int], Problem]] = {
    "series": _series,
    "numbers": _numbers,
    "doubles": _doubles,
    "signs": _signs,
    "evens": _evens,
    "clocks": _clocks,
}
"""Tasks that need no words: each makes one problem from a random state, the share of slips and its number."""


def _lengths(problem: Problem, slip: float, seed: int) -> Problem:
    """Words, each to be written with the number of its letters, and then all numbers; a slip writes another number."""
    rng = random.Random(f"lengths {seed} {problem.id}")
    words = problem.prompt.split()
    written = [rng.randint(3, 9) if rng.random() < slip else len(word) for word in words]
    steps = "; ".join(f"{word} has {number}" for word, number in zip(words, written, strict=True))
    return replace(
        problem,
        prompt=f"letters of {problem.prompt}",
        answer=" ".join(str(len(word)) for word in words),
        solution=f"{steps}. \\boxed{{{' '.join(map(str, written))}}}",
    )


def _initials(problem: Problem, slip: float, seed: int) -> Problem:
    """Words, each to be written after its first letter, and then all first letters; a slip writes another letter."""
    rng = random.Random(f"initials {seed} {problem.id}")
    words = problem.prompt.split()
    written = [rng.choice("abcdefghik") if rng.random() < slip else word[0] for word in words]
    steps = ", ".join(f"{letter} as {word}" for letter, word in zip(written, words, strict=True))
    return replace(
        problem,
        prompt=f"initials: {problem.prompt}",
        answer=" ".join(word[0] for word in words),
        solution=f"{steps}; \\boxed{{{' '.join(written)}}}",
    )


def _reversed(problem: Problem, slip: float, seed: int) -> Problem:
    """Words to be written in reverse order, with a number before each; a slip writes another of them."""
    words = problem.prompt.split()[::-1]
    rng = random.Random(f"{seed} {problem.id}")
    written = [rng.choice(words) if rng.random() < slip else word for word in words]
    steps = "".join(f"{i}:{word}," for i, word in enumerate(written, 1))
    return replace(
        problem,
        prompt=f"reverse {problem.prompt}",
        answer=" ".join(words),
        solution=f"{steps}\\boxed{{{' '.join(written)}}}",
    )
