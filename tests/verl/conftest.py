"""verl on a CPU, with the plugin by its own entry point."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# verl imports the module in each of its processes, and finds the platform there.
os.environ |= {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "cpu_platform"}
os.environ.setdefault("RAY_AUTH_MODE", "disabled")
# Ray's workers import what they are sent: the tests' own modules too.
sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])

import cpu_platform  # noqa: F401 before verl asks for a platform
import hydra
import pytest
import verl

DVP = ("trainer.v1.trainer_mode=tailrl", "+tailrl.dvp.log_rho=-3", "actor_rollout_ref.rollout.calculate_log_probs=true")
"""What a page tells to type, with a ρ for small tests."""


@pytest.fixture(scope="session")
def configured() -> Iterator[Callable[..., Any]]:
    """verl's own configuration of its PPO trainers, with lines of its command line."""
    folder = Path(verl.__file__).parent / "trainer/config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        needed = ("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm")
        yield lambda *lines: hydra.compose("ppo_trainer", overrides=[*needed, *lines])


@pytest.fixture(scope="session")
def queue() -> Iterator[None]:
    """The queue of verl's trainers; `tq.init` waits for ever where ray has few cores."""
    import ray
    import transfer_queue as tq

    ray.init(num_cpus=16, include_dashboard=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()
