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
from tailrl.planning.memory import engine_of, peak, trainer_parts
from tailrl.planning.plan import host_bytes, plan_job
from tailrl.planning.shapes import Shape
from tailrl.planning.work import Work
from tailrl.rollout import Decoding, make_sampler
from tailrl.rollout.types import Request

SMALL = Shape(32, 1, 2, 2, 16, 64, 50, tied=True)
WORK = Work(prompts=3, group=2, prompt=4, response=5, budget=20, longest=5)
TRAINER = {"weights": (10.0, 10.0), "gradients": (0.0, 10.0), "optimizer state": (20.0, 20.0)}
TRAINER |= {"activations": (0.0, 25.0)}


@pytest.mark.parametrize(
    ("share", "awake", "asleep"),
    [
        (30, 95, 65),  # the update is the fuller half: 65 of the trainer, or 30 of what stays and 30 of vLLM's
        (60, 125, 90),  # the rollout is
    ],
)
def test_a_sleeping_engine_has_its_share_while_the_update_has_not(share: int, awake: int, asleep: int) -> None:
    assert peak(TRAINER | {"engine": (share, share)}) == awake
    assert peak(TRAINER | {"engine": (share, 0)}) == asleep


def test_other_engines_keep_their_weights_and_free_their_cache() -> None:
    assert peak(TRAINER | {"engine's weights": (5, 5), "engine's cache": (20, 0)}) == 65 + 5
    assert peak(TRAINER | {"engine's weights": (5, 5), "engine's cache": (50, 0)}) == 30 + 55


@pytest.mark.parametrize(
    ("engine", "gpu", "weights", "cache"),
    [("vllm", True, 0, 0), ("vllm", False, 1, 1), ("transformers", True, 1, 0), ("transformers", False, 1, 0)],
)
def test_what_an_engine_keeps_while_the_trainer_works(engine: str, gpu: bool, weights: int, cache: int) -> None:
    """As shares of what it has while it samples."""
    parts = engine_of(SMALL, SamplerSettings(engine=engine), WORK, Machine(gpu=gpu)).parts
    kept = {part: update / rollout for part, (rollout, update) in parts.items()}
    assert kept == {"engine's weights": weights, "engine's cache": cache}


# --- the sampler's whole distribution ------------------------------------------------------------------


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
        parts = trainer_parts(SMALL, run_of(engine, **CENTERED), WORK, Machine(gpu=False), 1)
        assert parts["sampler's logits"] == (held, held)
        assert "sampler's logits" not in trainer_parts(SMALL, run_of(engine), WORK, Machine(gpu=False), 1)


def test_each_rank_of_a_machine_holds_those_of_all_ranks() -> None:
    """Two ranks with half of the responses each. From a GPU they go to the host's memory."""
    run = run_of("vllm", **CENTERED)
    all_ = 2 * 4 * SMALL.vocabulary * WORK.sampled
    assert trainer_parts(SMALL, run, WORK, Machine(gpu=False), 2)["sampler's logits"] == (all_, all_)
    assert "sampler's logits" not in trainer_parts(SMALL, run, WORK, Machine(gpu=True), 2)
    assert host_bytes(SMALL, run, WORK, 2) - host_bytes(SMALL, run_of("vllm"), WORK, 2) == 2 * all_


def test_a_micro_batch_has_its_rows_of_them_and_a_chunk() -> None:
    head = 8 * SMALL.vocabulary * SMALL.hidden  # in float32, with its gradient, where the policy is in bfloat16
    for gpu, more in ((False, 40 * whole_rows.LOGITS_AT_ONCE), (True, 40 * whole_rows.GPU_LOGITS_AT_ONCE + head)):
        centered = trainer_parts(SMALL, run_of("vllm", **CENTERED), WORK, Machine(gpu=gpu), 1)
        assert centered["log-probs"][1] == 4 * SMALL.vocabulary * WORK.batch_sampled + more


def test_logits_that_do_not_fit_are_lacking() -> None:
    plain, centered = run_of("vllm"), run_of("vllm", **CENTERED)
    work = Work(prompts=300, group=20, prompt=4, response=400, budget=2000, longest=400)
    needed = peak(plan_job(SMALL, plain, work, Machine(gpu=False), 1).parts)
    cpu = Machine(gpu=False, memory=needed)
    assert plan_job(SMALL, plain, work, cpu, 1).lacking == 0
    assert plan_job(SMALL, centered, work, cpu, 1).lacking > 4 * SMALL.vocabulary * work.sampled


def test_a_reference_policy_is_held_whole_on_a_cpu_all_the_time() -> None:
    arms = {"a": {}, "b": {"reference_kl": {}}}
    study = parse_study({"name": "s", "policy": {"source": "scratch"}, "arms": arms})
    for gpu, more in ((False, 4 * SMALL.parameters), (True, 0)):
        plain, held = (trainer_parts(SMALL, study.run(arm), WORK, Machine(gpu=gpu), 2) for arm in arms)
        assert held.get("reference policy", (0, 0)) == (more, more)
        assert peak(held) == peak(plain) + more
        rollout = {"engine's cache": (1e9, 0.0)}
        assert peak(held | rollout) == peak(plain | rollout) + more
