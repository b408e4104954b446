"""The plugin in verl's own Ray workers: the sampler's requests, and workers that cannot be changed."""

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray
import transfer_queue as tq
from conftest import DVP
from fake_server import FakeClient
from policy_fixture import write_policy
from tensordict import NonTensorData
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.utils import tensordict_utils as tu

from tailrl.integrations.verl.workers import constrain_engine, constrain_sampler, in_each
from tailrl.runtime.errors import StudyError


@pytest.fixture(scope="module")
def worker(configured: Callable[..., Any], queue: None, tmp_path_factory: pytest.TempPathFactory) -> Any:  # noqa: ARG001
    """verl's worker of agent loops as its trainers start it, with a server that notes requests."""
    folder = write_policy(tmp_path_factory.mktemp("policy"))
    config = configured(
        *DVP, f"actor_rollout_ref.model.path={folder}", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.7", "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    )  # fmt: skip
    requests = folder / "requests.jsonl"
    actor = agent_loop_tq.AgentLoopWorkerTQ.remote(config=config, llm_client=FakeClient(requests))
    return actor, requests


def asked(worker: Any, validate: bool, **prompt: Any) -> list[dict[str, Any]]:
    """The requests that two prompts make."""
    actor, file = worker
    file.unlink(missing_ok=True)
    name = f"{'val' if validate else 'train'}{len(prompt)}"
    batch = tu.get_tensordict(
        {
            "uid": [f"{name}a", f"{name}b"], "index": [0, 1],
            "raw_prompt": [[{"role": "user", "content": "w1 w2"}]] * 2,
            "data_source": ["set"] * 2, "reward_model": [{"ground_truth": "w3"}] * 2, **prompt,
        },
        non_tensor_dict={"global_steps": 1, "validate": validate},
    )  # fmt: skip
    batch["agent_name"] = NonTensorData("single_turn_agent")
    ray.get(actor.generate_sequences.remote(batch))
    partition = "val" if validate else "train"

    def status() -> set[Any]:
        tags = (tq.kv_list(partition) or {}).get(partition, {})
        return {tags.get(uid, {}).get("status") for uid in (f"{name}a", f"{name}b")}

    for _ in range(200):
        if status() <= {"finished", "failure"}:
            break
        time.sleep(0.05)
    assert status() == {"finished"}
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_training_requests_alone_ask_for_min_p(worker: Any) -> None:
    assert all("min_p" not in request for request in asked(worker, validate=False, plain=["a", "b"])), "not yet"
    [line] = in_each([worker[0]], constrain_sampler, -3.0)
    assert "min_p = exp(-3) in each training request" in line and "verl 0.9" in line
    training = asked(worker, validate=False)
    assert len(training) == 4 and all(request["min_p"] == math.exp(-3.0) for request in training)
    assert all(request["temperature"] == 1.0 for request in training)
    validation = asked(worker, validate=True)
    assert len(validation) == 2 and all("min_p" not in request for request in validation)
    assert all(request["temperature"] == 0.7 for request in validation), "random, and still not pruned"


def test_a_greedy_baseline_is_not_pruned(worker: Any) -> None:
    """REMAX asks for it prompt by prompt, among training requests."""
    in_each([worker[0]], constrain_sampler, -3.0)
    requests = asked(worker, validate=False, __do_sample__=[False, True], more=["", ""])
    greedy = [request for request in requests if request["temperature"] == 0]
    assert len(greedy) == 2 and all("min_p" not in request for request in greedy)
    assert sum("min_p" in request for request in requests) == 2


def test_a_second_call_sets_another_threshold(worker: Any) -> None:
    in_each([worker[0]], constrain_sampler, -1.0)
    assert {request["min_p"] for request in asked(worker, validate=False, a=[1, 2], b=[1, 2], c=[1, 2])} == {
        math.exp(-1.0)
    }


@pytest.mark.usefixtures("queue")
def test_a_worker_that_cannot_be_changed_ends_the_run(tmp_path: Path) -> None:
    @ray.remote
    class Other:
        """A worker of another kind."""

    @ray.remote(runtime_env={"env_vars": {"PYTHONPATH": str(tmp_path)}})
    class WithoutTailrl:
        """A worker on a node where tailrl is broken."""

    with pytest.raises(StudyError, match=r"could not be set up for DVP.*has no _run_agent_loop"):
        in_each([Other.remote()], constrain_sampler, -3.0)
    with pytest.raises(StudyError, match=r"could not be set up for DVP.*has no language model's engine"):
        in_each([Other.remote()], constrain_engine, -3.0)
    (tmp_path / "tailrl").mkdir()
    (tmp_path / "tailrl/__init__.py").write_text("")
    with pytest.raises(StudyError, match=r"could not be set up for DVP.*No module named"):
        in_each([WithoutTailrl.remote()], constrain_sampler, -3.0)
    with pytest.raises(StudyError, match="there is no worker"):
        in_each([], constrain_sampler, -3.0)
