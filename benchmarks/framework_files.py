"""Writes the sample files of `tests/fixtures/framework_files/` with the frameworks' own writers, from unpacked wheels.

    PYTHONPATH=workflow:benchmarks:tests/fixtures python benchmarks/framework_files.py FOLDER

FOLDER has what each wheel or checkout holds, under the names of SOURCES; `pip download --no-deps` gets the wheels, and
tensordict must be importable. What a writer imports beside is replaced by small stubs; the writer itself is executed.
"""

import argparse
import ast
import asyncio
import json
import os
import pickle
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, Literal, Optional, TypedDict, TypeVar, Union
from unittest import mock

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import torch
from framework_calls import Loose, definitions

SEQUENCES = import_module("log_fixture").SEQUENCES
OUT = Path(__file__).parents[1] / "tests/fixtures/framework_files"
SOURCES = {
    "verl": "verl 0.9.1",
    "trl": "trl 1.16.0",
    "ms_swift": "ms-swift 4.6.0",
    "areal": "areal 1.0.4",
    "skyrl": "skyrl 0.3.0",
    "openrlhf": "openrlhf 0.11.2",
    "torchtitan": "torchtitan 0.3.0",
    "tinker_cookbook": "tinker-cookbook 0.6.1",
    "open_instruct": "a checkout at e6c3044",
    "slime": "a checkout at 624b824",
}
STEP = 3
PROMPTS = ["What is 1 + 1?", "What is 2 + 2?", "What is 3 + 3?"]
TEXTS = ["It is 2.", "4", "six"]
REWARDS = [one["reward"] for one in SEQUENCES]
ADVANTAGES = [one["advantage"] for one in SEQUENCES]
TOKENIZER = SimpleNamespace(decode=lambda ids, **_: " ".join(map(str, ids)))


def methods(file: Path, kind: str, names: Sequence[str], needs: Mapping[str, Any], base: type = object) -> Any:
    """A class with these methods of a class in a file, which may call those of `base` by `super()`."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    whole = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == kind)
    body = [node for node in whole.body if getattr(node, "name", "") in names]
    for node in body:
        node.decorator_list = [one for one in node.decorator_list if getattr(one, "id", "") == "staticmethod"]  # type: ignore[attr-defined]
    whole.body, whole.bases, whole.keywords, whole.decorator_list = body, [ast.Name("Base", ast.Load())], [], []
    future = ast.parse("from __future__ import annotations").body
    space: dict[str, Any] = {"Base": base, "__name__": "framework", **needs}
    exec(compile(ast.fix_missing_locations(ast.Module([*future, whole], [])), str(file), "exec"), space)
    return space[kind]


def column(name: str) -> list[Any]:
    return [one[name] for one in SEQUENCES]


def padded(rows: Sequence[Sequence[float]], fill: float = 0.0) -> torch.Tensor:
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[fill] * (longest - len(row))] for row in rows])


def rectangle() -> dict[str, torch.Tensor]:
    """Both sides' log-probs of the responses [N, T], ids and mask, padded on the right."""
    return {
        "tokens": padded(column("tokens"), 0),
        "infer": padded(column("infer")),
        "train": padded(column("train")),
        "mask": padded([[1.0] * len(one["tokens"]) for one in SEQUENCES]),
        "advantages": padded([[one["advantage"]] * len(one["tokens"]) for one in SEQUENCES]),
    }


# --- texts -----------------------------------------------------------------------------------------------


def verl(source: Path) -> None:
    """verl/trainer/ppo/ray_trainer.py:453, _write_generations; and verl/protocol.py:318, DataProto.save_to_disk."""
    trainer = methods(
        source / "verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer", ["_write_generations"], {"os": os, "json": json}
    )
    trainer._write_generations(
        PROMPTS, TEXTS, ["2", "4", "6"], REWARDS, {"acc": [True, False, True]}, str(OUT / "verl_rollouts"), STEP
    )
    from tensordict import TensorDict

    needs = {"pickle": pickle, "np": np, "TensorDict": TensorDict, "__name__": "verl.protocol"}
    proto = methods(source / "verl/protocol.py", "DataProto", ["save_to_disk"], needs)
    proto.__module__ = "verl.protocol"
    module = ModuleType("verl.protocol")
    module.DataProto = proto  # type: ignore[attr-defined]
    batch = rectangle()
    names = {
        "responses": "tokens", "rollout_log_probs": "infer", "old_log_probs": "train", "response_mask": "mask",
        "advantages": "advantages",
    }  # fmt: skip
    tensors = TensorDict({name: batch[key] for name, key in names.items()}, batch_size=len(SEQUENCES))
    made = proto()
    made.batch, made.meta_info = tensors, {"global_steps": STEP}
    (OUT / "verl").mkdir(parents=True, exist_ok=True)
    with mock.patch.dict(sys.modules, {"verl": ModuleType("verl"), "verl.protocol": module}):
        made.save_to_disk(OUT / "verl/batch.pkl")
    torch.save(tensors, OUT / "verl/tensordict.pt")
    torch.save(dict(tensors.items()), OUT / "verl/columns.pt")


def trl(source: Path) -> None:
    """trl/trainer/grpo_trainer.py:3301, GRPOTrainer.log, with log_completions."""

    class Base:
        def log(self, logs: Any, start_time: Any = None) -> None:
            pass

    needs = {"pd": pd, "os": os, "is_rich_available": lambda: False, "strip_images_from_messages": lambda text: text}
    trainer = methods(source / "trl/trainer/grpo_trainer.py", "GRPOTrainer", ["log"], needs, Base)()
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": {}, "eval": {}}
    trainer.state = SimpleNamespace(global_step=STEP)
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    trainer.log_completions = True
    trainer.args = Loose(output_dir=str(OUT / "trl"), report_to=[])
    trainer._logs = {
        "prompt": PROMPTS, "completion": TEXTS, "rewards": {"accuracy": REWARDS}, "extra": {}, "advantages": ADVANTAGES,
        "images": [],
    }  # fmt: skip
    (OUT / "trl/completions").mkdir(parents=True, exist_ok=True)
    trainer.log({}, None)


def ms_swift(source: Path) -> None:
    """swift/rlhf_trainers/grpo_trainer.py:1865, GRPOTrainer.log, and swift/utils/io_utils.py:36, JsonlWriter."""

    class Base:
        def log(self, logs: Any, start_time: Any = None) -> None:
            pass

    shape = definitions(
        source / "swift/utils/utils.py", {"Sequence": Sequence, "Mapping": Mapping}, "check_json_format"
    )
    writer = definitions(
        source / "swift/utils/io_utils.py",
        {
            "os": os, "json": json, "Queue": Queue, "Dict": dict, "List": list, "Union": Union, "Literal": Literal,
            "is_master": lambda: True, "dist": SimpleNamespace(is_initialized=lambda: False),
            "check_json_format": shape.check_json_format, "logger": mock.MagicMock(),
        },
        "JsonlWriter",
    )  # fmt: skip
    needs = {
        "version": SimpleNamespace(parse=lambda text: text), "transformers": SimpleNamespace(__version__="5"),
        "pd": pd, "swanlab_get_run": lambda: None, "is_wandb_available": lambda: False,
    }  # fmt: skip
    trainer = methods(source / "swift/rlhf_trainers/grpo_trainer.py", "GRPOTrainer", ["log"], needs, Base)()
    trainer.model = SimpleNamespace(training=True)
    trainer._metrics = {"train": {}, "eval": {}}
    trainer.state = SimpleNamespace(global_step=STEP)
    trainer.accelerator = SimpleNamespace(is_main_process=True)
    trainer.log_completions = True
    trainer.args = Loose(report_to=[])
    trainer.jsonl_writer = writer.JsonlWriter(str(OUT / "ms_swift/completions.jsonl"))
    trainer._logs = {
        "prompt": PROMPTS, "completion": TEXTS, "rewards": {"accuracy": REWARDS}, "advantages": ADVANTAGES, "image": [],
    }  # fmt: skip
    trainer.log({}, None)


def areal(source: Path) -> None:
    """areal/infra/workflow_executor.py:835, _dump_trajectory; the trajectory is that of areal/workflow/rlvr.py:176."""

    class Opened:
        def __init__(self, path: str, mode: str) -> None:
            self.file = Path(path).open(mode, encoding="utf-8")  # noqa: SIM115

        async def __aenter__(self) -> "Opened":
            return self

        async def __aexit__(self, *_: object) -> None:
            self.file.close()

        async def write(self, text: str) -> None:
            self.file.write(text)

    async def makedirs(path: str, exist_ok: bool) -> None:
        Path(path).mkdir(parents=True, exist_ok=exist_ok)

    needs = {
        "os": os, "json": json, "RTensor": SimpleNamespace(localize=lambda traj: traj),
        "aiofiles": SimpleNamespace(open=Opened, os=SimpleNamespace(makedirs=makedirs)),
    }  # fmt: skip
    executor = methods(source / "areal/infra/workflow_executor.py", "WorkflowExecutor", ["_dump_trajectory"], needs)()
    executor._get_dump_dir = lambda _: str(OUT / "areal")
    executor._get_tokenizer = lambda: TOKENIZER
    for number, one in enumerate(SEQUENCES):
        prompt, tokens = one["prompt"], one["tokens"]
        trajectory = {
            "input_ids": torch.tensor([prompt + tokens]),
            "loss_mask": torch.tensor([[0] * len(prompt) + [1] * len(tokens)]),
            "logprobs": torch.tensor([[0.0] * len(prompt) + one["infer"]]),
            "versions": torch.tensor([[-1] * len(prompt) + [STEP] * len(tokens)]),
            "attention_mask": torch.ones(1, len(prompt) + len(tokens), dtype=torch.bool),
            "rewards": torch.tensor([one["reward"]]),
        }
        asyncio.run(executor._dump_trajectory(trajectory, number, is_eval=False))


def skyrl(source: Path) -> None:
    """skyrl/train/utils/trainer_utils.py:323, and TensorBatch.save of skyrl_train/training_batch.py:393."""
    dump = definitions(
        source / "skyrl/train/utils/trainer_utils.py",
        {
            "json": json, "Path": Path, "List": list, "Dict": dict, "logger": mock.MagicMock(),
            "sanitize_data_source": lambda name: name,
        },
        "dump_per_dataset_eval_results",
    )  # fmt: skip
    folder = OUT / "skyrl_eval"
    folder.mkdir(parents=True, exist_ok=True)
    outputs = {
        "prompt_token_ids": column("prompt"), "response_ids": column("tokens"), "rewards": REWARDS,
        "stop_reasons": ["stop"] * 3,
    }  # fmt: skip
    dump.dump_per_dataset_eval_results(
        folder, TOKENIZER, outputs, ["sums"] * 3, ["math"] * 3, [{}] * 3, {"eval/sums/avg_score": 0.5}
    )
    name = "skyrl.backends.skyrl_train.training_batch"
    import io

    jaxtyping = mock.MagicMock()
    needs = {
        "io": io, "pickle": pickle, "np": np, "Dict": dict, "List": list, "Generic": Generic, "TypeVar": TypeVar,
        "TypedDict": TypedDict, "DictType": TypeVar("DictType"), "Optional": Optional, "Float": jaxtyping,
        "Integer": jaxtyping, "__name__": name,
    }  # fmt: skip
    classes = ["TensorList", "TensorBatch", "TrainingInput", "TrainingInputBatch", "_rebuild_tensor_batch"]
    kinds = definitions(
        source / "skyrl/backends/skyrl_train/training_batch.py",
        needs,
        "_serialize_tensor",
        "_deserialize_tensor",
        *classes,
    )
    module = ModuleType(name)
    for one in classes:
        setattr(module, one, getattr(kinds, one))
    batch = rectangle()
    prompts = [[0] * (2 - len(prompt)) + prompt for prompt in column("prompt")]  # padded on the left
    made = kinds.TrainingInputBatch(
        {
            "sequences": torch.cat([torch.tensor(prompts), batch["tokens"]], 1),
            "rollout_logprobs": batch["infer"],
            "action_log_probs": batch["train"],
            "loss_mask": batch["mask"],
            "advantages": batch["advantages"],
        }
    )
    (OUT / "skyrl/dumped_data").mkdir(parents=True, exist_ok=True)
    above = ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train")
    with mock.patch.dict(sys.modules, {**{parent: ModuleType(parent) for parent in above}, name: module}):
        made.save(OUT / f"skyrl/dumped_data/global_step_{STEP}_training_input.pkl")
    torch.save({key: value for key, value in made.items() if torch.is_tensor(value)}, OUT / "skyrl/columns.pt")


def openrlhf(source: Path) -> None:
    """openrlhf/trainer/ppo_utils/experience.py:30, Experience, whose tensors are saved."""
    (file,) = source.glob("**/openrlhf/trainer/ppo_utils/experience.py")
    needs = {"dataclass": dataclass, "field": field, "fields": fields, "List": list, "Union": Union}
    kinds = definitions(file, needs, "Experience", "tensor_field", "to", "pin_memory")
    made = []
    for one in SEQUENCES:
        count = len(one["tokens"])
        before = len(one["prompt"]) - 1  # an action for each token but the first
        made.append(
            kinds.Experience(
                sequences=torch.tensor([one["prompt"] + one["tokens"]]),
                action_mask=torch.tensor([[False] * before + [True] * count]),
                rollout_log_probs=torch.tensor([[0.0] * before + one["infer"]]),
                action_log_probs=torch.tensor([[-9.0] * before + one["train"]]),
                advantages=torch.tensor([[0.0] * before + [one["advantage"]] * count]),
                rewards=torch.tensor([one["reward"]]),
            )
        )
    (OUT / "openrlhf").mkdir(parents=True, exist_ok=True)
    rows = [{name: value for name, value in vars(one).items() if torch.is_tensor(value)} for one in made]
    torch.save(rows, OUT / "openrlhf/columns.pt")


def torchtitan(source: Path) -> None:
    """torchtitan/experiments/rl/rollout_recorder.py:99, RolloutSampleRecorder.record, with its tensors."""
    needs = {"json": json, "_json_default": str}
    recorder = methods(
        source / "torchtitan/experiments/rl/rollout_recorder.py",
        "RolloutSampleRecorder",
        ["record", "_encode_rollout", "_encode_turn"],
        needs,
    )()
    recorder._filter = lambda groups: groups
    recorder._log_tensors = recorder._log_logprobs = True
    recorder._path = OUT / "torchtitan/rollout_samples.jsonl"
    recorder._path.parent.mkdir(parents=True, exist_ok=True)
    rollouts = []
    for number, one in enumerate(SEQUENCES):
        turn = Loose(
            rollout_id=SimpleNamespace(turn_id=0), prompt_token_ids=one["prompt"], completion_token_ids=one["tokens"],
            completion_logprobs=one["infer"],
        )  # fmt: skip
        rollouts.append(
            Loose(group_id=0, rollout_id=number, status="done", reward=one["reward"], reward_breakdown={}, turns=[turn])
        )
    recorder.record(is_validation=False, rollout_groups=rollouts)


def tinker_cookbook(source: Path) -> None:
    """tinker_cookbook/rl/rollout_logging.py:72, serialize_rollout_summaries; its store writes one record a line."""
    needs = {
        "Sequence": Sequence, "logger": mock.MagicMock(), "safezip": lambda *parts: zip(*parts, strict=True),
        "dataclass": dataclass,
    }  # fmt: skip
    writer = definitions(
        source / "tinker_cookbook/rl/rollout_logging.py", needs, "_json_safe", "serialize_rollout_summaries"
    )
    transitions = [
        [Loose(ob=Loose(length=len(one["prompt"])), ac=Loose(tokens=one["tokens"]), reward=one["reward"])]
        for one in SEQUENCES
    ]
    group = SimpleNamespace(
        get_total_rewards=lambda: REWARDS, final_rewards_G=REWARDS, metrics_G=[{}] * 3,
        trajectories_G=[Loose(transitions=one, final_ob=Loose(length=9)) for one in transitions],
    )  # fmt: skip
    records = writer.serialize_rollout_summaries(
        split="train", iteration=STEP, trajectory_groups_P=[group], taglist_P=[["sums"]]
    )
    file = OUT / "tinker_cookbook/train_rollout_summaries.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def open_instruct(source: Path) -> None:
    """open_instruct/rl_utils.py:84, _save_rollouts, with save_traces."""
    needs = {
        "os": os, "json": json, "dataclass": dataclass, "asdict": asdict, "np": np, "logger": mock.MagicMock(),
        "data_types": mock.MagicMock(), "model_utils": mock.MagicMock(),
    }  # fmt: skip
    writer = definitions(
        source / "open_instruct/rl_utils.py", needs, "RolloutRecord", "_save_rollouts", "_get_request_info_for_sample"
    )
    batch = SimpleNamespace(
        queries=column("prompt"), scores=REWARDS, datasets=["sums"] * 3, ground_truths=[[1], [2], [3]]
    )
    result = SimpleNamespace(
        responses=column("tokens"), finish_reasons=["stop"] * 3, request_info=None, logprobs=column("infer")
    )
    writer._save_rollouts(str(OUT / "open_instruct"), "run", STEP, batch, result, np.array(ADVANTAGES), 3, 0)


def slime(source: Path) -> None:
    """slime/observability/rollout_data_utils.py:140, and Sample.to_dict of slime/utils/types.py:222."""
    needs = {"dataclass": dataclass, "field": field, "Enum": Enum, "Union": Union, "Tuple": tuple, "np": np}
    sample = definitions(source / "slime/utils/types.py", needs, "Sample").Sample
    writer = definitions(
        source / "slime/observability/rollout_data_utils.py",
        {"Path": Path, "logger": mock.MagicMock(), "Sample": sample},
        "save_debug_rollout_data",
    )
    samples = [
        sample(
            group_index=0, index=number, prompt=PROMPTS[number], tokens=one["prompt"] + one["tokens"],
            response=TEXTS[number], response_length=len(one["tokens"]), reward=one["reward"],
            rollout_log_probs=one["infer"],
        )
        for number, one in enumerate(SEQUENCES)
    ]  # fmt: skip
    where = str(OUT / "slime_rollouts/{rollout_id}.pt")
    writer.save_debug_rollout_data(where, samples, rollout_id=STEP, evaluation=False)
    writer.save_debug_rollout_data(where, {"sums": {"samples": samples}}, rollout_id=STEP, evaluation=True)


WRITERS = (verl, trl, ms_swift, areal, skyrl, openrlhf, torchtitan, tinker_cookbook, open_instruct, slime)

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    sys.modules["framework"] = ModuleType("framework")  # where dataclasses look for the names in annotations
    shutil.rmtree(OUT, ignore_errors=True)  # most writers append
    for write in WRITERS:
        write(folder / write.__name__)
