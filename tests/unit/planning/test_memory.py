"""Which parts of trainer and engine share a device at once: vLLM sleeps on a GPU in the update, and there alone."""

from pathlib import Path

import pytest
from shaped import shaped_policy

from tailrl.config.jobs import Run
from tailrl.config.load import parse_study
from tailrl.config.sampler import SamplerSettings
from tailrl.kernels import whole_rows
from tailrl.model.policy import named_weights
from tailrl.planning.machine import Machine
from tailrl.planning.memory import peak, place, training_memory
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.types import Request

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


# --- the sampler's whole distribution ------------------------------------------------------------------

SMALL = Shape(32, 1, 2, 2, 16, 64, 50, tied=True)
WORK = Work(prompts=3, group=2, prompt=4, response=5, budget=20)


def run_of(engine: str, **correction: str) -> Run:
    arm = {"correction": correction, "sampler": {"engine": engine, "dtype": "float32"}}
    return parse_study({"name": "s", "policy": {"source": "scratch"}, "arms": {"a": arm}}).run("a")


CENTERED = {"centering": "full"}


def test_centering_holds_the_logits_that_an_engine_returns(tmp_path: Path) -> None:
    """Counted on real responses: a float32 row of the vocabulary at every sampled token."""
    model = shaped_policy(SMALL, 9, end=SMALL.vocabulary)
    model.config.save_pretrained(tmp_path)
    sampler = make_sampler(run_of("transformers").sampler, tmp_path, 9, 0, model)
    sampler.load_weights(named_weights(model))
    rollouts = sampler.generate([Request((2, 3, 4, 5), seed) for seed in range(6)], Decoding(1.0, 5, keep_every=1))
    held = sum(row_V.nbytes for rollout in rollouts for row_V in rollout.logits_sampler_KV)
    for engine in ("transformers", "vllm"):
        parts = training_memory(SMALL, run_of(engine, **CENTERED), WORK, Machine(gpu=False), 1)
        assert parts["sampler's logits"] == held
        assert "sampler's logits" not in training_memory(SMALL, run_of(engine), WORK, Machine(gpu=False), 1)


def test_each_rank_of_a_machine_holds_those_of_all_ranks() -> None:
    """Two ranks with half of the responses each: on a CPU both have all rows, on a GPU's device its own."""
    run = run_of("vllm", **CENTERED)
    for gpu, times in ((False, 2), (True, 1)):
        parts = training_memory(SMALL, run, WORK, Machine(gpu=gpu), 2)
        assert parts["sampler's logits"] == times * 4 * SMALL.vocabulary * WORK.sampled


def test_a_micro_batch_has_its_rows_of_them_and_a_chunk() -> None:
    head = 8 * SMALL.vocabulary * SMALL.hidden  # in float32, with its gradient, where the policy is in bfloat16
    for gpu, more in ((False, 40 * whole_rows.LOGITS_AT_ONCE), (True, 40 * whole_rows.GPU_LOGITS_AT_ONCE + head)):
        centered = training_memory(SMALL, run_of("vllm", **CENTERED), WORK, Machine(gpu=gpu), 1)
        assert centered["log-probs"] == 4 * SMALL.vocabulary * WORK.batch_sampled + more


@pytest.mark.parametrize(
    ("engine", "gpu"), [("vllm", False), ("transformers", False), ("vllm", True), ("transformers", True)]
)
def test_where_they_lie(engine: str, gpu: bool) -> None:
    """In the host's memory: on a CPU it is that of everything else."""
    sampler, machine = SamplerSettings(engine=engine), Machine(gpu=gpu, reserve=0)
    counts = not gpu
    for part in ("engine's cache", "activations"):
        parts = {"weights": 1.0, "gradients": 0.0, "optimizer state": 0.0, "engine's weights": 0.0}
        parts |= {"engine's cache": 0.0, "activations": 0.0} | {part: 100.0}
        assert peak(parts | {"sampler's logits": 20.0}, sampler, machine) == peak(parts, sampler, machine) + 20 * counts


def test_logits_that_do_not_fit_are_lacking() -> None:
    plain, centered = run_of("vllm"), run_of("vllm", **CENTERED)
    work = Work(prompts=300, group=20, prompt=4, response=400, budget=2000)
    needed = peak(place(SMALL, plain, work, Machine(gpu=False), 1).parts, plain.sampler, Machine(gpu=False))
    cpu = Machine(gpu=False, memory=needed)
    assert place(SMALL, plain, work, cpu, 1).lacking == 0
    assert place(SMALL, centered, work, cpu, 1).lacking > 4 * SMALL.vocabulary * work.sampled


def test_a_reference_policy_is_held_whole_on_a_cpu_all_the_time() -> None:
    arms = {"a": {}, "b": {"reference_kl": {}}}
    study = parse_study({"name": "s", "policy": {"source": "scratch"}, "arms": arms})
    for gpu, more in ((False, 4 * SMALL.parameters), (True, 0)):
        machine = Machine(gpu=gpu, reserve=0)
        plain, held = (training_memory(SMALL, study.run(arm), WORK, machine, 2) for arm in arms)
        assert held.get("reference policy", 0) == more and sum(held.values()) == sum(plain.values()) + more
        engine = {"engine's weights": 1.0, "engine's cache": 1.0}
        sampler = SamplerSettings()
        assert peak(held | engine, sampler, machine) == peak(plain | engine, sampler, machine) + more
