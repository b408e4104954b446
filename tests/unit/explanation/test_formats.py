"""Hypotheses on weights are what other libraries store."""

from pathlib import Path
from typing import Any

import pytest
import torch
from explanation_fixture import load, make_policy

from tailrl.explanation.catalogue import shown
from tailrl.explanation.inputs import Context
from tailrl.explanation.models import quantized


@pytest.mark.parametrize(("value", "bits", "group"), [("int8_stored", 8, None), ("int4_32_stored", 4, 32)])
def test_stored_weights_are_those_of_compressed_tensors(tmp_path: Path, value: str, bits: int, group: int) -> None:
    helpers = pytest.importorskip("compressed_tensors.quantization.utils.helpers")
    forward = pytest.importorskip("compressed_tensors.quantization.lifecycle.forward")
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    settings = pytest.importorskip("compressed_tensors.quantization").QuantizationArgs(
        num_bits=bits, type="int", symmetric=True, **strategy
    )
    # Engines are handed weights in bfloat16, whose largest numbers give the scales.
    model = load(make_policy(tmp_path), torch.bfloat16).float()
    weight_OI = model.model.layers[1].mlp.down_proj.weight.detach().bfloat16()
    grouped_OGI = weight_OI.view(len(weight_OI), -1, group or weight_OI.shape[1])
    scale_OG, zero_OG = helpers.calculate_qparams(grouped_OGI.amin(-1), grouped_OGI.amax(-1), settings)
    level_OI = forward.quantize(weight_OI, scale_OG, zero_OG, settings, dtype=torch.int8)
    wanted_OI = level_OI.float().view(grouped_OGI.shape) * scale_OG.float()[..., None]
    with torch.no_grad():
        changed = quantized(model, value, Context(model.config))
    assert changed is not None
    got_OI = changed.model.layers[1].mlp.down_proj.weight
    torch.testing.assert_close(got_OI.view(grouped_OGI.shape), wanted_OI, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int4_32_stored", "int4 in groups of 32 (weights with the scales of compressed-tensors)"),
        ("bfloat16_logits", "bfloat16, logits too"),
        ("fp8_e4m3", "fp8_e4m3"),
        (1.25, "1.25"),
    ],
)
def test_formats_in_words(value: float | str, words: str) -> None:
    assert shown(value) == words
