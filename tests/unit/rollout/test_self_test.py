"""How far a recorded log-prob may lie from that of the logits it was drawn from."""

import pytest
import torch

from tailrl.rollout.self_test import tolerance


@pytest.mark.parametrize("vocabulary", [600, 2048, 49_152, 151_936])
def test_a_float32_log_softmax_is_within_the_tolerance(vocabulary: int) -> None:
    """Over a peaked head and a long tail, as a language model has them."""
    logits_TV = 3 * torch.randn(16, vocabulary, generator=torch.Generator().manual_seed(0))
    logits_TV[:, 0] += torch.linspace(0, 25, 16)
    error = (logits_TV.log_softmax(-1).double() - logits_TV.double().log_softmax(-1)).abs().max().item()
    assert 0 < error < tolerance(vocabulary)
    assert tolerance(vocabulary) < 1e-3


def test_the_tolerance_is_1e_5_for_small_vocabularies() -> None:
    assert tolerance(0) == tolerance(2048) == 1e-5 < tolerance(49_152)
