"""Stale weights wait on the CPU: a GPU that trains has no room for more policies."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tailrl.config.sampler import Disturbance
from tailrl.training import weight_sync
from tailrl.training.weight_sync import WeightSync


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_stale_weights_wait_on_the_cpu(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without content stand for those of a GPU."""
    loaded: list[list[tuple[str, Tensor]]] = []
    sampler = SimpleNamespace(load_weights=lambda weights: loaded.append(list(weights)))
    with FakeTensorMode():
        weight = torch.ones(3, device=device)
        monkeypatch.setattr(weight_sync, "named_weights", lambda _: [("a", weight)])
        sync = WeightSync(sampler, Disturbance(staleness=2, side="both"))
        for _ in range(4):
            sync(None)
    assert len(sync.past) == 3
    assert all(kept.device.type == "cpu" and kept is not weight for weights in sync.past for _, kept in weights)
