"""verl's trainers with the plugin in them, by the names of `MODES`."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tailrl.integrations.verl import log
from tailrl.integrations.verl.alarms import Watching
from tailrl.integrations.verl.checks import check_run
from tailrl.integrations.verl.scores import FILL
from tailrl.integrations.verl.settings import Log, Plugin, read_settings
from tailrl.integrations.verl.workers import KEPT, SIZE, TOP, constrain_engine, constrain_sampler, in_each, versions
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.runtime.errors import ConfigurationError, ModelError
from tailrl.tracking import metrics as keys

MODES = {"tailrl": "sync", "tailrl_colocate_async": "colocate_async", "tailrl_separate_async": "separate_async"}
"""Names of trainers, with verl's own that each extends."""

COLUMNS = {SIZE: "trainer_set_size", TOP: "trainer_top_logprobs", KEPT: "trainer_log_mass"}
"""What a constrained engine adds to the batch, by the log's names."""


class TrainerMixin:
    """A base class to go before one of verl's trainers.

    Attributes:
        mode: verl's own name of the trainer, which verl compares its configuration with.
        asked: the plugin's settings.
    """

    mode: str

    def __init__(self, config: Any) -> None:
        self.asked = settings_of(config)
        check_run(config, self.asked)
        config.trainer.v1.trainer_mode = self.mode
        super().__init__(config)  # type: ignore[call-arg]
        self._said_size = False
        self._watching = Watching() if self.asked.watch else None
        print(f"tailrl: {type(self).__name__}: {self.asked.words}; {versions()}", flush=True)

    def init(self) -> None:
        """Makes the workers; with DVP, changes how their engines score."""
        super().init()  # type: ignore[misc]
        if self.asked.dvp:
            trainer: Any = self
            groups = [trainer.actor_rollout_wg, getattr(trainer, "ref_policy_wg", None)]
            workers = {id(worker): worker for group in groups if group is not None for worker in group.workers}
            in_each(list(workers.values()), constrain_engine, self.asked.dvp.log_rho)

    def fit(self, agent_loop_manager: Any) -> None:
        """Trains; with DVP, first changes what the samplers ask for."""
        if self.asked.dvp:
            workers = getattr(agent_loop_manager, "agent_loop_workers", None)
            if not workers:
                raise ConfigurationError(
                    f"tailrl: {type(agent_loop_manager).__name__} has no agent_loop_workers, where min_p is asked for"
                )
            in_each(workers, constrain_sampler, self.asked.dvp.log_rho)
        super().fit(agent_loop_manager)  # type: ignore[misc]

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        """verl's step, between one that reads the batch before a rejection, and one that masks, measures and logs."""
        before = _read(batch, ["response_mask", *log.TOKENS.values(), KEPT, SIZE])
        log.require(before)
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        real = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding")]
        if self.asked.dvp:
            if KEPT not in before:
                raise ModelError("tailrl: an engine returned no kept mass: it did not score under DVP")
            _leave_out(batch, before)
            metrics |= measures(before, real)
        trainer: Any = self
        step = trainer.global_steps
        logs = self.asked.log if self.asked.log and step % self.asked.log.every == 0 else None
        if logs or self._watching:
            responses = self._responses(batch, before)
            if logs:
                self._log(logs, responses, real)
            if self._watching:
                self._watching.add(responses, real, step)
        return batch

    def _compute_metrics(self, batch: Any, metrics: dict[str, Any], *rest: Any, **named: Any) -> Any:
        """verl's metrics of a step that is over; with the alarms, judges it."""
        computed = super()._compute_metrics(batch, metrics, *rest, **named)  # type: ignore[misc]
        if self._watching:
            trainer: Any = self
            values, lines = self._watching.end(trainer.global_steps, metrics)
            metrics |= values
            for line in lines:
                print(f"tailrl: {line}", flush=True)
        return computed

    def _responses(self, batch: Any, before: Mapping[str, list[Tensor]]) -> log.Batch:
        """The batch's responses: masks and log-probs of before a rejection, advantages and rewards of after."""
        trainer: Any = self
        fields = ["prompts", "responses", "response_mask", "advantages", "rm_scores", "data_source", *COLUMNS]
        after = _read(batch, fields)
        log.require(after, fields[:5])
        masks = [mask_T.bool() for mask_T in before["response_mask"]]
        if self.asked.dvp:
            masks = [mask_T & ~no_T for mask_T, no_T in zip(masks, outside(before), strict=True)]
        advantages = [
            advantage_T.masked_fill(mask_T & ~left_T.bool(), torch.nan)
            for advantage_T, mask_T, left_T in zip(after["advantages"], masks, after["response_mask"], strict=True)
        ]
        rows: dict[str, list[Any]] = {
            "text": [trainer.tokenizer.decode(ids_T, skip_special_tokens=True) for ids_T in after["responses"]],
            # verl's tag is the step whose update made the weights; a sample of the newest has its own step's number.
            "version": [version_of(tag.get("min_global_steps")) for tag in batch.tags],
        }
        if "data_source" in after:
            rows["data_source"] = [str(source) for source in after["data_source"]]
        return log.Batch(
            columns={**before, "prompts": after["prompts"], "responses": after["responses"]},
            masks=masks,
            rewards=[scores_T.sum().item() for scores_T in after["rm_scores"]],
            advantages=advantages,
            extra={name: _of_response(after[key], before) for key, name in COLUMNS.items() if key in after},
            rows=rows,
        )

    def _log(self, settings: Log, responses: log.Batch, real: list[int]) -> None:
        trainer: Any = self
        step = trainer.global_steps
        table = list(log.rows(responses, log.chosen(step, real, settings.responses), step))
        several = trainer.parameter_sync_step > 1
        path = log.write(table, settings, f"{step}_{trainer.local_trigger_step}" if several else f"{step}")
        if not self._said_size:
            print(f"tailrl: {log.size_of(path, len(table), len(real), settings.every)}", flush=True)
            self._said_size = True


def version_of(steps: int | None) -> int | None:
    """The version of a sample's weights, as the log has it, from the number of updates that made them."""
    return None if steps is None else steps + 1


def settings_of(config: Any) -> Plugin:
    """The plugin's settings in verl's configuration; raises StudyError where they ask for nothing or cannot be."""
    from omegaconf import OmegaConf

    given = config.get("tailrl")
    return read_settings(None if given is None else OmegaConf.to_container(given, resolve=True))


def _read(batch: Any, fields: list[str]) -> dict[str, list[Any]]:
    """Columns of a batch in verl's queue, one entry a response; what the queue lacks is left out."""
    import transfer_queue as tq

    data = tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=fields)
    columns = {}
    for name in fields:
        if name in data.keys():  # noqa: SIM118 a TensorDict is no dictionary
            values = data.get(name)  # of words, `data[name]` is a list or not, by the version of tensordict
            columns[name] = list(values.unbind()) if isinstance(values, Tensor) else values.tolist()
    return columns


def _of_response(whole: list[Tensor], before: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """Of an engine's outputs for prompt and response, those that belong to the response's tokens: one earlier each."""
    return [values_L[-len(mask_T) - 1 : -1] for values_L, mask_T in zip(whole, before["response_mask"], strict=True)]


def outside(before: Mapping[str, list[Tensor]]) -> list[Tensor]:
    """Where a sampled token lies outside the trainer's safe set, bool [T] each; never where the mask is 0."""
    return [
        (old_T <= FILL) & mask_T.bool()
        for old_T, mask_T in zip(before["old_log_probs"], before["response_mask"], strict=True)
    ]


def _leave_out(batch: Any, before: Mapping[str, list[Tensor]]) -> None:
    """Takes tokens outside the set out of the loss; the sums that verl divides by are made of `loss_mask`, and stay."""
    import transfer_queue as tq
    from tensordict import TensorDict

    outside_T = outside(before)
    if not any(values_T.any() for values_T in outside_T):
        return
    masks = _read(batch, ["response_mask"])["response_mask"]
    kept = [mask_T.masked_fill(no_T, 0) for mask_T, no_T in zip(masks, outside_T, strict=True)]
    fields = TensorDict({"response_mask": torch.nested.as_nested_tensor(kept, layout=torch.jagged)}, len(kept))
    tq.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)


def measures(before: Mapping[str, list[Tensor]], real: list[int]) -> dict[str, float]:
    """Metrics of DVP over the tokens of real responses, under `tailrl/` and the project's keys.

    Args:
        before: `response_mask`, `old_log_probs`, `rollout_log_probs` [T] each; KEPT, SIZE of prompt and response.
        real: the responses that do not merely fill the batch.
    """
    masks = [before["response_mask"][i].bool() for i in real]

    def tokens(columns: list[Tensor]) -> Tensor:
        return torch.cat([columns[i][mask_T] for i, mask_T in zip(real, masks, strict=True)])

    outside_T = tokens(outside(before))
    sequence_T = torch.cat([torch.full((int(mask_T.sum()),), n) for n, mask_T in enumerate(masks)])
    ratios = log_ratio_metrics(
        tokens(before["old_log_probs"]), tokens(before["rollout_log_probs"]), sequence_T, len(real), outside_T
    )
    values = {
        keys.KEPT_MASS_TRAIN: tokens(_of_response(before[KEPT], before)).exp().mean().item(),
        keys.KEPT_VOCAB_TRAIN: tokens(_of_response(before[SIZE], before)).mean().item(),
        keys.OUTSIDE: outside_T.float().mean().item(),
        keys.OUTSIDE_COUNT: float(outside_T.sum().item()),
        keys.K3_MASKED: ratios["k3_kl"],
    }
    return {f"tailrl/{name}": value for name, value in values.items()}


def register() -> None:
    """Adds the plugin's trainers to verl's; one of verl's own then refuses the plugin's key, which it would ignore."""
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls, register_trainer

    for name, mode in MODES.items():
        kind = get_trainer_cls(mode)
        register_trainer(name)(
            type(
                f"Tailrl{kind.__name__}",
                (TrainerMixin, kind),
                {"mode": mode, "__doc__": kind.__doc__, "__module__": __name__},
            )
        )
    plain = PPOTrainer.__init__

    def __init__(self: Any, config: Any) -> None:  # noqa: N807 it replaces verl's
        if config.get("tailrl") is not None and not isinstance(self, TrainerMixin):
            raise ConfigurationError(
                f"tailrl: {type(self).__name__} does not read the key tailrl: set trainer.v1.trainer_mode to "
                f"{', '.join(MODES)}"
            )
        plain(self, config)

    PPOTrainer.__init__ = __init__
