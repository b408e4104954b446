"""Faults planted by transformers' own options are named, with their numbers; clean logs get no cause."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from explanation_fixture import load, make_policy, prompts_of, rescored, rows_of, sampled
from safetensors.torch import save_file
from transformers import AutoTokenizer
from typer import Exit

from tailrl.cli import commands
from tailrl.diagnosis.tables import read_table
from tailrl.explanation import prompts as prompts_module
from tailrl.explanation.catalogue import Entry, Hypothesis, catalogue
from tailrl.explanation.explanation import Explanation, explain
from tailrl.explanation.page import verdict
from tailrl.explanation.prompts import match
from tailrl.explanation.scorer import Scorer
from tailrl.explanation.sequences import read
from tailrl.runtime.errors import StudyError

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
def test_a_bias_on_a_token_is_named_with_its_number(folder: Path, prompts: list[list[int]]) -> None:
    responses, _ = sampled(load(folder), prompts, TOKENS)
    [(token, _)] = Counter(token for response in responses for token in response).most_common(1)
    found = causes(explained(folder, prompts, sequence_bias={(token,): 3.5}))
    assert found == {f"logit_bias_{token}": pytest.approx(3.5, rel=0.1)}


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


@pytest.mark.slow
def test_the_prompt_of_another_request_is_named_however_far_away(folder: Path, prompts: list[list[int]]) -> None:
    explanation = explained(folder, prompts, [*prompts[5:], *prompts[:5]])
    assert causes(explanation) == {"prompt_of_other": 0.0} and explanation.sampler.after < 1e-4
    assert "with the prompt of another request" in verdict(explanation)[0]


@pytest.mark.slow
@pytest.mark.parametrize("side", ["sampler", "trainer"])
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


HALVED = Hypothesis(
    "halved",
    Entry(kind="logits", values=(0.5,), words="logits times {value}", look="the head"),
    lambda rows, value: rows.with_values(rows.value_TE * value),
)


@slow
def test_a_hypothesis_of_a_user_is_tried(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside it there is the temperature 2, which is the same: either may be named."""
    model = load(folder)
    responses, sampler = sampled(model, prompts, TOKENS, temperature=2.0)
    rows = rows_of(prompts, responses, sampler, rescored(model, prompts, responses))
    plain = explain(rows, folder, tokens=200)
    monkeypatch.setitem(sys.modules, "my_causes", SimpleNamespace(halved=HALVED))  # type: ignore[misc]
    found = explain(rows, folder, hypotheses=["my_causes:halved"], tokens=200)
    assert found.tried == plain.tried + 1
    assert {*causes(found)} <= {"halved", "temperature"} and causes(found)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("my_causes", "write it as package.module:name"),
        ("no_such_module:x", "cannot be imported"),
        ("json:dumps", "is no tailrl.explanation.catalogue.Hypothesis"),
    ],
)
def test_what_is_no_hypothesis_is_refused(folder: Path, path: str, words: str) -> None:
    with pytest.raises(StudyError, match=words):
        explain([], folder, hypotheses=[path])


def test_a_log_without_prompts_is_refused(folder: Path) -> None:
    rows = [{"token_ids": [8, 9], "sampler_logprobs": [-1.0, -1.0], "trainer_logprobs": [-1.1, -1.2]}]
    with pytest.raises(StudyError, match="has no prompts"):
        explain(rows, folder)


@slow
def test_prompts_are_found_in_a_set_by_the_numbers(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    model = load(folder)
    responses, sampler = sampled(model, prompts, TOKENS, repetition_penalty=1.2)
    rows = rows_of(prompts, responses, sampler, rescored(model, prompts, responses))
    alone = [{**row, "token_ids": ids} for row, ids in zip(rows, responses, strict=True)]
    file = tmp_path / "prompts.jsonl"
    others = [[*prompt, 30 + number] for number, prompt in enumerate(prompts[:5])]
    mixed = [json.dumps({"prompt_ids": ids}) + "\n" for ids in [*prompts[::-1], *others]]
    file.write_text("".join(mixed), encoding="utf-8")
    found = explain(alone, folder, prompts=file, tokens=200)
    assert found.trainer.before < 1e-4 and causes(found) == {"repetition_penalty": pytest.approx(1.2, rel=0.1)}


@pytest.mark.parametrize("rows", [0, COUNT])
def test_prompts_are_found_for_log_probs_without_their_sign(folder: Path, prompts: list[list[int]], rows: int) -> None:
    """Also among a set that has as many prompts as the log has rows, in another order."""
    responses, sampler = sampled(load(folder), prompts, TOKENS)
    negated = [-column_T for column_T in sampler]
    logged = rows_of(prompts, responses, negated, negated)
    alone = [{**row, "token_ids": ids} for row, ids in zip(logged, responses, strict=True)]
    candidates = [tuple(prompt) for prompt in prompts[::-1]]
    found, _ = match(Scorer(str(folder)), read(read_table(alone)).responses, candidates, rows=rows, seen=int)
    matched = [joined.whole_T for joined in found]
    assert [list(whole_T)[: len(ids)] for whole_T, ids in zip(matched, prompts, strict=True)] == prompts


@pytest.mark.parametrize(("decimals", "most"), [(6, 2 * COUNT), (1, COUNT * COUNT)])
def test_a_prompt_after_which_a_column_is_the_models_own_ends_the_search(
    folder: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch, decimals: int, most: int
) -> None:
    """With rounded columns all prompts are read, and the same ones are found."""
    read_after = prompts_module.logprobs_after
    asked: list[int] = []

    def counting(scorer: Scorer, prompt: Sequence[int], responses: Sequence[Sequence[int]]) -> list[Any]:
        asked.extend(len(ids) for ids in responses)
        return read_after(scorer, prompt, responses)

    monkeypatch.setattr(prompts_module, "logprobs_after", counting)
    responses, _ = sampled(load(folder), prompts, TOKENS)
    right = [column_T.round(decimals) for column_T in rescored(load(folder), prompts, responses)]
    logged = rows_of(prompts, responses, [2 * column_T for column_T in right], right)
    alone = [{**row, "token_ids": ids} for row, ids in zip(logged, responses, strict=True)]
    candidates = [tuple(prompt) for prompt in prompts[::-1]]
    found, _ = match(Scorer(str(folder)), read(read_table(alone)).responses, candidates, rows=0, seen=int)
    assert [one.whole_T.tolist()[: len(ids)] for one, ids in zip(found, prompts, strict=True)] == prompts
    whole = sum(length > 1 for length in asked)
    assert COUNT <= whole <= most and (whole == COUNT * COUNT) == (decimals == 1)


@slow
def test_an_adapter_that_a_side_ignores_is_named(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    merged, parts = load(folder), {}
    with torch.no_grad():
        for name, weight in merged.named_parameters():
            if name.endswith("down_proj.weight"):
                stem = f"base_model.model.{name.removesuffix('.weight')}"
                low_RI = torch.randn(4, weight.shape[1], generator=generator)
                high_OR = 0.05 * torch.randn(weight.shape[0], 4, generator=generator)
                parts |= {f"{stem}.lora_A.weight": low_RI, f"{stem}.lora_B.weight": high_OR}
                weight += 2 * high_OR @ low_RI
    merged.save_pretrained(tmp_path / "merged")
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(tmp_path / "merged")
    (tmp_path / "adapter").mkdir()
    save_file(parts, tmp_path / "adapter" / "adapter_model.safetensors")
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8}', encoding="utf-8")
    responses, sampler = sampled(load(folder), prompts, TOKENS)
    rows = rows_of(prompts, responses, sampler, rescored(load(tmp_path / "merged"), prompts, responses))
    found = explain(rows, tmp_path / "merged", adapters=[tmp_path / "adapter"], tokens=200)
    assert causes(found) == {"adapter": pytest.approx(-1.0, rel=0.1)}


def test_the_command_gives_data_and_an_exit_code(
    folder: Path, prompts: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Both sides are the model's but for a sign: nothing is searched for long."""
    model = load(folder)
    responses, right = sampled(model, prompts, TOKENS)
    wrong = [np.where(np.arange(TOKENS) < 2, column_T - 3.0, column_T) for column_T in right]
    log = tmp_path / "log.jsonl"
    rows = rows_of(prompts, responses, wrong, rescored(model, prompts, responses))
    log.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    with pytest.raises(Exit) as ended:
        commands.explain([str(log)], str(folder), tokens_scored=150, json_file="-")
    data = json.loads(capsys.readouterr().out)
    assert ended.value.exit_code == data["code"] == 1
    assert [one["name"] for one in data["findings"]] == ["first_tokens"] and "first 2 tokens" in data["verdict"][0]
    assert data["sides"]["trainer"]["clean"] and data["rows"] == COUNT


@pytest.mark.slow
def test_weights_that_never_arrive_are_told_by_the_steps(folder: Path, prompts: list[list[int]]) -> None:
    model, rows = load(folder), []
    moved = load(folder)
    for step in range(4):
        responses, sampler = sampled(model, prompts[:4], TOKENS, seed=step)
        trainer = rescored(moved, prompts[:4], responses)
        rows += rows_of(prompts[:4], responses, sampler, trainer, lambda row, step=step: {**row, "step": step})
        with torch.no_grad():
            for parameter in moved.parameters():
                parameter.mul_(1.01)
    found = explain(rows, folder, tokens=300)
    assert found.pinned_side == "sampler" and found.code == 1 and "updates never reach it" in verdict(found)[0]


def test_each_hypothesis_has_its_words_and_its_place() -> None:
    for hypothesis in catalogue():
        assert (hypothesis.entry.look and "{value}" in hypothesis.entry.words) or len(hypothesis.entry.values) == 1


@pytest.mark.slow
def test_a_log_of_another_model_gets_no_cause(folder: Path, prompts: list[list[int]], tmp_path: Path) -> None:
    """The log-probs of the most probable tokens come near to any model's: they take half of a large difference away."""
    model = load(folder)
    responses, sampler = sampled(model, prompts, TOKENS)
    rows = rows_of(prompts, responses, sampler, rescored(model, prompts, responses))
    torch.manual_seed(5)
    for weight in model.parameters():
        weight.data += 0.5 * weight.data.std() * torch.randn_like(weight)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    found = explain(rows, tmp_path, tokens=200)
    assert found.code == 2 and not found.own("sampler") and not found.own("trainer")
    assert verdict(found)[0].startswith("Neither column is this model's")


def test_one_response_many_times_is_one(folder: Path, prompts: list[list[int]]) -> None:
    model = load(folder)
    responses, sampler = sampled(model, prompts[:1], TOKENS)
    rows = rows_of(prompts[:1], responses, sampler, rescored(model, prompts[:1], responses))
    assert explain(rows * 30, folder, tokens=200).responses == 1
