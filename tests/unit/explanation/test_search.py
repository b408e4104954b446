"""Numbers that make up for one another are fitted together; a coarse format is found by what a column follows."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tailrl.artifacts.metrics import FloatArray
from tailrl.explanation.catalogue import Choice, catalogue
from tailrl.explanation.rows import Rows
from tailrl.explanation.search import (
    AS_IT_IS,
    BLOCK,
    Court,
    Laboratory,
    World,
    followed_format,
    ordered,
    refitted,
    search,
)

KNOWN = {hypothesis.name: hypothesis for hypothesis in catalogue()}
TOKENS, RESPONSES = 2560, 20
SCALE = 0.01  # nats
RANDOM = np.random.default_rng(4)
NOISE_T = RANDOM.normal(size=TOKENS)
FIRST_T, SECOND_T = RANDOM.normal(size=(2, TOKENS))


def court_of(column_T: FloatArray, predicted: Callable[[World], FloatArray | None], rounding: float = SCALE) -> Court:
    """A court over a laboratory whose predictions are a function of the world."""
    laboratory: Any = SimpleNamespace(
        column=lambda _: column_T,
        sequence_T=np.repeat(np.arange(RESPONSES), TOKENS // RESPONSES),
        predicted=predicted,
        rounding=lambda _: rounding,
        pinned=set(),
    )
    return Court(laboratory, "sampler", np.full(TOKENS, SCALE))


def numbers(world: World) -> dict[str, Any]:
    return {choice.hypothesis.name: choice.value for choice in world}


def settings(**values: float) -> World:
    return ordered(Choice(KNOWN[name], value) for name, value in values.items())


def valley(world: World) -> FloatArray:
    """Two numbers that nearly make up for one another: their effects differ in a tenth of their size."""
    named = {"temperature": 1.0, "top_k": 0.0} | numbers(world)
    shared = 3 * (np.log(named["temperature"]) + 0.1 * named["top_k"])
    own = 0.3 * named["top_k"]
    moved_T: FloatArray = shared * FIRST_T + own * SECOND_T
    return moved_T


@pytest.mark.parametrize("truth", [{"temperature": 0.78, "top_k": 5.0}, {"temperature": 0.61, "top_k": 10.0}])
def test_numbers_that_make_up_for_one_another_are_fitted_together(truth: dict[str, float]) -> None:
    court = court_of(valley(settings(**truth)), valley)
    found = numbers(refitted(court, settings(temperature=0.7, top_k=8.0)))
    assert found == {"temperature": pytest.approx(truth["temperature"], rel=0.01), "top_k": truth["top_k"]}


def test_the_best_number_may_lie_beyond_a_catalogues_number_nearby() -> None:
    """0.846 was the best beside another number; 0.85 is in the catalogue, and the truth is 0.9."""

    def predicted(world: World) -> FloatArray:
        temperature_T: FloatArray = numbers(world).get("temperature", 1.0) * FIRST_T
        return temperature_T

    court = court_of(0.9 * FIRST_T, predicted)
    assert court.fitted((), Choice(KNOWN["temperature"], 0.846), 28).value == pytest.approx(0.9, rel=0.002)


def weak_second(world: World) -> FloatArray:
    """A strong setting, and one that moves log-probs by a thirtieth of rounding."""
    named = {"temperature": 1.0, "top_k": np.inf} | numbers(world)
    moved_T: FloatArray = np.log(named["temperature"]) * FIRST_T + 1e-3 / named["top_k"] * SECOND_T
    return moved_T


def test_a_setting_that_moves_less_than_rounding_is_named_where_a_column_is_exact() -> None:
    court = court_of(weak_second(settings(temperature=0.61, top_k=10)), weak_second, 0.003)
    found = search(court, [KNOWN["temperature"], KNOWN["top_k"]])
    assert numbers(found.world) == {"temperature": pytest.approx(0.61, rel=1e-3), "top_k": 10.0}


def alike(world: World) -> FloatArray:
    """Min-p makes nearly the change of top-k 20, and comes before it in the catalogue."""
    named = {"temperature": 1.0} | numbers(world)
    moved_T: FloatArray = np.log(named["temperature"]) * FIRST_T
    if "min_p" in named:
        moved_T = moved_T + 3.0 * SECOND_T + 0.03 * NOISE_T
    if "top_k" in named:
        moved_T = moved_T + (60.0 / named["top_k"]) * SECOND_T
    return moved_T


def test_a_setting_that_took_the_place_of_one_like_it_is_exchanged() -> None:
    court = court_of(alike(settings(temperature=0.7, top_k=20.0)), alike)
    found = search(court, [KNOWN[name] for name in ("temperature", "min_p", "top_k")])
    assert numbers(found.world) == {"temperature": pytest.approx(0.7, rel=0.01), "top_k": 20.0}


def format_court(part: float, noise: float) -> Court:
    """A column with a part of what int8 predicts, a part of what bfloat16 predicts, and noise; in units of rounding."""

    def predicted(world: World) -> FloatArray:
        named = numbers(world)
        if "int8" in named:
            moved_T: FloatArray = SCALE * (0.8 * FIRST_T + SECOND_T)  # its weights are rounded to bfloat16 too
            return moved_T
        rounded_T: FloatArray = SCALE * SECOND_T if {"bfloat16", "weights_bfloat16"} & named.keys() else 0 * SECOND_T
        return rounded_T

    return court_of(SCALE * (part * 0.8 * FIRST_T + 1.5 * SECOND_T + noise * NOISE_T), predicted)


FORMATS = [KNOWN[name] for name in ("int8", "bfloat16", "weights_bfloat16")]


def test_a_format_whose_own_noise_hides_it_is_found_by_what_the_column_follows() -> None:
    court = format_court(0.9, noise=2.0)
    assert numbers(followed_format(court, court, AS_IT_IS, FORMATS)).keys() == {"int8"}


@pytest.mark.parametrize(
    ("part", "noise"), [(0.0, 2.0), (0.2, 0.3), (0.9, 6.0)], ids=["rounding and noise", "a small part", "much else"]
)
def test_a_column_that_does_not_follow_a_format_gets_none(part: float, noise: float) -> None:
    court = format_court(part, noise)
    assert not followed_format(court, court, AS_IT_IS, FORMATS)


def test_a_world_that_fails_on_one_response_is_not_computed_for_the_others() -> None:
    """Each forward of the screen's other responses would be for nothing."""
    computed: list[tuple[int, World]] = []

    def laboratory(responses: int) -> Any:
        tokens = slice(0, responses * (TOKENS // RESPONSES))

        def predicted(world: World) -> FloatArray:
            computed.append((responses, world))
            column_T: FloatArray = numbers(world).get("rope_base", 1.0) * FIRST_T[tokens]
            return column_T

        return SimpleNamespace(
            chosen=[None] * responses,
            column=lambda _: 2.0 * FIRST_T[tokens],
            sequence_T=np.repeat(np.arange(responses), TOKENS // RESPONSES),
            predicted=predicted,
            part=lambda chosen: laboratory(len(chosen)),
        )

    def court(responses: int, screen: Court | None = None) -> Court:
        return Court(laboratory(responses), "sampler", np.full(responses * (TOKENS // RESPONSES), SCALE), screen)

    worse, right = settings(rope_base=0.1), settings(rope_base=2.0)
    assert court(4, court(2)).hopeful([worse, right], AS_IT_IS) == [right]
    assert (1, worse) in computed and (2, worse) not in computed
    assert (2, right) in computed


def test_predictions_of_many_worlds_lie_in_a_few_arrays() -> None:
    """One array each, between large ones that are freed, made a search of a tiny model take 4 GB."""
    tokens, entries = 40, 30
    rows = Rows(
        value_TE=torch.randn(tokens, entries, generator=torch.Generator().manual_seed(0)),
        weight_TE=torch.zeros(tokens, entries),
        id_TE=torch.arange(entries).expand(tokens, -1),
        before_TE=torch.zeros(tokens, entries, dtype=torch.bool),
        count_TE=torch.zeros(tokens, entries),
        target_T=torch.zeros(tokens, dtype=torch.int64),
    )
    scorer: Any = SimpleNamespace(rows=lambda *_: rows)
    chosen: Any = [SimpleNamespace(position_T=np.arange(tokens), inputs=None)]
    laboratory = Laboratory(scorer, chosen)
    temperatures = np.linspace(0.5, 2.0, 2 * BLOCK + 1)
    found = [laboratory.predicted(settings(temperature=float(value))) for value in temperatures]
    assert len({id(predicted_T.base) for predicted_T in found if predicted_T is not None}) == 3
    for value, predicted_T in zip(temperatures, found, strict=True):
        expected_T = torch.log_softmax(rows.value_TE.double() / value, -1)[:, 0]
        np.testing.assert_allclose(predicted_T, expected_T, atol=1e-6)
