"""Generated words: what is asked, the solution, its slips, and how an answer of text is compared."""

import pytest

from tailrl.config.tasks.words import WordsTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
from tailrl.tasks.word_list import WORDS

PLAIN = WordsTask(name="words", problems=400, words=(2, 5), seed=4)


def load(task: WordsTask) -> list[Problem]:
    loaded = load_task(task)
    assert loaded.skipped == {}
    return loaded.problems


def test_the_words_are_plain_and_in_order() -> None:
    """So that their places in the list are the order that is asked for."""
    assert sorted(set(WORDS)) == WORDS
    assert all(word.isascii() and word.isalpha() and word.islower() for word in WORDS)


def test_the_answer_is_the_same_words_in_order() -> None:
    problems = load(PLAIN)
    for problem in problems:
        asked, answer = problem.prompt.removesuffix("\n").split(" "), problem.answer.split(" ")
        assert len(set(asked)) == len(asked)
        places = [WORDS.index(word) for word in answer]
        assert places == sorted(WORDS.index(word) for word in asked)
        assert (problem.id, problem.compared) == (" ".join(asked), "text")
        assert problem.solution == f"\\boxed{{{problem.answer}}}"
    assert {len(problem.answer.split()) for problem in problems} == {2, 3, 4, 5}
    assert {word for problem in problems for word in problem.answer.split()} == set(WORDS)


def test_problems_differ_and_are_those_of_the_seed() -> None:
    problems = load(PLAIN)
    assert len({problem.prompt for problem in problems}) == PLAIN.problems
    assert load(PLAIN) == problems != load(PLAIN.model_copy(update={"seed": 5}))


def test_slips_put_other_words_in_their_places() -> None:
    slip, wrong, count = 0.3, 0, 0
    for problem in load(PLAIN.model_copy(update={"slip": slip, "problems": 1500})):
        written = problem.solution.removeprefix("\\boxed{").removesuffix("}").split(" ")
        pairs = list(zip(written, problem.answer.split(" "), strict=True))
        wrong, count = wrong + sum(a != b for a, b in pairs), count + len(pairs)
    # One slip in the size of the list chooses the right word; three standard deviations of a share.
    expected = slip * (1 - 1 / len(WORDS))
    assert wrong / count == pytest.approx(expected, abs=3 * (expected * (1 - expected) / count) ** 0.5)


def test_too_few_different_problems_is_one_sentence() -> None:
    with pytest.raises(StudyError, match=r"task words: 99999 different problems .* do not exist"):
        load(PLAIN.model_copy(update={"words": (2, 2), "problems": 99999}))


# --- how an answer of text is compared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "right"),
    [
        (r"\boxed{bird owl}", True),
        (r"first \boxed{owl bird}, no: \boxed{ bird   owl }", True),
        ("\\boxed{bird\nowl}", True),
        (r"\boxed{owl bird}", False),
        (r"\boxed{Bird owl}", False),
        (r"\boxed{birdowl}", False),
        (r"\boxed{bird owl owl}", False),
        (r"\boxed{}", False),
        (r"\boxed{bird owl", False),
        ("bird owl", False),
    ],
)
def test_text_is_compared_up_to_white_space(response: str, right: bool) -> None:
    assert score(response, "bird owl", "text") == float(right)


def test_text_is_neither_a_number_nor_a_product() -> None:
    """math-verify would read words as products of letters, in any order."""
    assert score(r"\boxed{070}", "70") == 1.0
    assert score(r"\boxed{070}", "70", "text") == 0.0
    assert score("\\boxed{caf\u00e9}", "cafe\u0301", "text") == 1.0
