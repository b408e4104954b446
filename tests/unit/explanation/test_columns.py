"""What columns say of themselves, and where in a response they are wrong."""

from typing import Any

import numpy as np
import pytest
from explanation_fixture import rows_of

from tailrl.diagnosis.tables import read_table
from tailrl.explanation.columns import inspect
from tailrl.explanation.inputs import Inputs
from tailrl.explanation.places import at_an_end
from tailrl.explanation.sequences import Response, Scored, read

LENGTH, END = 20, 7


def responses(
    sampler: list[np.ndarray], trainer: list[np.ndarray], ids: list[list[int]] | None = None
) -> list[Response]:
    prompts = [[1, 2, 3]] * len(sampler)
    own = ids or [list(range(10, 10 + LENGTH))] * len(sampler)
    return list(read(read_table(rows_of(prompts, own, sampler, trainer))).responses)


def noise(count: int, seed: int = 0) -> list[np.ndarray]:
    return list(-np.random.default_rng(seed).exponential(1.0, (count, LENGTH)))


def test_a_log_has_its_prompts() -> None:
    [one] = responses(noise(1), noise(1, 1))
    assert one.whole_T is not None and one.whole_T[:3].tolist() == [1, 2, 3] and one.whole_T[3] == 10
    assert one.place_T is not None and one.place_T.tolist() == list(range(3, 3 + LENGTH))


@pytest.mark.parametrize(
    ("columns", "whole"),
    [
        ({"token_ids": [5, 6, 8, 9]}, [5, 6, 8, 9]),
        ({"token_ids": [5, 6, 8, 9], "prompt": [5, 6]}, [5, 6, 8, 9]),
        ({"token_ids": [8, 9], "prompt": [5, 6]}, [5, 6, 8, 9]),
        ({"token_ids": [8, 9], "prompt": 17}, None),
        ({"token_ids": [8, 9], "prompt": "five six"}, None),
        ({"token_ids": [8, 9]}, None),
        ({"token_ids": [5, 6, 8, 7, 9, 4], "mask": [0, 0, 1, 0, 1, 0]}, [5, 6, 8, 7, 9]),
    ],
)
def test_ids_of_the_prompt_come_from_where_they_are(columns: dict[str, Any], whole: list[int] | None) -> None:
    length = len(columns.get("mask", (1, 1)))
    row = {"sampler_logprobs": [-1.0] * length, "trainer_logprobs": [-1.1] * length, **columns}
    [one] = read(read_table([row])).responses
    assert (one.whole_T if one.whole_T is None else one.whole_T.tolist()) == whole
    if whole is not None:
        assert one.whole_T is not None and one.place_T is not None
        assert one.whole_T[one.place_T].tolist() == [8, 9]


def test_padding_of_a_prompt_is_left_out() -> None:
    row = {
        "completion_ids": [8, 9],
        "sampling_per_token_logps": [-1.0, -1.0],
        "old_per_token_logps": [-1.1, -1.1],
        "completion_mask": [1, 1],
        "prompt_ids": [0, 0, 5, 6],
        "prompt_mask": [0, 0, 1, 1],
    }
    [one] = read(read_table([row])).responses
    assert one.whole_T is not None and one.whole_T.tolist() == [5, 6, 8, 9]


def test_a_copy_is_told() -> None:
    _, found = inspect(responses(noise(6), noise(6)), [END])
    assert [one.name for one in found] == ["copy"]


@pytest.mark.parametrize("fill", [0.0, -100.0])
def test_filled_responses_are_told_and_left_out(fill: float) -> None:
    sampler = noise(6)
    sampler[2] = np.full(LENGTH, fill)
    kept, found = inspect(responses(sampler, noise(6, 1)), [END])
    assert [(one.name, one.side) for one in found] == [("filled", "sampler")] and len(kept) == 5
    assert found[0].share == pytest.approx(1 / 6)


def test_zeros_of_truncation_are_no_fill() -> None:
    trainer = noise(6, 1)
    # A token whose rivals are all cut off has a log-prob of 0; in one response every token is such a one.
    sampler = [np.where(np.arange(LENGTH) % 2 == 0, 0.0, column_T) for column_T in trainer]
    sampler[2] = np.zeros(LENGTH)
    kept, found = inspect(responses(sampler, trainer), [END])
    assert not found and len(kept) == 6


@pytest.mark.parametrize("fill", [0.0, -100.0])
def test_padding_after_the_end_is_told_and_cut(fill: float) -> None:
    sampler, trainer = noise(4), noise(4, 1)
    ids = [list(range(10, 10 + LENGTH)) for _ in range(4)]
    sampler[1][12:], trainer[1][12:], ids[1][11], ids[1][12:] = fill, fill, END, [0] * 8
    kept, found = inspect(responses(sampler, trainer, ids), [END])
    assert [one.name for one in found] == ["padding"] and not found[0].is_fault
    assert [len(one.sampler_T) for one in kept] == [20, 12, 20, 20]


def scored(far: list[np.ndarray], lengths: list[int]) -> list[Scored]:
    found = []
    for far_T, length in zip(far, lengths, strict=True):
        [row] = responses([far_T], [np.zeros(LENGTH)])[:1]
        own = Response(0, row.sampler_T[:length], row.trainer_T[:length], None, None, None, None, None, np.nan)
        place_T = np.arange(length)
        found.append(Scored(own, Inputs((), place_T, 0), place_T, own.sampler_T, own.trainer_T))
    return found


def test_the_last_tokens_of_the_longest_responses_are_found() -> None:
    lengths = [20, 20, 20, 11, 13, 20]
    far = [np.full(length, 0.01) for length in lengths]
    for far_T, length in zip(far, lengths, strict=True):
        far_T[-3:] = 4.0 if length == 20 else 0.01
    chosen = scored([np.resize(far_T, LENGTH) for far_T in far], lengths)
    finding = at_an_end("sampler", chosen, np.concatenate(far), 0.03)
    assert finding is not None and finding.name == "last_tokens"
    assert "last 3 tokens, of responses with 20 tokens" in finding.words
    assert at_an_end("sampler", chosen, np.concatenate([np.full(length, 0.01) for length in lengths]), 0.03) is None
    assert at_an_end("sampler", chosen, np.concatenate([np.full(length, 4.0) for length in lengths]), 0.03) is None


def test_few_responses_have_no_place() -> None:
    """One of eleven clean samples of a single response has a far last token by chance."""
    far = [np.r_[np.full(17, 0.01), np.full(3, 4.0)]] * 6
    assert at_an_end("sampler", scored(far, [20] * 6), np.concatenate(far), 0.03) is not None
    assert at_an_end("sampler", scored(far[:5], [20] * 5), np.concatenate(far[:5]), 0.03) is None
