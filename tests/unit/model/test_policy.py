"""Policies: made, written, read back, and refused in one sentence."""

import json
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tailrl.config.policy import ScratchPolicy
from tailrl.model.forward import head_weight
from tailrl.model.policy import (
    create_policy,
    encode_prompt,
    load_config,
    load_policy,
    load_tokenizer,
    local_folder,
    named_weights,
    required_length,
    save_policy,
)
from tailrl.runtime.errors import StudyError
from tailrl.tasks.problem import Problem

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy that a test may damage."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


def test_a_new_policy_is_deterministic_under_its_seed(tokenizer: PreTrainedTokenizerFast) -> None:
    settings = ScratchPolicy(vocabulary_size=600, hidden_size=32, heads=1, layers=1)
    first, again, other = (create_policy(settings, tokenizer, seed) for seed in (1, 1, 2))
    weights = dict(again.named_parameters())
    assert all(torch.equal(parameter, weights[name]) for name, parameter in first.named_parameters())
    assert not torch.equal(head_weight(first), head_weight(other))
    assert first.config.vocab_size == len(tokenizer) == 600
    assert first.config.eos_token_id == tokenizer.eos_token_id
    assert {p.dtype for p in first.parameters()} == {torch.float32}


def test_save_and_load(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    save_policy(model, tokenizer, tmp_path / "new")
    loaded, loaded_tokenizer = load_policy(tmp_path / "new"), load_tokenizer(tmp_path / "new")
    before, after = dict(named_weights(model)), dict(named_weights(loaded))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert loaded.config.max_position_embeddings == model.config.max_position_embeddings
    assert head_weight(loaded) is loaded.get_input_embeddings().weight
    text = "17+15-12=\n17+15=32,\\boxed{20}"
    assert loaded_tokenizer.encode(text) == tokenizer.encode(text)
    assert loaded_tokenizer.eos_token_id == tokenizer.eos_token_id


def test_weights_are_read_as_float32(folder: Path) -> None:
    halves = {name: weight.to(torch.bfloat16) for name, weight in load_file(folder / WEIGHTS).items()}
    save_file(halves, folder / WEIGHTS, {"format": "pt"})
    assert {p.dtype for p in load_policy(folder).parameters()} == {torch.float32}


def test_weights_stay_in_the_file_that_they_are_mapped_from(folder: Path) -> None:
    """Ranks of one machine then share its pages: the plan counts them once (`planning.plan.host_bytes`)."""
    model = load_policy(folder)
    ranges = [
        tuple(int(end, 16) for end in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
        if line.endswith(".safetensors") and str(folder) in line
    ]
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    assert ranges and all(any(start <= address < end for start, end in ranges) for address in addresses)


def test_named_weights_hold_the_tied_head_and_no_gradients(model: PreTrainedModel) -> None:
    weights = dict(named_weights(model))
    assert {"lm_head.weight", "model.embed_tokens.weight"} < weights.keys()
    assert torch.equal(weights["lm_head.weight"], model.get_input_embeddings().weight)
    assert not any(weight.requires_grad for weight in weights.values())
    parameters = {name for name, _ in model.named_parameters()}
    assert parameters <= weights.keys()


# --- what cannot be read -----------------------------------------------------------------------------


def remove_folder(folder: Path) -> None:
    shutil.rmtree(folder)


def truncate_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:5000])


def empty_weights(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"")


def remove_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def remove_tensor(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def resize_tensor(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.norm.weight"] = torch.ones(3)
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def break_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", encoding="utf-8")


def unknown_architecture(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "abacus"}), encoding="utf-8")


@pytest.mark.parametrize(
    "damage",
    [
        remove_folder,
        truncate_weights,
        empty_weights,
        remove_weights,
        remove_tensor,
        resize_tensor,
        break_config,
        unknown_architecture,
    ],
)
def test_an_unreadable_policy_is_one_sentence(folder: Path, damage: Callable[[Path], None]) -> None:
    damage(folder)
    with pytest.raises(StudyError) as caught:
        load_policy(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(
    ("settings", "unread", "read"),
    [
        ({"do_sample": False, "temperature": 0.9, "top_p": 0.6}, ["temperature", "top_p"], {}),
        ({"temperature": 0.4, "repetition_penalty": 1.1}, ["temperature"], {"repetition_penalty": 1.1}),
        ({"num_beams": 1, "early_stopping": True}, ["early_stopping"], {}),
    ],
)
def test_a_policy_is_written_without_what_transformers_refuses_to_save(
    folder: Path,
    file: str,
    settings: dict[str, object],
    unread: list[str],
    read: dict[str, object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Such files are on the hub; what greedy decoding reads stays, and the end tokens do."""
    (folder / "generation_config.json").unlink(missing_ok=True)
    given = json.loads((folder / file).read_text()) if file == "config.json" else {"eos_token_id": [1, 7]}
    (folder / file).write_text(json.dumps({**given, **settings}))
    model = load_policy(folder)
    said = capsys.readouterr().err
    assert f"tailrl: {folder / file}: greedy decoding does not read {', '.join(unread)}, and" in said
    save_policy(model, load_tokenizer(folder), folder / "written")
    written = json.loads((folder / "written" / "generation_config.json").read_text())
    assert written["eos_token_id"] == given["eos_token_id"] and not set(unread) & written.keys()
    assert {key: written[key] for key in read} == read
    load_policy(folder / "written")
    assert "generation" not in capsys.readouterr().err


def test_a_missing_weight_is_named(folder: Path) -> None:
    remove_tensor(folder)
    with pytest.raises(StudyError, match=r"model\.safetensors lacks model\.layers\.1\.mlp\.up_proj\.weight$"):
        load_policy(folder)


def test_a_missing_tokenizer_is_one_sentence(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()
    with pytest.raises(StudyError, match="no tokenizer could be read") as caught:
        load_tokenizer(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", ["", "{", '{"version": 3}'])
def test_a_broken_tokenizer_is_one_sentence(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with pytest.raises(StudyError, match="no tokenizer could be read"):
        load_tokenizer(folder)


@pytest.mark.parametrize("read", [load_policy, load_tokenizer, load_config])
@pytest.mark.parametrize("path", ["x" * 300, "a/" * 2500, "a\0b"])
def test_a_path_that_the_system_refuses_is_one_sentence(
    read: Callable[[str], object], path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(StudyError, match="the Hugging Face hub and its cache do not give it"):
        read(path)


def test_a_tokenizer_without_an_end_is_refused(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>").save_pretrained(tmp_path)
    with pytest.raises(StudyError, match="no end token"):
        load_tokenizer(tmp_path)


# --- prompts -----------------------------------------------------------------------------------------


def test_a_prompt_is_encoded_plainly_or_through_the_chat_template(tokenizer: PreTrainedTokenizerFast) -> None:
    assert encode_prompt(tokenizer, "1+2=\n") == tokenizer.encode("1+2=\n")
    chat = deepcopy(tokenizer)
    chat.chat_template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}"
    )
    found = encode_prompt(chat, "1+2=\n")
    assert found == tokenizer.encode("<user>1+2=\n<end><assistant>", add_special_tokens=False)
    assert tokenizer.eos_token_id in found


def test_required_length() -> None:
    problems = [Problem(name, "", "0") for name in ("short", "long", "middle")]
    prompts = [[1] * 3, [1] * 24, [1] * 10]
    assert required_length(problems, prompts, 40, 64, "evaluation.max_new_tokens") == 64
    with pytest.raises(StudyError) as raised:
        required_length(problems, prompts, 41, 64, "evaluation.max_new_tokens")
    sentence = "24 prompt tokens and evaluation.max_new_tokens = 41 exceed the 64 that the policy supports"
    assert str(raised.value) == f"problem 'long': {sentence}"


def test_the_folder_of_a_model_from_the_hub_is_that_of_the_cache(
    policy_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of generation_config.json, which an engine reads too."""
    model = tmp_path / "models--some--model"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text("abc", encoding="utf-8")
    shutil.copytree(policy_folder, model / "snapshots" / "abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert load_tokenizer("some/model").eos_token_id is not None
    assert local_folder("some/model") == model / "snapshots" / "abc"
    assert local_folder(policy_folder) == policy_folder


def test_a_hub_out_of_reach_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its libraries would ask six times for each file, a minute and a half for a name that is misspelt."""
    asked = []

    class Session:
        def head(self, url: str, timeout: float) -> None:
            asked.append((url, timeout))
            raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_session", Session)
    for load in (load_tokenizer, load_policy):
        with pytest.raises(
            StudyError, match=r"^some/modle: .* it is no folder here, and the Hugging Face hub and its cache"
        ):
            load("some/modle")
    assert len(asked) == 1
