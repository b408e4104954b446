"""What a run asks of the plugin: the key `tailrl` of verl's configuration."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from tailrl.config.base import MOST_RESPONSES, MOST_STEPS, Settings
from tailrl.config.messages import sentences
from tailrl.runtime.errors import ConfigurationError

LEAST_LOG_RHO = -30.0  # nats; with it a log-prob within the set stays above the fill of a token outside


class Dvp(Settings):
    """Dynamic Vocabulary Pruning."""

    log_rho: float = Field(
        -13.0, ge=LEAST_LOG_RHO, le=0.0, description="ln ρ: tokens with at least ρ times the largest probability stay"
    )


class Log(Settings):
    """The log of tokens."""

    folder: str = Field(description="gets one file a logged step")
    every: int = Field(1, ge=1, le=MOST_STEPS, description="log each n-th step")
    responses: int = Field(64, ge=1, le=MOST_RESPONSES, description="responses of a logged step, drawn at random")
    format: Literal["jsonl", "parquet"] = "jsonl"


class Plugin(Settings):
    """Everything under `tailrl`; a part that is not there is off."""

    dvp: Dvp | None = None
    log: Log | None = None
    watch: bool = Field(False, description="the alarms of `tailrl watch` and its table by lag, in verl's metrics")

    @property
    def words(self) -> str:
        """What is on, for the line at a run's start."""
        dvp = f"DVP with ln ρ = {self.dvp.log_rho:g}" if self.dvp else "no DVP"
        log = self.log
        logged = f"{log.responses} responses of each {log.every}. step logged in {log.folder}" if log else "no log"
        return f"{dvp}, {logged}, {'alarms' if self.watch else 'no alarms'}"


def read_settings(given: Mapping[str, Any] | None) -> Plugin:
    """The plugin's settings, from plain values; raises StudyError where they ask for nothing or cannot be."""
    try:
        settings = Plugin.model_validate(given or {})
    except ValidationError as error:
        raise ConfigurationError(f"tailrl: {sentences(error, Plugin)}") from None
    if settings == Plugin():
        raise ConfigurationError(
            "tailrl: trainer.v1.trainer_mode names this plugin, and nothing is asked of it: add "
            "+tailrl.dvp.log_rho=-13, +tailrl.log.folder=FOLDER or +tailrl.watch=true"
        )
    return settings
