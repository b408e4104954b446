"""Models of many families: loaded where packed rows keep responses apart, else refused in one sentence."""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from families import GROUPED, PACKED, REFUSED, SIZES, tiny_config, write_family
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tailrl.kernels.packing import pack
from tailrl.model import checks
from tailrl.model.checks import refuse_oversized
from tailrl.model.forward import PACKED_ATTENTION, hidden_states, trained_length
from tailrl.model.policy import load_policy
from tailrl.runtime.errors import StudyError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(policy_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny policy that a test may damage."""
    return Path(shutil.copytree(policy_folder, tmp_path / "policy"))


def set_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text(encoding="utf-8")) | values), encoding="utf-8")


def refusal(folder: Path) -> str:
    with pytest.raises(StudyError) as caught:
        load_policy(folder)
    sentence = str(caught.value)
    assert sentence.startswith(f"{folder}: ") and "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", PACKED)
def test_a_family_that_attention_alone_connects_is_loaded(name: str, tmp_path: Path) -> None:
    model = load_policy(write_family(name, tmp_path / name))
    assert model.config._attn_implementation == PACKED_ATTENTION
    tokens = torch.arange(11) % 90
    with torch.no_grad():
        row = hidden_states(model, tokens, pack([4, 7]))
        alone = torch.cat([hidden_states(model, part, pack([len(part)])) for part in tokens.split([4, 7])])
    torch.testing.assert_close(row, alone, rtol=0, atol=1e-6 * alone.abs().max().item())


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_packed_rows_do_not_suit_is_one_sentence(name: str, tmp_path: Path) -> None:
    assert REFUSED[name][1] in refusal(write_family(name, tmp_path / name))


def test_attention_over_the_whole_row_is_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed attention that forgot where sequences end."""

    def whole(model: PreTrainedModel, tokens_P: torch.Tensor, _: object) -> torch.Tensor:
        return hidden_states(model, tokens_P, pack([len(tokens_P)]))

    monkeypatch.setattr(checks, "hidden_states", whole)
    assert "packed responses would see one another" in refusal(folder)


def amplifying(folder: Path, seed: int) -> Path:
    """Scores of 30,000 that all keys share: their rounding moves probabilities, packed or alone."""
    torch.manual_seed(seed)
    small = AutoConfig.for_model("qwen2", **SIZES | GROUPED | {"hidden_size": 32})
    AutoModelForCausalLM.from_config(small, dtype=torch.float32).save_pretrained(folder)
    weights = load_file(folder / WEIGHTS)
    for name, weight in weights.items():
        if name.endswith(("q_proj.bias", "k_proj.bias")):
            weight.view(-1, 8)[:, 3] = 300.0
        elif weight.ndim > 1 and ".layers." in name:
            weight.mul_(10)
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_a_model_that_amplifies_rounding_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which models' rounding shows depends on the processor: about a third of them."""
    folders = [amplifying(tmp_path / str(seed), seed) for seed in range(16)]
    for folder in folders:
        assert load_policy(folder).config.model_type == "qwen2"
    monkeypatch.setattr(checks, "AMPLIFIED", 0.0)
    shown = []
    for folder in folders:
        try:
            load_policy(folder)
        except StudyError as error:
            assert "rounding explains" in str(error)
            shown.append(folder)
    assert shown, "the case shows what it is for"
    monkeypatch.undo()
    test_attention_over_the_whole_row_is_found(shown[0], monkeypatch)


# --- ropes that depend on a sequence's length --------------------------------------------------------------

LIMIT = 64
FACTORS = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
ROPES: dict[str, tuple[dict[str, Any], int]] = {
    "longrope": (FACTORS | {"original_max_position_embeddings": LIMIT, "factor": 4.0}, 4 * LIMIT),
    "dynamic": ({"factor": 4.0}, LIMIT),
}


def write_rope(rope: str, folder: Path) -> Path:
    """A Llama with such a rope, whose frequencies change beyond LIMIT tokens, and peaks in its attention."""
    own, positions = ROPES[rope]
    config = tiny_config("llama")
    config.max_position_embeddings = positions
    config.rope_parameters = {"rope_type": rope, "rope_theta": 1e4, **own}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for weight in model.parameters():
        if weight.ndim > 1:
            torch.nn.init.normal_(weight, 0, 0.25)
    model.save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("rope", ROPES)
def test_a_short_row_beside_a_long_one_is_scored_right_or_refused(rope: str, tmp_path: Path) -> None:
    """At the model's own limit, against transformers' own model on each sequence alone, and one token beyond it."""
    folder = write_rope(rope, tmp_path)
    model, plain = load_policy(folder), AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    tokens = torch.arange(40 + LIMIT + 1) % 90
    lengths = [40, LIMIT]
    row = hidden_states(model, tokens[: sum(lengths)], pack(lengths))
    alone = [plain.base_model(part[None]).last_hidden_state[0] for part in tokens[: sum(lengths)].split(lengths)]
    torch.testing.assert_close(row, torch.cat(alone), rtol=0, atol=1e-5)
    words = f"rope of type {rope} changes at 64 tokens, and a sequence of 65 would change all others"
    with pytest.raises(StudyError, match=words):
        hidden_states(model, tokens, pack([40, LIMIT + 1]))
    positions = torch.cat([torch.arange(40), torch.arange(100)])[None]
    beside = plain.base_model((torch.arange(140) % 90)[None], position_ids=positions, attention_mask=None)
    assert (beside.last_hidden_state[0, :40] - alone[0]).abs().max() > 1e-3, "the case shows what it is for"
    assert trained_length(model.config) == LIMIT


def test_a_rope_of_a_type_not_known_here_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frequencies depend on the longest sequence, and no name says so."""
    folder = write_rope("longrope", tmp_path)
    load_policy(folder)
    monkeypatch.setattr("tailrl.model.forward.changing_ropes", lambda _: {})
    assert "packed responses would see one another's length" in refusal(folder)


def test_a_configuration_without_positions_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "SIZES", ("vocab_size", "most_tokens"))
    assert refusal(folder).endswith("config.json has no most_tokens")


# --- files and configuration that do not fit -----------------------------------------------------------


def test_a_layer_that_the_configuration_drops_is_named(folder: Path) -> None:
    set_config(folder, num_hidden_layers=1)
    assert "model.safetensors has weights without a place in the model: model.layers.1." in refusal(folder)


def test_rotary_frequencies_of_older_files_are_no_weights(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    load_policy(folder)


@pytest.mark.parametrize(
    "key", ["num_hidden_layers", "num_attention_heads", "num_key_value_heads", "num_local_experts"]
)
def test_a_count_without_end_is_one_sentence(key: str, folder: Path) -> None:
    set_config(folder, **{key: 10**9})
    assert f"{key} is 1000000000, more than 2048" in refusal(folder)


def test_a_count_without_end_in_a_block(folder: Path) -> None:
    set_config(folder, text_config={"num_hidden_layers": 10**9})
    assert "num_hidden_layers is 1000000000" in refusal(folder)


# --- sizes that no file of this length can have ----------------------------------------------------------


def test_a_configuration_without_sizes_takes_no_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("was asked to load")

    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    size = (folder / WEIGHTS).stat().st_size
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", never)
    assert f"asks for 6,738,415,744 weights, too many for its files of {size:,} bytes" in refusal(folder)


def test_a_buffer_without_end_takes_no_memory(tmp_path: Path) -> None:
    sizes = {"vocab_size": 97, "d_model": 8, "num_layers": 1, "attention_heads": 2, "ffn_dim": 8}
    AutoModelForCausalLM.from_config(AutoConfig.for_model("xglm", **sizes)).save_pretrained(tmp_path)
    set_config(tmp_path, max_position_embeddings=10**9)
    with pytest.raises(ValueError, match="asks for 8,000,001,272 weights"):
        refuse_oversized(tmp_path)


@pytest.mark.parametrize("name", PACKED)
def test_what_is_counted_is_what_files_hold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tied heads once, in parts, in one byte a weight: nothing to spare, and still not refused."""
    folder = write_family(name, tmp_path / name)
    weights = {key: torch.zeros(value.shape, dtype=torch.int8) for key, value in load_file(folder / WEIGHTS).items()}
    (folder / WEIGHTS).unlink()
    parts = {"a.safetensors": list(weights)[::2], "b.safetensors": list(weights)[1::2]}
    for part, names in parts.items():
        save_file({name: weights[name] for name in names}, folder / part)
    index = {"metadata": {}, "weight_map": {name: part for part, names in parts.items() for name in names}}
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    monkeypatch.setattr(checks, "SPARE", 0)
    refuse_oversized(folder)


@pytest.mark.parametrize("share, allowed", [(1, True), (7, True), (9, False)])
def test_a_quantized_byte_may_hold_eight_weights(
    share: int, allowed: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "SPARE", 0)
    count = sum(weight.numel() for weight in load_file(folder / WEIGHTS).values())
    set_config(folder, quantization_config={"quant_method": "bitnet"})
    (folder / WEIGHTS).write_bytes(bytes(-(-count // share)))
    with contextlib.nullcontext() if allowed else pytest.raises(ValueError, match="too many"):
        refuse_oversized(folder)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(bad: float, folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] = bad
    save_file(weights, folder / WEIGHTS, {"format": "pt"})
    assert refusal(folder).endswith(": model.safetensors: model.layers.1.mlp.up_proj.weight holds NaN or Inf")
