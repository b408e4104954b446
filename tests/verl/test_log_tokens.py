"""The tutorial's hook with verl's own trainers, batches and queue (`make verl`). No model is trained."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hydra
import pytest
import ray
import torch
import transfer_queue as tq
from pages_fixture import blocks
from tensordict import TensorDict
from tensordict.tensorclass import NonTensorStack

from tailrl import diagnose

TUTORIAL = "tutorials/diagnose-a-log.md"
LENGTHS = (3, 1, 2)
INFER = [[-1.0, -0.5, -0.25], [-2.0], [-3.0, -0.125]]
TRAIN = [[-1.5, -0.5, -0.25], [-1.0], [-3.0, -0.25]]
MASKS = [[1, 0, 1], [1], [1, 1]]  # the second token of the first response is a tool's
REAL = [True, True, False]  # the third response fills the batch up


@pytest.fixture(scope="session")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The hook, imported by verl itself as the tutorial says: before any of its trainers is made."""
    folder = tmp_path_factory.mktemp("hook")
    [code] = blocks(TUTORIAL, "python")
    (folder / "log_tokens.py").write_text(code, encoding="utf-8")
    sys.path.insert(0, str(folder))
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "log_tokens"
    import verl  # noqa: F401

    return sys.modules["log_tokens"]


@pytest.fixture(scope="session")
def config(hook: Any) -> Any:
    """verl's own default configuration of its PPO trainers."""
    folder = Path(sys.modules[hook.PPOTrainer.__module__].__file__ or "").parents[2] / "config"
    with hydra.initialize_config_dir(str(folder), version_base=None):
        return hydra.compose("ppo_trainer")


@pytest.fixture(scope="session")
def queue() -> Iterator[None]:
    """The queue of verl's trainers; `tq.init` waits for ever where ray has few cores."""
    ray.init(num_cpus=16, include_dashboard=False)
    tq.init()
    yield
    tq.close()
    ray.shutdown()


def ready(config: Any, folder: Path, *settings: tuple[str, Any]) -> Any:
    """The configuration with the tutorial's settings, and more of them."""
    from omegaconf import OmegaConf

    ready = config.copy()
    lines = [line.split("=") for line in blocks(TUTORIAL, "text")[0].splitlines()]
    assert len(lines) == 3
    for key, value in [*lines, ("trainer.rollout_data_dir", str(folder)), ("trainer.logger", ["console"]), *settings]:
        OmegaConf.update(ready, key, {"true": True, "false": False}.get(str(value), value))
    return ready


def trainer_of(kind: Any, config: Any) -> Any:
    """A trainer at its second step, without workers."""
    trainer = kind.__new__(kind)
    trainer.config, trainer.global_steps = config, 2
    trainer.tokenizer = SimpleNamespace(
        pad_token_id=0, decode=lambda ids, **_: str(ids.tolist()), batch_decode=lambda rows, **_: [str(r) for r in rows]
    )
    return trainer


def jagged(rows: list[list[float]]) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def columns() -> dict[str, list[list[Any]]]:
    return {
        "prompts": [[5, 6]] * 3,
        "responses": [[11, 12, 13], [14], [15, 16]],
        "response_mask": MASKS,
        "rollout_log_probs": INFER,
        "old_log_probs": TRAIN,
        "advantages": [[0.5] * 3, [-0.5], [0.0] * 2],
        "rm_scores": [[0.0, 0.0, 1.0], [0.0], [0.0, 0.0]],
    }


def in_queue(without: str = "") -> Any:
    """The batch in verl's queue: what its trainer has when it logs a step."""
    keys = [f"{without}sample_{i}_0" for i in range(3)]
    fields: dict[str, Any] = {name: jagged(rows) for name, rows in columns().items() if name != without}
    fields["uid"] = NonTensorStack(*keys)
    tags = [{"is_padding": not real} for real in REAL]
    return tq.kv_batch_put(keys=keys, partition_id="train", fields=TensorDict(fields, batch_size=3), tags=tags)


@pytest.mark.parametrize("mode", ["sync", "colocate_async", "separate_async"])
def test_it_is_attached_to_the_class_that_verl_runs(hook: Any, mode: str) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    kind = get_trainer_cls(mode)
    assert kind._log_rollout_data.__module__ == kind.fit.__module__ == hook.__name__


def test_verls_default_trainer_is_one_of_them(config: Any) -> None:
    assert config.trainer.use_v1 and config.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ([("trainer.rollout_data_dir", None)], "set trainer.rollout_data_dir"),
        ([("actor_rollout_ref.rollout.calculate_log_probs", "false")], "set .*calculate_log_probs=true"),
        ([("algorithm.rollout_correction.bypass_mode", "true")], "bypass_mode=true copies"),
        ([("algorithm.rollout_correction.rollout_rs", "token_k1")], "rollout_rs takes"),
    ],
)
def test_a_run_that_would_log_nothing_ends_at_its_start(
    config: Any, tmp_path: Path, settings: list[tuple[str, Any]], words: str
) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    trainer = trainer_of(get_trainer_cls("sync"), ready(config, tmp_path, *settings))
    with pytest.raises(RuntimeError, match=f"log_tokens: {words}"):
        trainer.fit(None)


def test_a_class_with_a_method_of_its_own_ends_too(config: Any, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    kind = type("Mine", (get_trainer_cls("sync"),), {"_log_rollout_data": lambda *_: None})
    with pytest.raises(RuntimeError, match="Mine overrides _log_rollout_data"):
        trainer_of(kind, ready(config, tmp_path)).fit(None)


def test_a_run_that_logs_says_so_and_goes_on(config: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It ends in verl's own `fit`, which misses the workers."""
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    with pytest.raises(AttributeError):
        trainer_of(get_trainer_cls("sync"), ready(config, tmp_path)).fit(None)
    assert f"log_tokens: PPOTrainerSync logs tokens in {tmp_path}/tokens\n" in capsys.readouterr().out


@pytest.mark.usefixtures("queue")
def test_a_batch_of_the_queue_is_logged_and_diagnosed(config: Any, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    trainer = trainer_of(get_trainer_cls("sync"), ready(config, tmp_path))
    trainer._init_dump_executor()
    trainer._log_rollout_data(in_queue(), {}, str(tmp_path))
    trainer._shutdown_dump_executor()
    assert len((tmp_path / "2.jsonl").read_text().splitlines()) == 3, "verl's own text log is as before"
    rows = [json.loads(line) for line in (tmp_path / "tokens/2.jsonl").read_text().splitlines()]
    assert rows == [
        {"token_ids": [11, 13], "sampler_logprobs": [-1.0, -0.25], "trainer_logprobs": [-1.5, -0.25],
         "advantage": [0.5, 0.5], "step": 2, "reward": 1.0},
        {"token_ids": [14], "sampler_logprobs": [-2.0], "trainer_logprobs": [-1.0],
         "advantage": [-0.5], "step": 2, "reward": 0.0},
    ]  # fmt: skip
    measured = diagnose(tmp_path / "tokens").measured
    assert (measured.sequences, measured.tokens) == (2, 3) and measured.extremes["abs_logp_max"] == 1.0


@pytest.mark.usefixtures("queue")
def test_a_batch_without_the_samplers_log_probs_is_one_sentence(config: Any, tmp_path: Path) -> None:
    from verl.trainer.ppo.v1.trainer_base import get_trainer_cls

    trainer = trainer_of(get_trainer_cls("sync"), ready(config, tmp_path))
    with pytest.raises(RuntimeError, match="log_tokens: verl's batch has no rollout_log_probs"):
        trainer._log_rollout_data(in_queue(without="rollout_log_probs"), {}, str(tmp_path))


def test_the_older_trainer_is_logged_too(config: Any, tmp_path: Path) -> None:
    from verl import DataProto
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    pad = {name: torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
           for name, rows in columns().items()}  # fmt: skip
    pad["token_level_scores"] = pad.pop("rm_scores")
    trainer = trainer_of(RayPPOTrainer, ready(config, tmp_path))
    trainer._dump_generations = lambda **_: None
    trainer._log_rollout_data(DataProto.from_dict(pad), {}, {}, str(tmp_path))
    measured = diagnose(tmp_path / "tokens").measured
    assert (measured.sequences, measured.tokens) == (3, 5)
    with pytest.raises(RuntimeError, match=r"log_tokens: set trainer\.rollout_data_dir"):
        trainer_of(RayPPOTrainer, config).fit()


def test_a_verl_without_the_method_ends_at_the_import() -> None:
    code = "from verl.trainer.ppo.v1 import PPOTrainer; del PPOTrainer._log_rollout_data; import log_tokens"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("VERL_USE_EXTERNAL_MODULES")
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert ended.returncode == 1 and "has no attribute '_log_rollout_data'" in ended.stderr
