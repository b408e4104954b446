"""Chains of sums: the answer and every step are checked by a reading of the prompt alone."""

import re
from collections import Counter

import pytest
from pydantic import ValidationError

from tailrl.config.tasks.chain import ChainTask
from tailrl.model.tokenizer import train_tokenizer
from tailrl.runtime.errors import StudyError
from tailrl.tasks.chain import FREE_WORDS
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score

PLAIN = ChainTask(name="chain", problems=300, steps=(2, 25), seed=4)
LENGTHS = {2: 32, 4: 58, 11: 149, 23: 305, 38: 500}
"""Sums of a problem, and tokens of its solution with the end token: the lengths of the studies `long_*`."""


def load(task: ChainTask) -> list[Problem]:
    loaded = load_task(task)
    assert loaded.skipped == {}
    return loaded.problems


def read(prompt: str) -> tuple[int, int, int]:
    """How many sums, the first number, and what is added."""
    matched = re.fullmatch(r"(\d\d):(\d\d)\+(\d\d)\n", prompt)
    assert matched
    return int(matched[1]), int(matched[2]), int(matched[3])


def steps(solution: str) -> list[tuple[int, int, int, int, str]]:
    """Each step as its count, its two numbers, the sum that it says, and its free word."""
    whole = re.fullmatch(r"((?:\d\d:\d\d\+\d\d=\d\d \w+ )+)\\boxed\{\d\d\}", solution)
    assert whole
    found = re.findall(r"(\d\d):(\d\d)\+(\d\d)=(\d\d) (\w+) ", whole[1])
    return [(*map(int, numbers), word) for *numbers, word in found]  # type: ignore[misc]


def last_two_digits(count: int, first: int, added: int) -> str:
    """All sums at once: another way than step by step."""
    return f"00{first + count * added}"[-2:]


def test_answers_and_every_step_are_right() -> None:
    counts = set()
    for problem in load(PLAIN):
        count, first, added = read(problem.prompt)
        counts.add(count)
        assert (problem.id, problem.compared) == (problem.prompt.removesuffix("\n"), "integer")
        assert problem.answer == last_two_digits(count, first, added) and added > 0
        written = steps(problem.solution)
        assert [step[0] for step in written] == list(range(count, 0, -1))
        assert [step[1] for step in written] == [first, *(step[3] for step in written[:-1])]
        assert all(step[2] == added and int(last_two_digits(1, *step[1:3])) == step[3] for step in written)
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")
    assert counts == set(range(2, 26))


def test_the_solution_earns_the_reward_and_another_number_does_not() -> None:
    for problem in load(PLAIN)[:30]:
        assert score(problem.solution, problem.answer, problem.compared) == 1.0
        other = f"\\boxed{{{(int(problem.answer) + 1) % 100:02}}}"
        assert score(problem.solution + other, problem.answer, problem.compared) == 0.0


@pytest.mark.parametrize("largest", [1, 19])
def test_what_is_added_has_a_largest(largest: int) -> None:
    """With 100 first numbers, so many problems of one length are all that there are: each number is added in some."""
    task = ChainTask(name="chain", problems=100 * largest, steps=(2, 2), largest=largest)
    assert {read(problem.prompt)[1:] for problem in load(task)} == {
        (first, added) for first in range(100) for added in range(1, largest + 1)
    }


def test_problems_differ_and_are_those_of_the_seed() -> None:
    problems = load(PLAIN)
    assert len({problem.prompt for problem in problems}) == PLAIN.problems
    assert load(PLAIN) == problems != load(PLAIN.model_copy(update={"seed": 5}))
    assert load(PLAIN.model_copy(update={"problems": 100})) == problems[:100]


def test_a_slip_leaves_the_problem_as_it_was() -> None:
    for problem in load(PLAIN.model_copy(update={"slip": 0.4})):
        assert problem.answer == last_two_digits(*read(problem.prompt))


@pytest.mark.parametrize(("count", "slip"), [(2, 0.1), (23, 0.1), (23, 0.99)])
def test_slips_are_wrong_sums_carried_on(count: int, slip: float) -> None:
    wrong, right, problems = 0, 0, 1000
    for problem in load(ChainTask(name="chain", problems=problems, steps=(count, count), slip=slip, seed=6)):
        _, first, added = read(problem.prompt)
        written = steps(problem.solution)
        assert [step[1] for step in written] == [first, *(step[3] for step in written[:-1])]
        assert {step[2] for step in written} == {added}
        assert problem.solution.endswith(f"\\boxed{{{written[-1][3]:02}}}")
        wrong += sum(int(last_two_digits(1, *step[1:3])) != step[3] for step in written)
        right += score(problem.solution, problem.answer, problem.compared) == 1.0
    share = wrong / (problems * count)
    assert share == pytest.approx(slip, abs=4 * (slip * (1 - slip) / (problems * count)) ** 0.5)
    # The distance from the right sum is a Markov chain of 100 states, with the second eigenvalue 1 - 100 s / 99.
    expected = 0.01 + 0.99 * (1 - slip * 100 / 99) ** count
    assert right / problems == pytest.approx(expected, abs=4 * (expected * (1 - expected) / problems) ** 0.5)


def test_free_words_follow_their_ranks() -> None:
    words = Counter(step[4] for problem in load(PLAIN) for step in steps(problem.solution))
    total, harmonic = words.total(), sum(1 / rank for rank in range(1, len(FREE_WORDS) + 1))
    assert words.keys() == set(FREE_WORDS)
    for rank, word in enumerate(FREE_WORDS, start=1):
        share = 1 / (rank * harmonic)
        assert words[word] / total == pytest.approx(share, abs=4 * (share / total) ** 0.5)


def test_a_step_is_thirteen_tokens_and_a_prompt_has_one_length() -> None:
    short = load(ChainTask(name="chain", problems=500, steps=(2, 4), seed=1))
    tokenizer = train_tokenizer(1024, (problem.prompt + problem.solution for problem in short))
    for count, length in LENGTHS.items():
        for problem in load(ChainTask(name="chain", problems=20, steps=(count, count))):
            assert len(tokenizer.encode(problem.solution)) + 1 == length == 13 * count + 6
            assert len(tokenizer.encode(problem.prompt)) == 9


@pytest.mark.parametrize("steps", [(1, 5), (6, 5), (5, 100)])
def test_lengths_that_two_digits_cannot_count(steps: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="needs two numbers from 2 to 99, the smaller one first"):
        ChainTask(name="chain", steps=steps)


def test_too_few_different_problems_is_one_sentence() -> None:
    with pytest.raises(StudyError, match=r"task chain: 9901 different problems .* do not exist"):
        load(ChainTask(name="chain", problems=9901, steps=(2, 2)))
