"""Walks on a cycle of letters: the answer and every step are checked by a reading of the prompt alone."""

import re
from collections import Counter

import pytest
from pydantic import ValidationError

from tailrl.config.tasks.walk import WalkTask
from tailrl.model.tokenizer import train_tokenizer
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
from tailrl.tasks.walk import FREE_WORDS, LETTERS

PLAIN = WalkTask(name="walk", problems=300, steps=(2, 25), seed=4)
LENGTHS = {2: 21, 7: 61, 18: 149, 37: 301, 62: 501}
"""Steps of a walk, and tokens of its solution with the end token: the lengths of the studies `long_*`."""


def load(task: WalkTask) -> list[Problem]:
    loaded = load_task(task)
    assert loaded.skipped == {}
    return loaded.problems


def read(prompt: str) -> tuple[int, str, dict[str, str]]:
    """The number of steps, the first letter, and which letter follows which."""
    matched = re.fullmatch(r"(\d\d):([a-j])((?:,[a-j]>[a-j]){10})\n", prompt)
    assert matched
    return int(matched[1]), matched[2], dict(re.findall(r"([a-j])>([a-j])", matched[3]))


def steps(solution: str) -> list[tuple[int, str, str, str]]:
    """What each step counts down to, where it comes from, where it goes, and the free word behind it."""
    whole = re.fullmatch(r"((?:\d\d:[a-j]>[a-j] \w+ )+)\\boxed\{[a-j]\}", solution)
    assert whole
    found = re.findall(r"(\d\d):([a-j])>([a-j]) (\w+) ", whole[1])
    return [(int(left), before, after, word) for left, before, after, word in found]


def place(count: int, first: str, follows: dict[str, str]) -> str:
    """Where a walk ends, by position on the cycle: another way than letter by letter."""
    cycle = [first]
    while (letter := follows[cycle[-1]]) != first:
        cycle.append(letter)
    assert sorted(cycle) == list(LETTERS)
    return cycle[count % len(cycle)]


def test_answers_and_every_step_are_right() -> None:
    counts = set()
    for problem in load(PLAIN):
        count, first, follows = read(problem.prompt)
        counts.add(count)
        assert (problem.id, problem.compared) == (problem.prompt.removesuffix("\n"), "text")
        assert problem.answer == place(count, first, follows)
        written = steps(problem.solution)
        assert [left for left, *_ in written] == list(range(count, 0, -1))
        assert [before for _, before, *_ in written] == [first, *(after for _, _, after, _ in written[:-1])]
        assert all(follows[before] == after for _, before, after, _ in written)
        assert problem.solution.endswith(f"\\boxed{{{problem.answer}}}")
    assert counts == set(range(2, 26))


def test_the_solution_earns_the_reward_and_another_letter_does_not() -> None:
    for problem in load(PLAIN)[:30]:
        assert score(problem.solution, problem.answer, problem.compared) == 1.0
        others = [f"\\boxed{{{letter}}}" for letter in LETTERS if letter != problem.answer]
        assert not any(score(problem.solution + other, problem.answer, problem.compared) for other in others)


def test_problems_differ_and_are_those_of_the_seed() -> None:
    problems = load(PLAIN)
    assert len({problem.prompt for problem in problems}) == PLAIN.problems
    assert load(PLAIN) == problems != load(PLAIN.model_copy(update={"seed": 5}))
    assert load(PLAIN.model_copy(update={"problems": 100})) == problems[:100]


def test_the_slip_leaves_the_problem_as_it_was() -> None:
    """Slips change solutions alone, so that a corpus with slips asks what one without asks."""
    for problem in load(PLAIN.model_copy(update={"slip": 0.4})):
        assert problem.answer == place(*read(problem.prompt))


@pytest.mark.parametrize("count", [2, 18])
def test_slips_are_wrong_letters_carried_on(count: int) -> None:
    slip, wrong, right, problems = 0.2, 0, 0, 1000
    for problem in load(WalkTask(name="walk", problems=problems, steps=(count, count), slip=slip, seed=6)):
        _, first, follows = read(problem.prompt)
        written = steps(problem.solution)
        assert [before for _, before, *_ in written] == [first, *(after for _, _, after, _ in written[:-1])]
        assert problem.solution.endswith(f"\\boxed{{{written[-1][2]}}}")
        wrong += sum(follows[before] != after for _, before, after, _ in written)
        right += score(problem.solution, problem.answer, problem.compared) == 1.0
    share = wrong / (problems * count)
    assert share == pytest.approx(slip, abs=4 * (slip * (1 - slip) / (problems * count)) ** 0.5)
    # The offset from the right letter is a Markov chain of ten states, with the second eigenvalue 1 - 10 s / 9.
    expected = 0.1 + 0.9 * (1 - slip * 10 / 9) ** count
    assert right / problems == pytest.approx(expected, abs=4 * (expected * (1 - expected) / problems) ** 0.5)


def test_free_words_follow_their_ranks() -> None:
    words = Counter(word for problem in load(PLAIN) for *_, word in steps(problem.solution))
    total, harmonic = words.total(), sum(1 / rank for rank in range(1, len(FREE_WORDS) + 1))
    assert words.keys() == set(FREE_WORDS)
    for rank, word in enumerate(FREE_WORDS, start=1):
        share = 1 / (rank * harmonic)
        assert words[word] / total == pytest.approx(share, abs=4 * (share / total) ** 0.5)


def test_a_step_is_eight_tokens_and_a_prompt_has_one_length() -> None:
    mixed = load(WalkTask(name="walk", problems=500, steps=(2, 62), seed=1))
    tokenizer = train_tokenizer(1024, (problem.prompt + problem.solution for problem in mixed))
    for count, length in LENGTHS.items():
        for problem in load(WalkTask(name="walk", problems=20, steps=(count, count))):
            assert len(tokenizer.encode(problem.solution)) + 1 == length == 8 * count + 5
            assert len(tokenizer.encode(problem.prompt)) == 45


@pytest.mark.parametrize("steps", [(1, 5), (6, 5), (5, 100)])
def test_lengths_that_two_digits_cannot_count(steps: tuple[int, int]) -> None:
    with pytest.raises(ValidationError, match="needs two numbers from 2 to 99, the smaller one first"):
        WalkTask(name="walk", steps=steps)
