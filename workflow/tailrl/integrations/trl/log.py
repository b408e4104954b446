"""Writes what TRL's trainers sample as a log for `tailrl diagnose`."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tailrl.diagnosis.formats import SCHEMA
from tailrl.integrations.trl.trainer import OLD, SAMPLER, DVPMixin
from tailrl.runtime.errors import DataError

LOGPROBS = {
    SAMPLER: "the sampler's log-probs; use_vllm=True makes TRL keep them",
    OLD: "the trainer's log-probs from before the update; with use_vllm=True, "
    "vllm_importance_sampling_correction=True makes TRL compute them",
}
"""Keys of TRL's batches, log-probs [N, C], with what a batch without them lacks."""


def with_log(trainer: type, folder: str | Path) -> Any:
    """A subclass of GRPOTrainer, or of what `with_dvp` made, that also logs each training batch that it samples.

    Args:
        trainer: the class.
        folder: gets `rank_<n>.jsonl` from each process, one response a line, in the plain schema
            (docs/how-to/log-schema.md). A file that is there is gone on with.

    Raises:
        StudyError: at the first batch, if it lacks one side's log-probs.
    """
    return type(f"Logged{trainer.__name__}", (LogMixin, trainer), {"folder": Path(folder), "__doc__": trainer.__doc__})


class RowsMixin:
    """Gives each training batch that one of TRL's trainers samples, as rows of the plain schema, to `_take_rows`."""

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        batch: dict[str, Any] = super()._generate_and_score_completions(inputs)  # type: ignore[misc]
        trainer = cast(Any, self)
        if trainer.model.training:
            logged = batch
            if OLD not in batch and isinstance(self, DVPMixin):  # TRL has no need of it here
                logged = batch | {OLD: self.score_batch(batch)}
            self._take_rows(list(batch_rows(trainer, logged)))
        return batch

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        """What the classes above and below do with a batch's rows; each calls the next."""


class LogMixin(RowsMixin):
    """A base class to go before one of TRL's trainers, as `with_log` puts it."""

    folder: Path

    def _take_rows(self, rows: list[dict[str, Any]]) -> None:
        super()._take_rows(rows)
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"rank_{cast(Any, self).accelerator.process_index}.jsonl"
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)


def batch_rows(trainer: Any, batch: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The responses of a batch of TRL's in the plain schema. The mask leaves out the tokens of tools.

    With `with_dvp` it also leaves out sampled tokens outside the trainer's safe set. Their log-prob is −inf by
    definition. Their loss term is a constant, and no ratio has them.
    """
    for key, words in LOGPROBS.items():
        if key not in batch:
            raise DataError(f"with_log: TRL's batch has no {key}, {words}")
    texts = trainer.processing_class.batch_decode(batch["completion_ids"], skip_special_tokens=True)
    version = getattr(trainer, "_last_loaded_step", None)
    for i, text in enumerate(texts):
        real_C = batch["completion_mask"][i].bool()

        def own(key: str, i: int = i, real_C: Any = real_C) -> Any:
            return batch[key][i][real_C].tolist()

        row = {
            "prompt": batch["prompt_ids"][i][batch["prompt_mask"][i].bool()].tolist(),
            "token_ids": own("completion_ids"),
            "sampler_logprobs": own(SAMPLER),
            "trainer_logprobs": own(OLD),
            "advantage": batch["advantages"][i].item(),
            "step": trainer.state.global_step,
            "text": text,
            "framework": "TRL",
            "schema": SCHEMA,
        }
        if "tool_mask" in batch:
            row["mask"] = own("tool_mask")
        if isinstance(trainer, DVPMixin):
            inside = [int(value > -math.inf) for value in row["trainer_logprobs"]]
            row["mask"] = [a * b for a, b in zip(row.get("mask", inside), inside, strict=True)]
        if trainer.use_vllm and version is not None:
            row["version"] = version
        yield row
