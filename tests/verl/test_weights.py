"""The weights of the page, by verl's own correction, beside ours: over responses with tokens outside the set."""

import re
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from pages_fixture import blocks
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask

from tailrl.config.arm import Correction
from tailrl.integrations.verl.scores import FILL
from tailrl.objective.corrections import correct

PAGE = "how-to/verl.md"
RESPONSES, TOKENS = 2000, 12


def settings_of_page() -> dict[str, Any]:
    """The correction that the page tells to type."""
    [lines] = [block for block in blocks(PAGE, "text") if "rollout_correction" in block]
    pairs = [line.removeprefix("algorithm.rollout_correction.").split("=", 1) for line in lines.split()]
    return {name: re.sub(r"""^['"]+|['"]+$""", "", value) for name, value in pairs if name != "bypass_mode"}


@pytest.mark.parametrize("outside", [0.0, 0.01])
def test_mis_with_the_veto_equals_ours(outside: float) -> None:
    generator = torch.Generator().manual_seed(3)
    infer = -torch.rand((RESPONSES, TOKENS), generator=generator) * 3 - 1e-3
    train = infer + torch.randn((RESPONSES, TOKENS), generator=generator) * 0.3
    train[::17, 3] -= 12.0  # a veto: below 1e-4
    is_outside = torch.rand((RESPONSES, TOKENS), generator=generator) < outside
    filled = train.masked_fill(is_outside, FILL)
    mask = torch.ones((RESPONSES, TOKENS), dtype=torch.int64)
    weights, kept, _ = compute_rollout_correction_and_rejection_mask(filled, infer, mask, **settings_of_page())
    assert weights is not None
    verls = (weights.batch["rollout_is_weights"] * kept)[:, 0]
    ours = correct(
        (train - infer).flatten(), is_outside.flatten(), torch.arange(RESPONSES).repeat_interleave(TOKENS), RESPONSES,
        Correction(sequence="mis", sequence_threshold=2.0, veto=1e-4),
    )  # fmt: skip
    torch.testing.assert_close(verls, ours.sequence_N, atol=1e-6, rtol=1e-5)
    assert 100 < int((ours.sequence_N == 0).sum()) < RESPONSES - 100 and bool(ours.vetoed_N.any())
    assert OmegaConf.create(settings_of_page())
