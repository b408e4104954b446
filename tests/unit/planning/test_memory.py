"""What a GPU lacks where vLLM sleeps between rollout and update, and where it does not."""

import pytest

from tailrl.planning.machine import Machine
from tailrl.planning.memory import shortage

GIB = 2**30
TRAINER = {"weights": 10 * GIB, "gradients": 10 * GIB, "optimizer state": 20 * GIB, "activations": 25 * GIB}


@pytest.mark.parametrize(
    ("memory", "share", "awake", "asleep"),
    [
        (100, 30, 0, 0),
        (80, 30, 15, 0),  # 65 of the trainer, or 30 of what stays and 30 of vLLM's
        (80, 60, 45, 10),  # the rollout is the fuller half of the step
        (60, 20, 25, 5),  # the update is
    ],
)
def test_a_sleeping_engine_has_its_share_while_the_update_has_not(
    memory: int, share: int, awake: int, asleep: int
) -> None:
    machine = Machine(memory=memory * GIB, reserve=0)
    assert shortage(TRAINER, share * GIB, machine, sleeps=False) == awake * GIB
    assert shortage(TRAINER, share * GIB, machine, sleeps=True) == asleep * GIB
