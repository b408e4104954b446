"""Words with given initials: the problems, the habit of a corpus, and a scorer beside an enumeration of all lines."""

import itertools

import pytest

from tailrl.config.tasks.acrostic import AcrosticTask
from tailrl.runtime.errors import StudyError
from tailrl.tasks import scoring
from tailrl.tasks.problem import Problem
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
from tailrl.tasks.word_list import WORDS

PLAIN = AcrosticTask(name="acrostic", problems=400, letters=(2, 6), seed=4)


def load(**changes: object) -> list[Problem]:
    loaded = load_task(PLAIN.model_copy(update=changes))
    assert loaded.skipped == {}
    return loaded.problems


def written(problem: Problem) -> list[str]:
    """The words of the worked solution."""
    return problem.solution.removeprefix("\\boxed{").removesuffix("}").split(" ")


def right(problem: Problem) -> bool:
    return score(problem.solution, problem.answer, problem.compared) == 1.0


# --- problems ------------------------------------------------------------------------------------------


def test_the_solution_has_different_words_with_the_letters_of_the_prompt() -> None:
    problems = load()
    for problem in problems:
        words = written(problem)
        assert problem.solution == f"\\boxed{{{' '.join(words)}}}"
        assert problem.prompt == f"{' '.join(word[0] for word in words)}\n"
        assert set(words) <= set(WORDS) and len(set(words)) == len(words)
        assert problem.id == problem.answer == problem.prompt.strip()
        assert right(problem)
    assert {len(problem.answer.split()) for problem in problems} == {2, 3, 4, 5, 6}
    assert any(len(set(problem.answer.split())) < len(problem.answer.split()) for problem in problems)


def test_problems_differ_and_are_those_of_the_seed() -> None:
    problems = load()
    assert len({problem.prompt for problem in problems}) == PLAIN.problems
    assert load() == problems != load(seed=5)
    assert load(problems=100) == problems[:100]


def test_a_habit_puts_its_share_of_the_solutions_into_alphabetical_order() -> None:
    habit, applies, in_order = 0.7, 0, 0
    for problem in load(habit=habit, problems=3000):
        letters, initials = problem.answer.split(), [word[0] for word in written(problem)]
        assert initials in (letters, sorted(letters))
        assert right(problem) == (initials == letters)
        if letters != sorted(letters):
            applies += 1
            in_order += initials != letters
    # Four standard errors: 1 in 16,000 by chance.
    assert abs(in_order / applies - habit) < 4 * (habit * (1 - habit) / applies) ** 0.5 and applies > 2000


@pytest.mark.parametrize(("habit", "share"), [(0.0, 1.0), (1.0, 0.0)])
def test_without_a_habit_all_solutions_are_right_and_with_it_alone_none(habit: float, share: float) -> None:
    """Where the letters are not in alphabetical order."""
    unsorted = [problem for problem in load(habit=habit) if problem.answer.split() != sorted(problem.answer.split())]
    assert sum(map(right, unsorted)) == share * len(unsorted) and len(unsorted) > 200


def test_slips_put_other_words_in_their_places() -> None:
    slip, other, count = 0.3, 0, 0
    plain = {problem.prompt: problem for problem in load(problems=1500)}
    for problem in load(slip=slip, problems=1500):
        pairs = list(zip(written(problem), problem.answer.split(), strict=True))
        other, count = other + sum(word[0] != letter for word, letter in pairs), count + len(pairs)
    # A slip to a word with the same initial is none; four standard errors.
    drawn = [word for problem in plain.values() for word in written(problem)]
    same = sum(sum(word[0] == one[0] for word in WORDS) for one in drawn) / len(drawn) / len(WORDS)
    expected = slip * (1 - same)
    assert other / count == pytest.approx(expected, abs=4 * (expected * (1 - expected) / count) ** 0.5)


def test_too_few_different_problems_is_one_sentence() -> None:
    with pytest.raises(StudyError, match=r"task acrostic: 999 different problems .* do not exist"):
        load(letters=(2, 2), problems=999)


# --- the scorer ----------------------------------------------------------------------------------------

SMALL = ["ant", "ape", "bat", "bee", "bug", "cat"]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_scorer_agrees_with_an_enumeration_of_all_lines(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Every line of up to four of six words and one that is not listed, for every choice of letters."""
    monkeypatch.setattr(scoring, "_LISTED", frozenset(SMALL))
    lines = [line for length in range(5) for line in itertools.product([*SMALL, "bird"], repeat=length)]
    total = 0
    for letters in itertools.product("abcd", repeat=count):
        expected = {line for line in itertools.permutations(SMALL, count) if tuple(word[0] for word in line) == letters}
        found = {line for line in lines if score(f"\\boxed{{{' '.join(line)}}}", " ".join(letters), "initials")}
        assert found == expected
        total += len(found)
    assert total == len(list(itertools.permutations(SMALL, count)))


def test_a_problem_has_as_many_right_lines_as_its_letters_have_words() -> None:
    """The number in the module's docstring: all lines that pass for `k b o`."""
    lines = itertools.product(*([word for word in WORDS if word[0] == letter] for letter in "kbo"))
    found = [line for line in lines if score(f"\\boxed{{{' '.join(line)}}}", "k b o", "initials")]
    assert len(found) == 4 * 8 * 5


@pytest.mark.parametrize(
    ("response", "passes"),
    [
        (r"\boxed{king bread owl}", True),
        (r"\boxed{kite bush oak}", True),
        ("\\boxed{\tking  bread\nowl }", True),
        (r"\boxed{bread king owl}, no: \boxed{king bread owl}", True),
        (r"\boxed{king bread owl} \boxed{bread king owl}", False),
        (r"\boxed{bread king owl}", False),
        (r"\boxed{king bread}", False),
        (r"\boxed{king bread owl owl}", False),
        (r"\boxed{king bread owl oak}", False),
        (r"\boxed{King bread owl}", False),
        (r"\boxed{king, bread, owl}", False),
        (r"\boxed{kingbreadowl}", False),
        (r"\boxed{k b o}", False),
        (r"\boxed{knight bread owl}", False),
        ("\\boxed{king bread\u0301 owl}", False),
        (r"\boxed{}", False),
        (r"\boxed{ }", False),
        (r"\boxed{king bread owl", False),
        ("king bread owl", False),
        ("", False),
    ],
)
def test_a_line_passes_by_its_form(response: str, passes: bool) -> None:
    assert score(response, "k b o", "initials") == float(passes)


@pytest.mark.parametrize(("line", "passes"), [("bread bush", True), ("bush bread", True), ("bread bread", False)])
def test_a_letter_that_comes_twice_takes_two_words(line: str, passes: bool) -> None:
    assert score(f"\\boxed{{{line}}}", "b b", "initials") == float(passes)


def test_any_text_has_a_verdict() -> None:
    """A long one in time that grows with its length."""
    for box in ("\x00", "\ud800", "∫ b o", "king " * 100_000, "k" * 1_000_000):
        assert score(f"\\boxed{{{box}}}", "k b o", "initials") == 0.0
