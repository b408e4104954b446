"""Dropout that a side leaves on is named by its size; other faults of a model with dropout are not called so."""

from pathlib import Path

import pytest
import torch
from explanation_fixture import load, make_policy, prompts_of, rescored, rows_of, sampled, with_config
from transformers import AutoTokenizer

from tailrl.explanation.explanation import explain
from tailrl.explanation.page import verdict

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy whose attention has a dropout of 0.1."""
    plain = make_policy(tmp_path_factory.mktemp("policy"))
    return with_config(plain, tmp_path_factory.mktemp("dropping") / "policy", attention_dropout=0.1)


@slow
@pytest.mark.parametrize("side", ["sampler", "trainer"])
def test_a_side_in_train_mode_is_named(folder: Path, side: str) -> None:
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), 8)
    responses, right = sampled(load(folder), prompts)
    torch.manual_seed(7)
    noisy = rescored(load(folder).train(), prompts, responses)
    columns = {"sampler": (noisy, right), "trainer": (right, noisy)}[side]
    found = explain(rows_of(prompts, responses, *columns), folder, tokens=150)
    assert [(one.name, one.side) for one in found.findings] == [("train_mode", side)] and found.code == 1
    assert "model.eval()" in verdict(found)[0] and not found.faults


@slow
def test_other_weights_of_a_model_with_dropout_are_no_train_mode(folder: Path) -> None:
    """A difference that no hypothesis reproduces stays one."""
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), 8)
    other = load(folder)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    responses, planted = sampled(other, prompts)
    found = explain(
        rows_of(prompts, responses, planted, rescored(load(folder), prompts, responses)), folder, tokens=150
    )
    assert found.code == 2 and not found.findings


def test_a_model_without_dropout_says_so(tmp_path: Path) -> None:
    folder = make_policy(tmp_path)
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), 6)
    responses, right = sampled(load(folder), prompts, 8)
    close = [column_T + 1e-7 for column_T in right]
    assert ("train_mode", "the model has no dropout") in explain(
        rows_of(prompts, responses, right, close), folder
    ).untried
