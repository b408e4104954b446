"""What the hooks keep is what transformers itself returns as hidden states."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tailrl.model.layer_outputs import recorded


def test_outputs_are_the_librarys_hidden_states(policy_folder: Path) -> None:
    """`output_hidden_states` has the embeddings and each layer but the last, which it gives after the norm."""
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    ids_1P = torch.randint(0, 500, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), recorded(model.base_model) as found:
        states = model.base_model(input_ids=ids_1P, output_hidden_states=True).hidden_states
    layers = model.config.num_hidden_layers
    names = ["embeddings", *(f"layer {number}" for number in range(layers - 1))]
    for name, state_1PH in zip(names, states, strict=False):
        assert torch.equal(found[name], state_1PH[0]), name
    assert {f"layer {layers - 1}", "layer 0, attention", "layer 0, feed-forward"} <= found.keys()
    with torch.no_grad():
        model.base_model(input_ids=ids_1P)
    assert found["embeddings"].shape[0] == 9, "nothing is kept after the block"


def test_a_sequence_in_two_pieces_is_joined(policy_folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32).eval()
    ids_1P = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad(), recorded(model.base_model) as whole:
        model.base_model(input_ids=ids_1P)
    with torch.no_grad(), recorded(model.base_model) as pieces:
        kept = model.base_model(input_ids=ids_1P[:, :4], use_cache=True).past_key_values
        model.base_model(input_ids=ids_1P[:, 4:], past_key_values=kept)
    assert pieces["layer 0"] == pytest.approx(whole["layer 0"], abs=1e-5)
