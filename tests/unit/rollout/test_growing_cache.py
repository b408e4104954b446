"""A cache with room to grow holds what the library's own holds, to the bit."""

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from tailrl.rollout.growing_cache import LEAST_ROOM, GrowingLayer, growing_cache


def states(generator: torch.Generator, tokens: int) -> tuple[Tensor, Tensor]:
    keys, values = torch.randn(2, 3, 2, tokens, 4, generator=generator)
    return keys, values


@pytest.mark.parametrize("prompt", [1, 7, 700])
def test_it_holds_what_the_librarys_cache_holds(prompt: int) -> None:
    """Over tokens that fill its room several times; both layers, each with its own states."""
    generator = torch.Generator().manual_seed(prompt)
    ours, theirs = growing_cache(), DynamicCache()
    for tokens in (prompt, *[1] * (3 * LEAST_ROOM), 5, *[1] * 20):
        for layer in range(2):
            new = states(generator, tokens)
            for held, wanted in zip(ours.update(*new, layer), theirs.update(*new, layer), strict=True):
                assert torch.equal(held, wanted)
        assert ours.get_seq_length() == theirs.get_seq_length()


def test_one_begun_with_states_leaves_them_as_they_were() -> None:
    generator = torch.Generator().manual_seed(0)
    begun, new, other = states(generator, 9), states(generator, 1), states(generator, 1)
    kept = [tensor.clone() for tensor in begun]
    wanted = [torch.cat(pair, -2) for pair in zip(begun, new, strict=True)]
    one, another = growing_cache([begun]), growing_cache([begun])
    held = one.update(*new, 0)
    another.update(*other, 0)
    assert all(map(torch.equal, held, wanted)), "two caches begun with the same states share no room"
    assert all(map(torch.equal, begun, kept))


def test_a_token_copies_its_own_states_alone_while_there_is_room() -> None:
    layer, generator = GrowingLayer(), torch.Generator().manual_seed(0)
    layer.update(*states(generator, 10))
    layer.update(*states(generator, 1))
    where = [tensor.data_ptr() for tensor in (layer.keys, layer.values)]
    for _ in range(LEAST_ROOM):
        layer.update(*states(generator, 1))
    assert [tensor.data_ptr() for tensor in (layer.keys, layer.values)] == where
    layer.update(*states(generator, 1))
    assert [tensor.data_ptr() for tensor in (layer.keys, layer.values)] != where
