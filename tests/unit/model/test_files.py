"""The file of a model that is at fault is named; what is written is read by older libraries too."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from families import PACKED, tiny_config
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from tailrl.model.files import add_older_keys, broken_file
from tailrl.model.policy import load_config, load_policy, load_tokenizer, save_policy
from tailrl.runtime.errors import StudyError

FILES = ("config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy that a test may damage."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


def config_of(folder: Path) -> dict[str, object]:
    return dict(json.loads((folder / "config.json").read_text(encoding="utf-8")))


def test_a_whole_model_has_no_broken_file(folder: Path) -> None:
    assert broken_file(folder) is None


@pytest.mark.parametrize("content", ["{", "[1]", "\x00", "null"])
@pytest.mark.parametrize("name", FILES)
def test_the_broken_file_is_named(name: str, content: str, folder: Path) -> None:
    (folder / name).write_text(content, encoding="utf-8")
    for read in (load_tokenizer, load_policy):
        try:
            read(folder)
        except StudyError as error:
            sentence = str(error)
            assert sentence.startswith(f"{folder}: ") and f" {name}" in sentence and "\n" not in sentence
            return
    raise AssertionError("was read")


@pytest.mark.parametrize("index", [{}, {"weight_map": []}])
def test_an_index_without_a_map_is_named(index: dict[str, object], folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    with pytest.raises(StudyError, match=r"model\.safetensors\.index\.json has no weight_map"):
        load_policy(folder)


# --- what transformers 4 reads -------------------------------------------------------------------------

YARN = {"rope_type": "yarn", "rope_theta": 54_321.0, "factor": 2.0, "original_max_position_embeddings": 32}
PARTIAL = {"rope_type": "default", "rope_theta": 54_321.0, "partial_rotary_factor": 0.5}


@pytest.mark.parametrize(
    ("family", "rope", "keys"),
    [
        ("qwen3", {"rope_theta": 1e6}, {"rope_theta": 1e6, "rope_scaling": None}),
        ("llama", YARN, {"rope_theta": 54_321.0, "rope_scaling": {k: v for k, v in YARN.items() if k != "rope_theta"}}),
        ("glm4", PARTIAL, {"rope_theta": 54_321.0, "rope_scaling": None, "partial_rotary_factor": 0.5}),
        ("gpt_neox", PARTIAL, {"rotary_emb_base": 54_321.0, "rotary_pct": 0.5, "rope_scaling": None}),
        ("qwen3_moe", {"rope_theta": 1e6}, {"rope_theta": 1e6, "num_experts": 4, "num_local_experts": 4}),
        ("gpt2", {}, {}),
    ],
)
def test_a_written_configuration_says_the_rope_in_both_ways(
    family: str,
    rope: dict[str, object],
    keys: dict[str, object],
    tokenizer: PreTrainedTokenizerFast,
    tmp_path: Path,
) -> None:
    """The keys and values that the configurations of transformers 4.51 and 4.57 have; ours reads the same model."""
    config = tiny_config(family)
    if rope:
        config.rope_parameters = config.rope_parameters | rope
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    save_policy(model, tokenizer, tmp_path / family)
    written = config_of(tmp_path / family)
    assert {key: written.get(key) for key in keys} == keys
    if rope:
        assert load_config(tmp_path / family).rope_parameters == model.config.rope_parameters
    again = AutoModelForCausalLM.from_pretrained(tmp_path / family)
    tokens = torch.arange(3, 23)[None]
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("family", PACKED)
def test_written_twice_is_written_once(family: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    tiny_config(family).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    add_older_keys(tmp_path)
    first = load_config(tmp_path)
    written = config_of(tmp_path)
    first.save_pretrained(tmp_path)
    add_older_keys(tmp_path)
    assert config_of(tmp_path) == written and load_config(tmp_path).to_dict() == first.to_dict()


def test_a_written_tokenizer_has_the_names_of_both(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """transformers 4 knows no class TokenizersBackend, and takes extra_special_tokens for a mapping."""
    special = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<end>", pad_token="<pad>", extra_special_tokens=["<x>"]
    )
    special.save_pretrained(tmp_path)
    tiny_config("llama").save_pretrained(tmp_path)
    add_older_keys(tmp_path)
    written = json.loads((tmp_path / "tokenizer_config.json").read_text(encoding="utf-8"))
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert written["additional_special_tokens"] == ["<x>"] and "extra_special_tokens" not in written
    again, text = load_tokenizer(tmp_path), "1<x>2<end>"
    assert again.encode(text) == special.encode(text) and again.all_special_ids == special.all_special_ids
    assert again.decode(again.encode(text), skip_special_tokens=True) == "12"
