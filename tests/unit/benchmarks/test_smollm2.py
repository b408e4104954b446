"""How the pretrained model of studies/smollm2.yaml is prompted."""

from jinja2 import Template
from smollm2 import SHOTS, shots_template

from tailrl.config.tasks.words import WordsTask
from tailrl.tasks.scoring import score
from tailrl.tasks.words import WORDS, load


def test_worked_examples_of_words_that_no_problem_has_stand_before_the_problem() -> None:
    assert not {word for text in SHOTS for word in text.split()} & set(WORDS)
    (problem,) = load(WordsTask(name="words", problems=1, words=(2, 2))).problems
    lines = Template(shots_template()).render(messages=[{"role": "user", "content": problem.prompt}]).split("\n")
    assert lines[-2:] == [problem.prompt.strip(), ""]
    examples, solutions = lines[:-2:2], lines[1:-2:2]
    assert tuple(examples) == SHOTS
    for example, solution in zip(examples, solutions, strict=True):
        assert score(solution, " ".join(sorted(example.split())), "text") == 1
    # Else copying would be what the examples show.
    assert sum(solution[7:-1] == example for example, solution in zip(examples, solutions, strict=True)) == 3
