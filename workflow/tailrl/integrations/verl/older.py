"""The log of tokens for verl's older trainer, `trainer.use_v1=false`; DVP is for its present trainers alone."""

import functools
from typing import Any

from tailrl.integrations.verl import log
from tailrl.integrations.verl.checks import check_run
from tailrl.integrations.verl.settings import Log
from tailrl.integrations.verl.trainer import settings_of
from tailrl.runtime.errors import ConfigurationError


def check(trainer: Any) -> Log | None:
    """The log that a run asks for; None if it asks for nothing. Raises StudyError where it would be wrong."""
    if trainer.config.get("tailrl") is None:
        return None
    settings = settings_of(trainer.config)
    if settings.dvp or settings.watch or settings.log is None:
        raise ConfigurationError("tailrl: DVP and alarms need verl's present trainers: set trainer.use_v1=true")
    check_run(trainer.config, settings)
    if not trainer.config.trainer.get("rollout_data_dir"):
        raise ConfigurationError(
            "tailrl: set trainer.rollout_data_dir: the older trainer shows a batch only where it logs texts"
        )
    if (trainer.config.algorithm.get("rollout_correction") or {}).get("rollout_rs"):
        raise ConfigurationError(
            "tailrl: rollout_rs takes what it rejects out of the mask before the older trainer shows a batch"
        )
    print(f"tailrl: {type(trainer).__name__} logs tokens in {settings.log.folder}", flush=True)
    return settings.log


def write(trainer: Any, data: Any, settings: Log) -> None:
    """Log a batch of the older trainer: padded tensors [B, P] and [B, C]."""
    columns = data.batch
    log.require(columns.keys())
    attended = columns["attention_mask"].bool()
    prompt_length, count = columns["prompts"].shape[1], len(columns["responses"])
    real = [(attended[i, :prompt_length], attended[i, prompt_length:]) for i in range(count)]
    names = ("responses", "response_mask", "advantages", *log.TOKENS.values())
    rows = {name: [columns[name][i][response_C] for i, (_, response_C) in enumerate(real)] for name in names}
    rows["prompts"] = [columns["prompts"][i][prompt_P] for i, (prompt_P, _) in enumerate(real)]
    values: dict[str, Any] = {
        "text": [trainer.tokenizer.decode(ids, skip_special_tokens=True) for ids in rows["responses"]]
    }
    if "data_source" in data.non_tensor_batch:
        values["data_source"] = [str(source) for source in data.non_tensor_batch["data_source"]]
    logged = log.Batch(
        columns=rows,
        masks=rows["response_mask"],
        rewards=columns["token_level_scores"].sum(-1).tolist(),
        advantages=rows["advantages"],
        extra={},
        rows=values,
    )
    step = trainer.global_steps
    table = list(log.rows(logged, log.chosen(step, range(count), settings.responses), step))
    path = log.write(table, settings, str(step))
    if not getattr(trainer, "_tailrl_said_size", False):
        print(f"tailrl: {log.size_of(path, len(table), count, settings.every)}", flush=True)
        trainer._tailrl_said_size = True


def register() -> None:
    """Lets verl's older trainer log tokens where its configuration asks for it."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    plain_fit, plain_log = RayPPOTrainer.fit, RayPPOTrainer._log_rollout_data

    @functools.wraps(plain_fit)
    def fit(self: Any) -> Any:
        self._tailrl_log = check(self)
        return plain_fit(self)

    @functools.wraps(plain_log)
    def log_rollout_data(self: Any, batch: Any, *rest: Any, **named: Any) -> Any:
        settings = getattr(self, "_tailrl_log", None)
        if settings and self.global_steps % settings.every == 0:
            write(self, batch, settings)
        return plain_log(self, batch, *rest, **named)

    RayPPOTrainer.fit, RayPPOTrainer._log_rollout_data = fit, log_rollout_data
