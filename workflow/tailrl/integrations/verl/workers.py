"""Changes within verl's own processes, made by a call of each worker: one that cannot be changed ends the run.

Ray runs the functions `constrain_engine` and `constrain_sampler` in the worker (`__ray_call__`). So settings reach
workers on every node, a worker without tailrl is an error, and no name that Ray copied earlier matters.
"""

import math
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import torch

from tailrl.integrations.verl.scores import score_logits
from tailrl.runtime.errors import ConfigurationError

KEPT, SIZE, TOP = "tailrl_log_kept", "tailrl_set_size", "tailrl_log_top"
"""Outputs that the engine gives beside log-probs, one number a token: log Z, |V_S|, the largest log-prob (nats)."""

# Attribute of a changed function: verl's own. `__wrapped__` may be another library's, such as that of Ray's tracing.
PLAIN = "_before_tailrl"


def in_each(workers: Sequence[Any], change: Callable[..., str], *settings: Any) -> list[str]:
    """Call a function in each Ray worker, with the worker and the settings.

    Returns:
        What it said in each worker.

    Raises:
        StudyError: in a worker it failed, or there is no worker.
    """
    import ray

    if not workers:
        raise ConfigurationError(f"tailrl: there is no worker to call {change.__name__} in")
    try:
        lines: list[str] = ray.get([worker.__ray_call__.remote(change, *settings) for worker in workers])
    except Exception as error:  # Ray's own, with the worker's within
        cause = getattr(error, "cause", None) or error
        raise ConfigurationError(
            f"tailrl: a worker could not be set up for DVP, and would train without it: {type(cause).__name__}: {cause}"
        ) from None
    return lines


def versions() -> str:
    """What is installed here, for the line that each worker prints."""
    return ", ".join(f"{name} {version(name)}" for name in ("tailrl", "verl", "torch"))


def _announce(line: str) -> str:
    print(f"tailrl: {line} (process {os.getpid()})", flush=True)
    return line


# --- the trainer's engine --------------------------------------------------------------------------------


def constrain_engine(worker: Any, log_rho: float) -> str:
    """Make the FSDP engines of this process score under min-p; returns the line that it printed.

    Raises:
        StudyError: a model of the worker is no language model of verl's FSDP engine.
    """
    from verl.workers.engine.fsdp import transformer_impl

    engines = _engines(worker)
    for engine in engines:
        plain = transformer_impl.FSDPEngineWithLMHead.prepare_model_outputs
        if not isinstance(engine, transformer_impl.FSDPEngineWithLMHead) or (
            type(engine).prepare_model_outputs is not plain
        ):
            raise ConfigurationError(f"{type(engine).__name__} computes log-probs in a way of its own")
    if not engines:
        raise ConfigurationError(f"{type(worker).__name__} has no language model's engine")
    constrain_module(transformer_impl, log_rho)
    kinds = ", ".join(sorted({type(engine).__name__ for engine in engines}))
    return _announce(f"DVP with ln ρ = {log_rho:g} in {kinds}: old, current and reference log-probs; {versions()}")


def _engines(worker: Any) -> list[Any]:
    """Engines of language models in a Ray actor, which may hold several of verl's workers."""
    inner = getattr(worker, "worker_dict", None) or {"": worker}
    roles = [getattr(one, name, None) for one in inner.values() for name in ("actor", "ref")]
    return [role.engine for role in roles if role is not None]


def constrain_module(module: Any, log_rho: float) -> None:
    """Replace what verl's module of the FSDP engine scores with; a second call sets ρ anew.

    Args:
        module: `verl.workers.engine.fsdp.transformer_impl`, or what has its two names.
        log_rho: ln ρ.
    """
    engine = module.FSDPEngineWithLMHead
    plain = getattr(engine.prepare_model_outputs, PLAIN, engine.prepare_model_outputs)
    scored: list[Any] = []

    def logprobs_from_logits(logits: Any, labels: Any, inplace_backward: bool = True) -> Any:  # noqa: ARG001 verl's
        scored.append(score_logits(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), log_rho))
        return scored[-1].logp_T.view(labels.shape)

    def prepare_model_outputs(
        self: Any, output: Any, output_args: Any, micro_batch: Any, *rest: Any, **named: Any
    ) -> Any:
        scored.clear()
        model_output = plain(self, output, output_args, micro_batch, *rest, **named)
        if len(scored) != 1:
            raise ConfigurationError(
                "tailrl: verl's engine did not score by logprobs_from_logits, and DVP would do nothing"
            )
        scores = scored.pop()
        offsets = micro_batch["input_ids"].offsets()
        for name, values_T in ((KEPT, scores.log_kept_T), (SIZE, scores.set_size_T), (TOP, scores.log_top_T)):
            if "pad_size" in output_args:
                values_T = self._gather_and_unpad_packed(values_T, output_args["pad_size"])
            model_output[name] = torch.nested.nested_tensor_from_jagged(values_T.detach(), offsets)
        return model_output

    setattr(prepare_model_outputs, PLAIN, plain)
    module.logprobs_from_logits = logprobs_from_logits
    engine.prepare_model_outputs = prepare_model_outputs


# --- the sampler's requests ------------------------------------------------------------------------------


def constrain_sampler(worker: Any, log_rho: float) -> str:
    """Make this agent-loop worker ask for min-p in training requests; returns the line that it printed.

    Validation samples as verl's `val_kwargs` say. So does a greedy baseline (REMAX): temperature 0.

    Raises:
        StudyError: the worker has no `_run_agent_loop`.
    """
    plain = getattr(worker, "_run_agent_loop", None)
    if plain is None:
        raise ConfigurationError(f"{type(worker).__name__} has no _run_agent_loop, where min_p is asked for")
    plain = getattr(plain, PLAIN, plain)

    async def run_agent_loop(sampling_params: dict[str, Any], trajectory: dict[str, Any], **named: Any) -> Any:
        return await plain(training_params(sampling_params, trajectory, log_rho), trajectory, **named)

    setattr(run_agent_loop, PLAIN, plain)
    worker._run_agent_loop = run_agent_loop
    return _announce(
        f"min_p = exp({log_rho:g}) in each training request of this worker, in no validation; {versions()}"
    )


def training_params(sampling_params: dict[str, Any], trajectory: dict[str, Any], log_rho: float) -> dict[str, Any]:
    """A request's parameters, with `min_p` where it samples for training.

    Args:
        sampling_params: of verl's request; `temperature` is 0 for a greedy baseline.
        trajectory: of verl's request; `validate` says what it is for.
        log_rho: ln ρ.
    """
    if trajectory["validate"] or not sampling_params["temperature"] > 0:
        return sampling_params
    return {**sampling_params, "min_p": math.exp(log_rho)}
