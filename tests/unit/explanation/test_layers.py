"""A weight that another checkpoint has scaled is located, in an engine of torch modules and in the real vLLM."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from explanation_fixture import load, make_policy, prompts_of, rescored, rows_of, sampled, scored_of
from transformers import AutoTokenizer, LlamaForCausalLM

from tailrl.explanation.explanation import Explanation, explain
from tailrl.explanation.layers import Engine, compare
from tailrl.explanation.page import verdict
from tailrl.model.layer_outputs import Outputs, recorded
from tailrl.runtime.errors import StudyError

LAYERS = 3


def scaled(folder: Path, to: Path, name: str) -> Path:
    """The policy with one weight scaled."""
    model = load(folder)
    with torch.no_grad():
        dict(model.named_parameters())[name].mul_(1.5)
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(folder, trust_remote_code=False).save_pretrained(to)
    return to


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy of three layers whose heads are wide enough for vLLM."""
    made = make_policy(tmp_path_factory.mktemp("policy"))
    config = load(made).config
    config.hidden_size, config.head_dim, config.num_hidden_layers = 128, 32, LAYERS
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(made)
    return made


def found_in(folder: Path, other: Path, compare: str) -> Explanation:
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), 6)
    responses, planted = sampled(load(other), prompts, 24)
    rows = rows_of(prompts, responses, planted, rescored(load(folder), prompts, responses))
    return explain(rows, folder, compare=compare, tokens=100)


WEIGHTS = [
    ("model.layers.1.mlp.down_proj.weight", "layer 1, feed-forward"),
    ("model.layers.2.self_attn.o_proj.weight", "layer 2, attention"),
]


def of_transformers(folder: Path) -> Engine:
    """An engine that is the library's own model of a folder."""

    def engine(sequences: Sequence[Sequence[int]], dtype: str) -> list[Outputs]:
        model = load(folder, getattr(torch, dtype))
        found = []
        for ids in sequences:
            with torch.no_grad(), recorded(model) as outputs:
                model(input_ids=torch.tensor([list(ids)]))
            found.append(dict(outputs))
        return found

    return engine


@pytest.mark.parametrize(("weight", "place"), WEIGHTS)
def test_the_layer_of_a_scaled_weight_is_located(folder: Path, tmp_path: Path, weight: str, place: str) -> None:
    other = scaled(folder, tmp_path / "other", weight)
    prompts = prompts_of(AutoTokenizer.from_pretrained(folder, trust_remote_code=False), 2)
    chosen = scored_of(prompts, [[5, 9, 30, 31]] * 2)
    stages = compare(str(folder), of_transformers(other), chosen)
    assert next(stage.name for stage in stages if stage.parts) == place
    assert not any(stage.parts for stage in compare(str(folder), of_transformers(folder), chosen))


@pytest.mark.slow
@pytest.mark.vllm
@pytest.mark.parametrize(("weight", "place"), WEIGHTS)
def test_the_layer_of_a_scaled_weight_is_located_in_vllm(folder: Path, tmp_path: Path, weight: str, place: str) -> None:
    other = scaled(folder, tmp_path / "other", weight)
    found = found_in(folder, other, f"vllm={other}")
    assert found.code == 2
    assert next(stage.name for stage in found.layers if stage.parts) == place
    assert f"first part from this model's at {place}" in verdict(found)[-1]
    assert {f"layer {number}" for number in range(LAYERS)} < {stage.name for stage in found.layers}


def test_another_engine_is_refused_before_anything_is_read(folder: Path) -> None:
    with pytest.raises(StudyError, match="--compare sglang: write vllm, or vllm=FOLDER"):
        explain([], folder, compare="sglang")
