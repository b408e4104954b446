"""How the pretrained model of the studies smollm2 and smollm2_fp8 is prompted."""

import re

from jinja2 import Template
from smollm2 import SHOTS, shots_template

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.tasks.words import WordsTask
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import score
from tailrl.tasks.word_list import WORDS


def test_worked_examples_of_words_that_no_problem_has_stand_before_the_problem() -> None:
    shots = SHOTS["words"]
    assert not {word for text in shots for word in text.split()} & set(WORDS)
    (problem,) = load_task(WordsTask(name="words", problems=1, words=(2, 2))).problems
    lines = Template(shots_template("words")).render(messages=[{"role": "user", "content": problem.prompt}]).split("\n")
    assert lines[-2:] == [problem.prompt.strip(), ""]
    examples, solutions = lines[:-2:2], lines[1:-2:2]
    assert tuple(examples) == shots
    for example, solution in zip(examples, solutions, strict=True):
        assert score(solution, " ".join(sorted(example.split())), "text") == 1
    # Else copying would be what the examples show.
    assert sum(solution[7:-1] == example for example, solution in zip(examples, solutions, strict=True)) == 3


def test_worked_sums_that_no_problem_is_stand_before_the_problem() -> None:
    (problem,) = load_task(ArithmeticTask(name="arithmetic", problems=1, terms=(2, 2), largest=19)).problems
    lines = Template(shots_template("sums")).render(messages=[{"role": "user", "content": problem.prompt}]).split("\n")
    assert lines[-2:] == [problem.prompt.strip(), ""] and len(lines) == 2 * len(SHOTS["sums"]) + 2
    for example, solution in zip(lines[:-2:2], lines[1:-2:2], strict=True):
        found = re.fullmatch(r"(\d+)([+-])(\d+)=", example)
        assert found is not None
        first, second = int(found[1]), int(found[3])
        assert max(first, second) > 19
        answer = first + second if found[2] == "+" else first - second
        assert solution == f"{example}{answer},\\boxed{{{answer}}}"
