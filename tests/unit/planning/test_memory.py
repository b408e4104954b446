"""Which parts of trainer and engine share a device at once: vLLM sleeps on a GPU in the update, and there alone."""

import pytest

from tailrl.config.sampler import SamplerSettings
from tailrl.planning.machine import Machine
from tailrl.planning.memory import peak

TRAINER = {"weights": 10.0, "gradients": 10.0, "optimizer state": 20.0, "activations": 25.0}


@pytest.mark.parametrize(
    ("share", "awake", "asleep"),
    [
        (30, 95, 65),  # the update is the fuller half: 65 of the trainer, or 30 of what stays and 30 of vLLM's
        (60, 125, 90),  # the rollout is
    ],
)
def test_a_sleeping_engine_has_its_share_while_the_update_has_not(share: int, awake: int, asleep: int) -> None:
    parts = TRAINER | {"engine's weights": 5.0, "engine's cache": share - 5.0}
    for gpu, needed in ((False, awake), (True, asleep)):
        assert peak(parts, SamplerSettings(engine="vllm"), Machine(gpu=gpu, reserve=0)) == needed


@pytest.mark.parametrize("gpu", [False, True])
def test_other_engines_keep_their_weights_and_free_their_cache(gpu: bool) -> None:
    sampler, machine = SamplerSettings(engine="transformers"), Machine(gpu=gpu, reserve=1)
    assert peak(TRAINER | {"engine's weights": 5.0, "engine's cache": 20.0}, sampler, machine) == 1 + 65 + 5
    assert peak(TRAINER | {"engine's weights": 5.0, "engine's cache": 50.0}, sampler, machine) == 1 + 30 + 55
