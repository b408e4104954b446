"""Faults planted by transformers' own options are named, with their numbers; clean logs get no cause."""

from pathlib import Path
from typing import Any

import pytest
import torch
from explanation_fixture import load, make_policy, prompts_of, rescored, rows_of, sampled
from transformers import AutoTokenizer

from tailrl.explanation.explanation import Explanation, explain

COUNT, TOKENS = 12, 24
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[list[int]]:
    return prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), COUNT)


def explained(
    folder: Path, prompts: list[list[int]], read: list[list[int]] | None = None, **options: Any
) -> Explanation:
    """The explanation of a log whose sampler had these options, or read other prompts."""
    model = load(folder)
    responses, sampler = sampled(model, read or prompts, TOKENS, **options)
    return explain(rows_of(prompts, responses, sampler, rescored(model, prompts, responses)), folder, tokens=200)


def causes(explanation: Explanation) -> dict[str, Any]:
    return {choice.hypothesis.name: choice.value for choice in explanation.own("sampler")}


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"repetition_penalty": 1.13}, "repetition_penalty", 1.13),
        pytest.param({"temperature": 0.8}, "temperature", 0.8, marks=slow),
        pytest.param({"temperature": 1.3}, "temperature", 1.3, marks=slow),
        pytest.param({"top_k": 17}, "top_k", 17, marks=slow),
        pytest.param({"top_p": 0.87}, "top_p", 0.87, marks=slow),
        pytest.param({"min_p": 0.07}, "min_p", 0.07, marks=slow),
    ],
)
def test_a_setting_of_the_sampler_is_named_with_its_number(
    folder: Path, prompts: list[list[int]], options: dict[str, float], name: str, value: float
) -> None:
    explanation = explained(folder, prompts, **options)
    assert causes(explanation) == {name: pytest.approx(value, rel=0.1)}
    assert explanation.code == 1 and not explanation.own("trainer")
    assert explanation.sampler.after < 0.02 * explanation.sampler.before


@slow
def test_several_settings_are_found_together(folder: Path, prompts: list[list[int]]) -> None:
    found = causes(explained(folder, prompts, temperature=0.7, top_k=25, repetition_penalty=1.15))
    assert found == {
        "temperature": pytest.approx(0.7, rel=0.1),
        "top_k": pytest.approx(25, rel=0.1),
        "repetition_penalty": pytest.approx(1.15, rel=0.1),
    }


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda ids: [ids[0], *ids], "begin_doubled"),
        pytest.param(lambda ids: ids[1:], "begin_missing", marks=slow),
        pytest.param(lambda ids: ids[:-1], "prompt_ends_earlier", marks=slow),
        pytest.param(lambda ids: ids[-8:], "prompt_begins_later", marks=slow),
    ],
)
def test_other_ids_of_the_prompt_are_named(folder: Path, prompts: list[list[int]], change: Any, name: str) -> None:
    assert list(causes(explained(folder, prompts, read=[change(ids) for ids in prompts]))) == [name]


@pytest.mark.parametrize("side", [pytest.param("sampler", marks=slow), "trainer"])
def test_the_referee_says_whose_fault_it_is(folder: Path, prompts: list[list[int]], side: str) -> None:
    model = load(folder)
    responses, cooled = sampled(model, prompts, TOKENS, temperature=0.6)
    right = rescored(model, prompts, responses)
    columns = {"sampler": (cooled, right), "trainer": (right, cooled)}[side]
    explanation = explain(rows_of(prompts, responses, *columns), folder, tokens=200)
    assert [bool(explanation.own(one)) for one in ("sampler", "trainer")] == [side == "sampler", side == "trainer"]


@pytest.mark.parametrize(
    ("dtype", "seed"),
    [
        (torch.bfloat16, 0),
        *(pytest.param(dtype, seed, marks=slow) for dtype in (torch.bfloat16, torch.float32) for seed in (1, 2, 3)),
    ],
)
def test_rounding_has_no_cause(folder: Path, prompts: list[list[int]], dtype: torch.dtype, seed: int) -> None:
    responses, sampler = sampled(load(folder, dtype), prompts, TOKENS, seed=seed)
    trainer = rescored(load(folder), prompts, responses)
    explanation = explain(rows_of(prompts, responses, sampler, trainer), folder, tokens=200)
    assert explanation.code == 0 and not explanation.faults


@slow
def test_one_temperature_of_both_sides_is_a_setting_of_the_run(folder: Path, prompts: list[list[int]]) -> None:
    model = load(folder)
    responses, cooled = sampled(model, prompts, TOKENS, temperature=0.6)
    explanation = explain(rows_of(prompts, responses, cooled, cooled_again(cooled)), folder, tokens=200)
    assert explanation.code == 0 and [one.hypothesis.name for one in explanation.shared] == ["temperature"]


def cooled_again(columns: list[Any]) -> list[Any]:
    """The same numbers but for their last digits, so that no column is a copy."""
    return [column_T + 1e-7 for column_T in columns]


@slow
def test_older_weights_are_found_among_other_folders(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    older = load(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in older.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    older.save_pretrained(tmp_path / "older")
    responses, sampler = sampled(older, prompts, TOKENS)
    rows = rows_of(prompts, responses, sampler, rescored(load(folder), prompts, responses))
    unexplained = explain(rows, folder, tokens=200)
    assert unexplained.code == 2 and unexplained.faults == ("sampler",)
    assert causes(explain(rows, folder, others=[tmp_path / "older"], tokens=200)) == {"other_weights": 0.0}
