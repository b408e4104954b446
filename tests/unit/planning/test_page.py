"""What the plan makes of its counts: what fits, where the engine lies, how a step's time goes with its sizes."""

import math
from pathlib import Path
from typing import Any

import pytest

from tailrl.cli.command_line import run
from tailrl.config.jobs import Run
from tailrl.config.load import parse_study, read_study
from tailrl.config.study import Study
from tailrl.config.tasks.aime25 import Aime25Task
from tailrl.planning.machine import Machine, machines, read_machine
from tailrl.planning.memory import Parts, cached_bytes, engine_of, peak, trainer_parts
from tailrl.planning.plan import StudyPlan, evaluation_seconds, host_bytes, plan_job, plan_page
from tailrl.planning.shapes import KNOWN
from tailrl.planning.times import rollout_phase, step_phases, update_phase
from tailrl.planning.work import Work
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[3]
SMALL, LARGE = KNOWN["Qwen/Qwen3-0.6B"], KNOWN["Qwen/Qwen3-14B"]
H100 = Machine()
WORK = Work(prompts=8, group=8, prompt=100, response=1000, budget=8000, longest=1000)


def run_of(arm: dict[str, Any] | None = None, **training: Any) -> Run:
    return parse_study({"name": "s", "arms": {"a": arm or {}}, "training": training}).run("a")


def engine_parts(arm: dict[str, Any]) -> Parts:
    return engine_of(SMALL, run_of(arm).sampler, WORK, H100).parts


def paper() -> Study:
    return read_study(ROOT / "studies/paper.yaml")


# --- memory ------------------------------------------------------------------------------------------


def test_what_lies_there_all_the_time() -> None:
    """Sixteen bytes a parameter with AdamW, twelve with momentum alone, over the devices."""
    held = ("weights", "gradients", "optimizer state")
    for devices in (1, 8):
        adamw, sgd = (
            sum(max(trainer_parts(LARGE, run, WORK, H100, devices)[part]) for part in held)
            for run in (run_of(), run_of(optimizer="sgd"))
        )
        assert (adamw, sgd) == (16 * LARGE.parameters / devices, 12 * LARGE.parameters / devices)


def test_checkpointing_keeps_a_layers_input() -> None:
    whole, again = (
        trainer_parts(SMALL, run_of(activation_checkpointing=on), WORK, H100, 1)["activations"][1]
        for on in (False, True)
    )
    assert again < whole / 5
    assert again > 2 * H100.slack * WORK.batch * SMALL.hidden * SMALL.layers


def test_the_cache_holds_two_numbers_a_layer_and_key() -> None:
    bfloat16 = {"engine": "transformers", "dtype": "bfloat16"}
    cache, _ = engine_parts({"sampler": bfloat16})["engine's cache"]
    assert cache == 2 * 2 * 28 * 8 * 128 * 64 * 1100
    assert cached_bytes(run_of({"sampler": {"kv_cache_dtype": "fp8_e4m3"}}).sampler) == 1


def test_quantised_weights_take_the_bytes_of_their_format() -> None:
    """Linear layers alone; the twin of a quantised engine keeps the trainer's numbers."""
    products = SMALL.layers * SMALL.products
    rest = 2 * (SMALL.parameters + SMALL.embedding - products)
    for given, size in (
        ({"quantization": "int8"}, 1.0),
        ({"quantization": "fp8"}, 1.0),
        ({"quantization": "int4"}, 0.5),
        ({"quantization": "int4", "group_size": 32}, 0.5 + 2 / 32),
    ):
        assert engine_parts({"sampler": given})["engine's weights"][0] == pytest.approx(rest + size * products)
    exact = {"engine": "exact", "dtype": "float32"}
    twin = {**exact, "quantization": "int4", "kv_cache_dtype": "fp8_e4m3"}
    assert engine_parts({"sampler": twin}) == engine_parts({"sampler": exact})
    samplers = (run_of({"sampler": one}).sampler for one in ({}, {"quantization": "int8"}))
    seconds = [rollout_phase(SMALL, sampler, WORK, H100).seconds for sampler in samplers]
    assert seconds[1] < seconds[0], "a step of decoding reads the weights"


def test_a_mixture_in_few_bits_has_no_plan() -> None:
    policy = {"source": "pretrained", "path": "Qwen/Qwen3-30B-A3B"}
    given = {"name": "s", "policy": policy, "arms": {"a": {"sampler": {"quantization": "int8"}}}}
    with pytest.raises(StudyError, match=r"^arms\.a\.sampler\.quantization: the policy is a mixture, whose"):
        plan_page(StudyPlan(parse_study(given), H100, 1))
    assert "experts: 128 a layer" in plan_page(StudyPlan(parse_study(given | {"arms": {"a": {}}}), H100, 1))


def test_vllm_has_its_share_of_a_gpu_and_the_trainer_the_rest() -> None:
    run = run_of({"sampler": {"gpu_memory_utilization": 0.25}}, dtype="bfloat16", activation_checkpointing=True)
    job = plan_job(SMALL, run, WORK, H100, 1)
    weights, cache = (job.parts[part][0] for part in ("engine's weights", "engine's cache"))
    assert weights + cache == pytest.approx(20e9)
    assert weights == 2 * (SMALL.parameters + SMALL.embedding), "vLLM is handed a tied head apart"
    assert job.lacking == 0
    assert job.machine.in_flight == min(128, int(cache // (2 * SMALL.cached * 1100)))
    whole = sum(update for _, update in trainer_parts(SMALL, run, WORK, H100, 1).values())
    assert plan_job(SMALL, run, WORK, H100.model_copy(update={"memory": whole}), 1).lacking == 0, "vLLM sleeps then"
    tight = plan_job(SMALL, run, WORK, H100.model_copy(update={"memory": whole - 1e9}), 1)
    assert tight.lacking == pytest.approx(1e9), "the trainer needs all of it"


def test_an_engine_without_room_for_a_sequence_does_not_fit() -> None:
    run = run_of({"sampler": {"gpu_memory_utilization": 0.3}}, dtype="bfloat16", activation_checkpointing=True)
    job = plan_job(LARGE, run, WORK, H100, 64)
    assert job.lacking == pytest.approx(2 * LARGE.parameters + 2 * LARGE.cached * 1100 - 24e9)


def test_devices_that_share_an_engine_have_a_slice_each_and_the_sequences_of_all() -> None:
    whole = {"dtype": "bfloat16", "activation_checkpointing": True}
    sampler = {"gpu_memory_utilization": 0.12}
    alone, shared = (run_of({"sampler": sampler | {"tensor_parallel": n}}, **whole) for n in (1, 4))
    own, slice_ = (engine_of(SMALL, run.sampler, WORK, H100).parts for run in (alone, shared))
    assert slice_["engine's weights"][0] == own["engine's weights"][0] / 4
    job = plan_job(LARGE, shared, WORK, H100, 64)
    assert job.lacking == 0
    room = 0.12 * 80e9 - 2 * LARGE.parameters / 4
    assert job.machine.in_flight == int(room // (2 * LARGE.cached * 1100 / 4)) < 128


def test_on_a_cpu_the_parts_are_held_against_the_memory() -> None:
    cpu = H100.model_copy(update={"gpu": False, "memory": 1e9})
    job = plan_job(SMALL, run_of(), WORK, cpu, 1)
    assert job.parts["engine's cache"] == (2**30, 2**30)
    assert job.lacking == peak(job.parts) - 1e9
    assert plan_job(SMALL, run_of(), WORK, cpu.model_copy(update={"memory": 1e12}), 1).lacking == 0


# --- time --------------------------------------------------------------------------------------------


def test_an_update_takes_the_products_over_the_rate() -> None:
    bare = H100.model_copy(update={"passes": 0.0, "train_share": 1.0})
    seconds = update_phase(SMALL, run_of(), WORK, bare, 1).seconds
    products = 6 * SMALL.layers * SMALL.products * WORK.row + 8 * SMALL.embedding * WORK.sampled
    attention = 7 * SMALL.layers * 16 * 128 * 64 * 1100**2
    assert seconds == pytest.approx((products + attention) / 989e12)
    again = update_phase(SMALL, run_of(activation_checkpointing=True), WORK, bare, 1).seconds
    body = products - 8 * SMALL.embedding * WORK.sampled
    assert again - seconds == pytest.approx((body / 3 + attention * 2 / 7) / 989e12)


def test_sampling_goes_by_the_larger_of_products_and_reading() -> None:
    """One sequence waits for the weights to be read; so many that the products take longer wait for those."""
    still = H100.model_copy(update={"launch": 0.0, "draw": 0.0, "in_flight": 4096})
    one = Work(prompts=1, group=1, prompt=1, response=100, budget=8000, longest=100)
    weights = SMALL.layers * SMALL.products + SMALL.embedding
    alone = step_phases(SMALL, run_of(), one, still)["rollout"].seconds
    assert alone == pytest.approx(100 * 2 * weights / 3.35e12, rel=0.02)
    many = Work(prompts=4096, group=1, prompt=1, response=100, budget=8000, longest=100)
    busy = step_phases(SMALL, run_of(), many, still)["rollout"].seconds
    assert busy == pytest.approx(4096 * 100 * 2 * weights / (0.5 * 989e12), rel=0.02)
    half = still.model_copy(update={"in_flight": 2048})
    rounds = step_phases(SMALL, run_of(), many, half)["rollout"].seconds
    assert rounds == pytest.approx(busy, rel=0.02)


def test_devices_that_share_an_engine_read_a_slice_and_add_up() -> None:
    """Few sequences wait for the weights to be read, of which each of four reads a quarter; more wait for the links."""
    still = H100.model_copy(update={"launch": 0.0, "draw": 0.0, "link": 1e30})
    one = Work(prompts=1, group=1, prompt=1, response=100, budget=8000, longest=100)
    alone, shared = run_of(), run_of({"sampler": {"tensor_parallel": 4}})
    sampling = [step_phases(SMALL, run, one, still)["rollout"].seconds for run in (alone, shared)]
    assert sampling[1] == pytest.approx(sampling[0] / 4, rel=0.02)
    slow = step_phases(SMALL, shared, one, still.model_copy(update={"link": 1e9}))["rollout"].seconds
    added = 2 * 2 * 3 / 4 * 2 * SMALL.hidden * 4 * SMALL.layers
    assert slow - sampling[1] == pytest.approx(100 * added / 1e9)


# --- floors --------------------------------------------------------------------------------------------


def test_a_floor_counts_the_least_operations_and_bytes() -> None:
    """By hand: 28 layers of 15,728,640 entries and 151,936 x 1,024 of the embedding; 57,344 numbers cached a token."""
    layers, embedding, cached = 440_401_920, 155_582_464, 2 * 57_344
    phases = step_phases(SMALL, run_of(dtype="bfloat16"), WORK, H100)
    rollout, update = phases["rollout"], phases["forward and backward"]
    attended = 4 * 28 * 16 * 128 * 600
    assert rollout.operations == 64_000 * (2 * (layers + embedding) + attended) + 2 * layers * 800
    assert rollout.moved == 1000 * (2 * (layers + embedding) + 64 * cached * 600)
    assert rollout.floor(H100) == rollout.moved / 3.35e12
    attention = 6 * 28 * 16 * 128 * 64 * 1100**2
    assert update.operations == 6 * layers * (800 + 64 * 999) + attention + 6 * embedding * 64_000
    assert update.floor(H100) == update.operations / 989e12
    assert phases["optimizer"].moved == 32 * SMALL.parameters, "AdamW reads five matrices and writes three"


@pytest.mark.parametrize("machine", machines())
def test_no_phase_is_planned_below_its_floor(machine: str) -> None:
    for name in ("gpu", "paper"):
        plan = StudyPlan(read_study(ROOT / f"studies/{name}.yaml"), read_machine(machine, None), 8)
        for job in plan.jobs.values():
            for name, phase in job.phases.items():
                assert 0 < phase.floor(job.machine) <= phase.seconds * (1 + 1e-12), name


def test_a_plan_says_what_arms_on_verl_need() -> None:
    study = read_study(ROOT / "studies/night.yaml")
    assert "verl" not in plan_page(StudyPlan(study, H100, 2))
    given = study.model_dump(exclude_unset=True)
    given["training"] |= {"snapshot_every": None}  # verl keeps none
    given["arms"]["dvp"]["training"] = {"backend": "verl"}
    page = plan_page(StudyPlan(parse_study(given), H100, 2))
    assert "verl trains dvp: an environment of its own" in page and "Ray with 2 GPUs" in page
    # Three of verl's checkpoints: weights and moments in float32, and the policy in bfloat16.
    assert f"  disk: {3 * 14 * KNOWN['Qwen/Qwen3-1.7B'].parameters / 1e9:,.1f} GB of verl's own checkpoints" in page


# --- the page ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("response", [200, 1000, 3900, None])
def test_the_shipped_studies_fit_their_devices_at_every_length(response: int | None) -> None:
    eight = plan_page(StudyPlan(paper(), H100, 8, response=response))
    one = plan_page(StudyPlan(read_study(ROOT / "studies/gpu.yaml"), H100, 1, response=response))
    assert "of 80: it fits" in eight and "of 80: it fits" in one
    assert "it does not fit" in plan_page(StudyPlan(paper(), H100, 4, response=response))


@pytest.mark.parametrize(("name", "machine", "hours"), [("afternoon", "4090", 5), ("night", "h100", 12)])
def test_a_study_for_some_hours_fits_its_card_and_them(name: str, machine: str, hours: float) -> None:
    """With every response as long as it may be, and its evaluation on AIME25."""
    study = read_study(ROOT / f"studies/{name}.yaml")
    plan = StudyPlan(study, read_machine(machine, None), 1)
    evaluating = plan.policies * (evaluation_seconds(study, plan.machine) or math.inf)
    assert not plan.refusal and (plan.training_seconds + evaluating) / 3600 < hours
    assert isinstance(study.evaluation.task, Aime25Task)
    assert StudyPlan(study, read_machine(machine, "12GB"), 1).refusal, "with half of the memory it does not"


def test_a_micro_batch_of_four_times_the_tokens_does_not_fit_the_papers_study() -> None:
    """Shorter responses fill it up."""
    study = paper()
    training = study.training.model_copy(update={"token_budget": 32_768})
    larger = study.model_copy(update={"training": training})
    assert "it does not fit" in plan_page(StudyPlan(larger, H100, 8, response=3900))


def test_one_sentence_says_what_would_fit() -> None:
    large = read_study(ROOT / "studies/gpu.yaml")
    large = large.model_copy(update={"policy": large.policy.model_copy(update={"path": "Qwen/Qwen3-4B-Base"})})
    said = StudyPlan(large, H100, 1).refusal
    assert said == (
        "a policy of 4.0 billion parameters does not fit 1 x 80 GB: arm naive lacks 5.3 GB of each, where its largest "
        "part is optimizer state; 2 such devices would (--set-resources train:ranks=2) or 1 of 96 GB would"
    )
    assert plan_page(StudyPlan(large, H100, 1)).startswith(f"gpu: does not fit: {said}\n")
    assert plan_page(StudyPlan(large, H100, 2)).startswith("gpu: fits 2 x 80 GB\n")
    assert not StudyPlan(large, H100, 2).refusal
    assert not StudyPlan(large, H100.model_copy(update={"memory": 96e9}), 1).refusal
    assert StudyPlan(paper(), H100.model_copy(update={"memory": 6e9}), 64).refusal.endswith("; 64 of 48 GB would")


def test_a_plan_says_whose_speed_it_has(tmp_path: Path) -> None:
    """Another memory leaves the H100's speed, and the plan says so; a file has its own."""
    file = tmp_path / "card.yaml"
    file.write_text("{memory: 24e9, matmul: 165e12, bandwidth: 1.01e12}", encoding="utf-8")
    speeds = (read_machine(None, "24GB"), read_machine(str(file), None), read_machine("4090", None))
    small, card, named = (plan_page(StudyPlan(paper(), machine, 8)) for machine in speeds)
    assert small.count("at the speed of H100 SXM") == 2 and "--machine h100, h200" in small
    assert card.count(f"at the speed of the machine of {file}") == 2 and "--machine h100" not in card
    assert named.count("at the speed of RTX 4090") == 2
    assert small.startswith("paper: does not fit: ") and card.startswith("paper: does not fit: ")


def test_the_plan_of_the_papers_study() -> None:
    eight, four = (plan_page(StudyPlan(paper(), H100, devices)) for devices in (8, 4))
    assert "14,768.3 million, 13,212.5 without embedding and head" in eight
    assert "4,194,304 sampled tokens" in eight
    assert "vLLM has 28% of each of the 4 that share one, with room for 43 sequences" in eight
    assert "its largest part is optimizer state" in four


def test_policies_are_the_base_and_every_snapshot() -> None:
    study = paper().model_copy(update={"seeds": (0, 1)})
    assert list(study.training.snapshots) == list(range(25, 500, 25))
    assert "of evaluating 121 policies" in plan_page(StudyPlan(study, H100, 8)), "1 + 3 arms x 2 seeds x 20"
    naive = study.arms["naive"].model_copy(update={"seeds": (0, 1, 2, 3, 4)})
    more = plan_page(StudyPlan(study.model_copy(update={"arms": study.arms | {"naive": naive}}), H100, 8))
    assert "3 arms, 9 runs, a job on 8" in more and "of evaluating 181 policies" in more, "1 + (5 + 2 + 2) x 20"
    unknown = parse_study(
        {
            "name": "s",
            "policy": {"source": "pretrained", "path": "Qwen/Qwen3-0.6B"},
            "arms": {"naive": {}},
            "evaluation": {"task": {"name": "dapo_math"}},
        }
    )
    assert "how many problems it has is not known before" in plan_page(StudyPlan(unknown, H100, 1))


def test_ranks_share_the_policys_file_on_a_machine() -> None:
    run, four = run_of(), 4 * LARGE.parameters
    assert host_bytes(SMALL, run, WORK, 1) == (4 + 2 * 12) * SMALL.parameters
    assert host_bytes(LARGE, run, WORK, 1) == four + 2 * 2**33, "a checkpoint is written in parts"
    assert host_bytes(LARGE, run, WORK, 8) == 2 * four + 2 * 2**33


def test_a_machine_is_read(tmp_path: Path) -> None:
    assert read_machine(None, None) == Machine()
    assert (read_machine(None, "40GB").memory, read_machine(None, "40 GiB").memory) == (40e9, 40 * 2**30)
    (tmp_path / "m.yaml").write_text("name: A100\nmatmul: 312.0e12\n", encoding="utf-8")
    assert read_machine(str(tmp_path / "m.yaml"), None).matmul == 312e12
    assert (read_machine("L40S", None).memory, read_machine("l40s", "40GB").memory) == (48e9, 40e9)
    assert read_machine("l40s", "40GB").matmul == 362e12 and not read_machine("laptop", None).gpu
    with pytest.raises(StudyError, match=r"^--machine 5090: no file, and none of h100, h200, l40s, 4090, laptop$"):
        read_machine("5090", None)
    with pytest.raises(StudyError, match=r"--memory 80: write it as 80GB or 80GiB"):
        read_machine(None, "80")
    (tmp_path / "m.yaml").write_text("matmull: 1.0\n", encoding="utf-8")
    with pytest.raises(StudyError, match=r"matmull is not a known key \(did you mean 'matmul'\?\)"):
        read_machine(str(tmp_path / "m.yaml"), None)


@pytest.mark.parametrize(("memory", "code"), [("80GB", 0), ("24GB", 1)])
def test_the_command_ends_with_1_where_a_study_does_not_fit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], memory: str, code: int
) -> None:
    monkeypatch.setattr("sys.argv", ["tailrl", "plan", str(ROOT / "studies/gpu.yaml"), "--memory", memory])
    with pytest.raises(SystemExit) as ended:
        run()
        raise SystemExit(0)  # it returned
    assert ended.value.code == code
    assert capsys.readouterr().out.startswith("gpu: fits 1 x 80 GB" if code == 0 else "gpu: does not fit: ")
