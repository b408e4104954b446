"""What the plan makes of its counts: what fits, where the engine lies, how a step's time goes with its sizes."""

from pathlib import Path
from typing import Any

import pytest

from tailrl.errors import StudyError
from tailrl.planning import memory
from tailrl.planning.engine import place_engine
from tailrl.planning.machine import Machine, read_machine
from tailrl.planning.memory import engine_memory, peak, training_memory
from tailrl.planning.page import plan_page
from tailrl.planning.shapes import KNOWN
from tailrl.planning.times import step_seconds, update_seconds
from tailrl.planning.work import Work
from tailrl.settings import Run
from tailrl.study import Study, parse_study, read_study

ROOT = Path(__file__).parents[3]
SMALL, LARGE = KNOWN["Qwen/Qwen3-0.6B"], KNOWN["Qwen/Qwen3-14B"]
H100 = Machine()
WORK = Work(prompts=8, group=8, prompt=100, response=1000, budget=8000)


def run_of(arm: dict[str, Any] | None = None, **training: Any) -> Run:
    return parse_study({"name": "s", "arms": {"a": arm or {}}, "training": training}).run("a")


def paper() -> Study:
    return read_study(ROOT / "studies/paper.yaml")


# --- memory ------------------------------------------------------------------------------------------


def test_what_lies_there_all_the_time() -> None:
    """Sixteen bytes a parameter with AdamW, twelve with momentum alone, over the devices."""
    held = ("weights", "gradients", "optimizer state")
    for devices in (1, 8):
        adamw, sgd = (
            sum(training_memory(LARGE, run, WORK, H100, devices)[part] for part in held)
            for run in (run_of(), run_of(optimizer="sgd"))
        )
        assert (adamw, sgd) == (16 * LARGE.parameters / devices, 12 * LARGE.parameters / devices)


def test_the_constants_of_the_fused_log_probs() -> None:
    passes = pytest.importorskip("tailrl.logprobs_passes", reason="needs Triton", exc_type=ImportError)
    assert (memory.GPU_MATRIX_BYTES, memory.GPU_KEPT_BYTES) == (passes.MATRIX_BYTES, passes.KEPT_BYTES)


def test_checkpointing_keeps_a_layers_input() -> None:
    whole, again = (
        training_memory(SMALL, run_of(activation_checkpointing=on), WORK, H100, 1)["activations"]
        for on in (False, True)
    )
    assert again < whole / 5
    assert again > 4 * H100.slack * WORK.batch * SMALL.hidden * SMALL.layers


def test_only_vllms_cache_stays_while_the_trainer_works() -> None:
    found = {}
    for engine in ("vllm", "transformers"):
        sampler = run_of({"sampler": {"engine": engine}}).sampler
        parts = training_memory(SMALL, run_of(), WORK, H100, 1) | engine_memory(SMALL, sampler, WORK, H100, 1)
        found[engine] = peak(parts, sampler, H100) - parts["engine's weights"]
    assert found["vllm"] - found["transformers"] == min(
        parts["engine's cache"], parts["activations"] + parts["log-probs"]
    )


def test_the_cache_holds_two_numbers_a_layer_and_key() -> None:
    sampler = run_of().sampler
    cache = engine_memory(SMALL, sampler, WORK, H100, 1)["engine's cache"]
    assert cache == 2 * 2 * 28 * 8 * 128 * 64 * 1100
    half = run_of({"sampler": {"kv_cache_dtype": "fp8_e4m3"}}).sampler
    assert engine_memory(SMALL, half, WORK, H100, 1)["engine's cache"] == cache / 2


def test_an_engine_spreads_where_one_device_does_not_hold_it() -> None:
    run = run_of(dtype="bfloat16", activation_checkpointing=True)
    assert place_engine(SMALL, run, WORK, H100, 8).shards == 1
    spread = place_engine(LARGE, run, WORK, H100.model_copy(update={"memory": 60e9}), 8)
    assert spread.shards > 1
    assert peak(spread.parts, run.sampler, spread.machine) <= 60e9
    tight = place_engine(SMALL, run, WORK, H100.model_copy(update={"memory": 25e9}), 1)
    assert 1 < tight.machine.in_flight < 64
    assert peak(tight.parts, run.sampler, tight.machine) <= 25e9


# --- time --------------------------------------------------------------------------------------------


def test_an_update_takes_the_products_over_the_rate() -> None:
    bare = H100.model_copy(update={"passes": 0.0, "train_share": 1.0})
    seconds = update_seconds(SMALL, run_of(), WORK, bare, 1)
    products = 6 * SMALL.layers * SMALL.products * WORK.row + 8 * SMALL.embedding * WORK.sampled
    attention = 6 * SMALL.layers * 16 * 128 * 64 * 1100**2
    assert seconds == pytest.approx((products + attention) / 989e12)
    again = update_seconds(SMALL, run_of(activation_checkpointing=True), WORK, bare, 1)
    body = products - 8 * SMALL.embedding * WORK.sampled + attention
    assert again - seconds == pytest.approx(body / 3 / 989e12)


def test_sampling_goes_by_the_larger_of_products_and_reading() -> None:
    """One sequence waits for the weights to be read; so many that the products take longer wait for those."""
    still = H100.model_copy(update={"launch": 0.0, "draw": 0.0, "in_flight": 4096})
    one = Work(prompts=1, group=1, prompt=1, response=100, budget=8000)
    weights = SMALL.layers * SMALL.products + SMALL.embedding
    alone = step_seconds(SMALL, run_of(), one, still)["rollout"]
    assert alone == pytest.approx(100 * 2 * weights / 3.35e12, rel=0.02)
    many = Work(prompts=4096, group=1, prompt=1, response=100, budget=8000)
    busy = step_seconds(SMALL, run_of(), many, still)["rollout"]
    assert busy == pytest.approx(4096 * 100 * 2 * weights / (0.5 * 989e12), rel=0.02)
    rounds = step_seconds(SMALL, run_of(), many, still.model_copy(update={"in_flight": 2048}))["rollout"]
    assert rounds == pytest.approx(busy, rel=0.02)


# --- the page ----------------------------------------------------------------------------------------


def test_the_papers_study_fits_eight_devices_and_not_two() -> None:
    on_eight, on_two = (plan_page(paper(), H100, devices, 200, None) for devices in (8, 2))
    assert "14,768.3 million, 13,212.5 without embedding and head" in on_eight
    assert "4,194,304 sampled tokens" in on_eight
    assert " are left" in on_eight and "it does not fit" not in on_eight
    assert "it does not fit" in on_two and "the largest part is optimizer state" in on_two


def test_policies_are_the_base_and_every_snapshot() -> None:
    study = paper().model_copy(update={"seeds": (0, 1)})
    assert list(study.training.snapshots) == list(range(25, 500, 25))
    assert "of evaluating 121 policies" in plan_page(study, H100, 8, 200, None), "1 + 3 arms x 2 seeds x 20"
    unknown = parse_study(
        {
            "name": "s",
            "policy": {"source": "pretrained", "path": "Qwen/Qwen3-0.6B"},
            "arms": {"naive": {}},
            "evaluation": {"task": {"name": "dapo_math"}},
        }
    )
    assert "how many problems it has is not known before" in plan_page(unknown, H100, 1, 200, None)


def test_a_machine_is_read(tmp_path: Path) -> None:
    assert read_machine(None, None) == Machine()
    assert (read_machine(None, "40GB").memory, read_machine(None, "40 GiB").memory) == (40e9, 40 * 2**30)
    (tmp_path / "m.yaml").write_text("name: A100\nmatmul: 312.0e12\n", encoding="utf-8")
    assert read_machine(tmp_path / "m.yaml", None).matmul == 312e12
    with pytest.raises(StudyError, match=r"--memory 80: write it as 80GB or 80GiB"):
        read_machine(None, "80")
    (tmp_path / "m.yaml").write_text("matmull: 1.0\n", encoding="utf-8")
    with pytest.raises(StudyError, match=r"matmull is not a known key \(did you mean 'matmul'\?\)"):
        read_machine(tmp_path / "m.yaml", None)
