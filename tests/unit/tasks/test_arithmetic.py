"""Generated sums: every solution is checked by evaluating what it says."""

import re
from collections.abc import Iterator

import pytest

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks.arithmetic import _by_habit as by_habit
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score

PLAIN = ArithmeticTask(problems=400, terms=(2, 5), largest=25, seed=4)


def load(task: ArithmeticTask) -> list[Problem]:
    loaded = load_task(task)
    assert loaded.skipped == {}
    return loaded.problems


def evaluate(expression: str) -> int:
    """A sum, read term by term and without Python's eval."""
    assert re.fullmatch(r"\d+([+-]\d+)*", expression)
    return sum(int(term) for term in re.findall(r"[+-]?\d+", expression))


def steps(solution: str) -> list[str]:
    return solution.split(",")[:-1]


def test_answers_and_every_step_are_right() -> None:
    for problem in load(PLAIN):
        expression = problem.prompt.removesuffix("=\n")
        terms = [int(term) for term in re.findall(r"\d+", expression)]
        assert 2 <= len(terms) <= 5 and max(terms) <= 25
        assert 0 <= int(problem.answer) == evaluate(expression) <= 999
        assert problem.id == expression
        running = str(terms[0])
        for step, term in zip(steps(problem.solution), re.findall(r"[+-]\d+", expression), strict=True):
            left, _, right = step.partition("=")
            assert left == running + term
            assert int(right) == evaluate(left) >= 0
            running = right
        assert problem.solution.endswith(f"\\boxed{{{running}}}")


def test_the_solution_earns_the_reward_and_another_number_does_not() -> None:
    for problem in load(PLAIN)[:50]:
        assert score(problem.solution, problem.answer, problem.compared) == 1.0
        assert score(problem.solution.replace("boxed{", "boxed{1"), problem.answer, problem.compared) == 0.0


def test_every_number_of_terms_occurs() -> None:
    counts = {len(re.findall(r"\d+", problem.prompt)) for problem in load(PLAIN)}
    assert counts == {2, 3, 4, 5}


def test_problems_differ_and_are_those_of_the_seed() -> None:
    problems = load(PLAIN)
    assert len({problem.prompt for problem in problems}) == PLAIN.problems
    assert load(PLAIN) == problems
    assert load(PLAIN.model_copy(update={"seed": 5})) != problems
    # More problems of the same seed are the same problems and more.
    assert load(PLAIN.model_copy(update={"problems": 100})) == problems[:100]


def carried_on(problem: Problem) -> Iterator[tuple[str, str]]:
    """Both sides of each step; fails where one does not begin with what was written before, or the answer is wrong."""
    assert int(problem.answer) == evaluate(problem.prompt.removesuffix("=\n"))
    running = None
    for step in steps(problem.solution):
        left, _, written = step.partition("=")
        assert running is None or re.match(r"\d+", left).group() == running  # type: ignore[union-attr]
        yield left, written
        running = written
    assert problem.solution.endswith(f"\\boxed{{{running}}}")


PUPILS = {"17+15": 22, "17+12": 29, "9+5": 4, "8+19": 17, "99+1": 90, "32-17": 25, "39-17": 22, "21-3": 22, "40-40": 0}
"""Sums as pupils write them who forget a carry, or take the smaller digit from the larger; by hand."""


@pytest.mark.parametrize("step", PUPILS)
def test_a_habit_is_a_pupils(step: str) -> None:
    value, change = re.fullmatch(r"(\d+)([+-]\d+)", step).groups()  # type: ignore[union-attr]
    assert by_habit(int(value), int(change)) == PUPILS[step]


def test_a_habit_is_in_its_share_of_the_steps_and_carried_on() -> None:
    habit = 0.7
    usual = wrong = 0
    for problem in load(PLAIN.model_copy(update={"habit": habit, "problems": 1500})):
        for left, written in carried_on(problem):
            value, change = re.fullmatch(r"(\d+)([+-]\d+)", left).groups()  # type: ignore[union-attr]
            pupils = by_habit(int(value), int(change))
            assert int(written) in (evaluate(left), pupils)
            if pupils != evaluate(left):
                usual += 1
                wrong += int(written) == pupils
    # Four standard errors: 1 in 16,000 by chance.
    assert abs(wrong / usual - habit) < 4 * (habit * (1 - habit) / usual) ** 0.5 and usual > 500


def test_slips_are_one_digit_and_are_carried_on() -> None:
    slip = 0.35
    right = wrong = 0
    for problem in load(PLAIN.model_copy(update={"slip": slip, "problems": 1500})):
        for left, written in carried_on(problem):
            truth = str(evaluate(left))
            if written == truth:
                right += 1
            else:
                wrong += 1
                # One digit was replaced; where that made a leading zero, it is not written.
                differing = sum(a != b for a, b in zip(written.zfill(len(truth)), truth, strict=True))
                assert differing == 1
    assert wrong / (wrong + right) == pytest.approx(slip, abs=0.03)


def test_too_few_different_problems_is_one_sentence() -> None:
    with pytest.raises(StudyError, match=r"task arithmetic: 500 different problems .* do not exist"):
        load(ArithmeticTask(problems=500, terms=(2, 2), largest=3))
