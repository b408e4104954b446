"""A sample grows until two of them give the same answer, or the log or the limit ends."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tailrl.explanation import explanation as explanation_module
from tailrl.explanation.catalogue import Choice, catalogue
from tailrl.explanation.explanation import Explanation, Side

KNOWN = {hypothesis.name: hypothesis for hypothesis in catalogue()}
LOG = 3000  # tokens


def answer(tokens: int, *choices: tuple[str, float], left: float = 0.01) -> Explanation:
    """The sampler 0.4 nats off, with these causes, which leave so much; the trainer is the model."""
    world = tuple(Choice(KNOWN[name], value) for name, value in choices)
    sampler = Side("sampler", 0.4, left, 0.02, world, (), ())
    trainer = Side("trainer", 0.0, 0.0, 0.02, (), (), ())
    return Explanation("", "", sampler, trainer, (), (), 50, (), tokens, 9, 0, ())


def explained(monkeypatch: pytest.MonkeyPatch, answers: dict[int, Explanation], tokens: int) -> Explanation:
    """The answer where a sample of so many tokens says this; a larger one that is not listed fails."""

    def of_sample(_: Any, sample: Any, __: Any) -> Explanation:
        size = len(sample.sequence_T)
        return replace(answers[size], tokens=size)

    monkeypatch.setattr(explanation_module, "_of_sample", of_sample)
    bench: Any = SimpleNamespace(sample=lambda size: SimpleNamespace(sequence_T=np.zeros(min(size, LOG))))
    return explanation_module._explained(bench, [], tokens)


PENALTY = answer(0, ("repetition_penalty", 1.1))


def test_two_equal_answers_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    close = answer(0, ("repetition_penalty", 1.105))
    found = explained(monkeypatch, {250: PENALTY, 500: close}, 1000)
    assert (found.samples, found.stable, found.tokens) == ((250, 500), True, 500)


@pytest.mark.parametrize(
    "first",
    [
        answer(0, ("repetition_penalty", 1.2)),
        answer(0, ("temperature", 1.1)),
        answer(0, ("repetition_penalty", 1.1), ("top_k", 20.0)),
        answer(0, left=0.4),
    ],
    ids=["another number", "another hypothesis", "one more", "nothing"],
)
def test_another_answer_asks_for_more(monkeypatch: pytest.MonkeyPatch, first: Explanation) -> None:
    found = explained(monkeypatch, {250: first, 500: PENALTY, 1000: PENALTY}, 2000)
    assert (found.samples, found.stable) == ((250, 500, 1000), True)


def test_what_is_unexplained_goes_on_to_the_limit_or_the_end_of_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = answer(0, left=0.4)
    sizes = (250, 500, 1000, 2000)
    assert explained(monkeypatch, dict.fromkeys(sizes, nothing), 2000).samples == sizes
    all_of_it = (*sizes, LOG)
    assert explained(monkeypatch, dict.fromkeys(all_of_it, nothing), 9000).samples == all_of_it


def test_a_side_that_is_clean_by_little_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def near(before: float) -> Explanation:
        return replace(PENALTY, sampler=Side("sampler", before, before, 0.02, (), (), ()))

    sizes = (250, 500, 1000)
    assert explained(monkeypatch, dict.fromkeys(sizes, near(0.028)), 1000).samples == sizes
    assert explained(monkeypatch, dict.fromkeys(sizes, near(0.02)), 1000).samples == sizes[:2]


def test_a_limit_below_the_first_sample_is_one_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained(monkeypatch, {100: PENALTY}, 100)
    assert (found.samples, found.stable) == ((100,), False)
