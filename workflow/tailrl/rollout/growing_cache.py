"""A cache of keys and values with room for tokens to come, for the transformers library's models.

The library's own `DynamicCache` concatenates: each token copies the whole cache, which is most of the time of a long
response on a CPU.
"""

from collections.abc import Iterable

from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

ROOM = 8
"""A full layer grows by one part in so many of its length: a token's share of the copying is that of so many tokens."""
LEAST_ROOM = 64


class GrowingLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [S, heads, L, D] of one layer: views of the first L places of larger tensors."""

    def __init__(self, keys: Tensor | None = None, values: Tensor | None = None) -> None:
        """An empty layer, or one that begins with these keys and values, which it neither changes nor copies."""
        super().__init__()
        if keys is not None and values is not None:
            self._begin(keys, values)

    def _begin(self, keys: Tensor, values: Tensor) -> None:
        self.lazy_initialization(keys, values)
        self.keys, self.values = self._held = keys, values

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Take in the states [S, heads, N, D] of new tokens; returns those of all, [S, heads, L + N, D]."""
        if not self.is_initialized:
            self._begin(key_states, value_states)
            return self.keys, self.values
        length = self.get_seq_length()
        whole = length + key_states.shape[-2]
        if whole > self._held[0].shape[-2]:
            room = max(LEAST_ROOM, whole // ROOM)
            self._held = _with_room(self.keys, whole + room), _with_room(self.values, whole + room)
        keys, values = self._held
        keys[:, :, length:whole] = key_states
        values[:, :, length:whole] = value_states
        self.keys, self.values = keys[:, :, :whole], values[:, :, :whole]
        return self.keys, self.values


def growing_cache(layers: Iterable[tuple[Tensor, Tensor]] = ()) -> Cache:
    """An empty cache, or one that begins with each layer's keys and values [S, heads, L, D]."""
    begun = [GrowingLayer(keys, values) for keys, values in layers]
    return Cache(layers=begun) if begun else Cache(layer_class_to_replicate=GrowingLayer)


def _with_room(states: Tensor, places: int) -> Tensor:
    """A tensor of so many places that begins with these states."""
    larger = states.new_empty((*states.shape[:2], places, states.shape[3]))
    larger[:, :, : states.shape[2]] = states
    return larger
