"""The plan of a study in words: what `tailrl plan` prints."""

from collections.abc import Iterator

from tailrl.config.study import Study
from tailrl.planning.jobs import (
    Planned,
    checkpoint_bytes,
    evaluation_seconds,
    host_bytes,
    plan_arms,
    policies_of,
    training_seconds,
    what_would_fit,
)
from tailrl.planning.machine import Machine
from tailrl.planning.memory import peak
from tailrl.planning.shapes import Shape, shape_of


def plan_page(study: Study, machine: Machine, devices: int, prompt: int, response: int | None) -> str:
    """The whole page, whose first line says whether the study fits.

    Args:
        study: the study to plan.
        machine: one of the devices.
        devices: devices that share a job.
        prompt: tokens of a prompt.
        response: tokens of a response; None: max_new_tokens.

    Raises:
        StudyError: the policy's sizes are not known.
    """
    shape = shape_of(study.policy)
    seeds = study.arm_seeds()
    runs = sum(len(seeds[arm]) for arm in study.arms)
    planned = plan_arms(study, machine, devices, prompt, response)
    fullest = max(planned, key=lambda arm: peak(planned[arm].placed.parts, planned[arm].run.sampler, machine))
    slowest = max(planned, key=lambda arm: sum(planned[arm].seconds.values()))
    size = f"{devices} x {machine.memory / 1e9:.3g} GB"
    lacking = what_would_fit(study, machine, devices, prompt, response)
    lines = [f"{study.name}: does not fit: {lacking}" if lacking else f"{study.name}: fits {size}", ""]
    lines += [f"{len(study.arms)} arms, {runs} runs, a job on {size}; times at the speed of {machine.name}"]
    lines += _sizes(shape, planned[slowest], devices)
    lines += ["", f"memory of a device, GB (arm {fullest}; a GB is 10^9 bytes)", *_memory(planned[fullest])]
    seconds = planned[slowest].seconds
    lines += ["", f"seconds of a step (arm {slowest}), at the speed of {machine.name}"]
    lines += _rows(seconds | {"a step": sum(seconds.values())}, 1)
    if machine.name == Machine().name:
        lines += ["  on another device the rollout takes longer as its bandwidth is less, forward and backward as its"]
        lines += ["  matmul is less: a file with these, --machine FILE, has the plan use them"]
    rows = devices * max(arm.placed.parts.get("sampler's logits", 0.0) for arm in planned.values())
    rows *= devices if machine.gpu else 1  # each rank gets those of all ranks
    lines += ["", *_whole(study, shape, machine, devices, prompt, response, rows)]
    lines += ["", *_assumed(machine, prompt, response)]
    return "\n".join(lines) + "\n"


def _sizes(shape: Shape, planned: Planned, devices: int) -> Iterator[str]:
    work, whole = planned.work, planned.run.training
    tokens = work.sampled * devices
    apart = shape.parameters - shape.embedding * (1 if shape.tied else 2)
    yield f"parameters: {shape.parameters / 1e6:,.1f} million, {apart / 1e6:,.1f} without embedding and head"
    if shape.experts:
        yield (
            f"experts: {shape.experts} a layer, {shape.chosen} a token, which meets {shape.active / 1e6:,.1f} million "
            "parameters"
        )
    yield (
        f"a step: {whole.prompts * whole.group_size} responses of {work.response:,} tokens to {whole.prompts} prompts "
        f"of {work.prompt}: {tokens:,.0f} sampled tokens; micro-batches of up to {work.batch:,}"
    )


def _memory(planned: Planned) -> Iterator[str]:
    placed, machine, sampler = planned.placed, planned.placed.machine, planned.run.sampler
    yield from _rows({"libraries": machine.reserve} | placed.parts, 1e9)
    needed = peak(placed.parts, sampler, machine)
    verdict = f"{placed.lacking / 1e9:.1f} missing: it does not fit" if placed.lacking else "it fits"
    yield f"  {'at its fullest':<22}{needed / 1e9:>10.2f}  of {machine.memory / 1e9:g}: {verdict}"
    if placed.lacking:
        yield f"  the largest part is {max(placed.parts, key=lambda part: placed.parts[part])}"
    share = sampler.reserved
    if share is not None and machine.gpu:
        shared = sampler.sharing
        where = f"of each of the {shared} that share one" if shared > 1 else "of it"
        yield f"  vLLM has {share:.0%} {where}, with room for {machine.in_flight} sequences in flight"
        yield "  vLLM sleeps while the trainer works: the fuller half of a step counts"


def _whole(
    study: Study, shape: Shape, machine: Machine, devices: int, prompt: int, response: int | None, rows: float
) -> Iterator[str]:
    """`rows`: bytes of the sampler's logits that the fullest arm's ranks hold in the machine's memory."""
    training = training_seconds(study, machine, devices, prompt, response)
    policies = policies_of(study)
    each = evaluation_seconds(study, machine, prompt)
    evaluating = policies * (each or 0.0) / 3600
    known = "" if each is not None else ", the evaluation not among them: how many problems it has is not known before"
    yield (
        f"whole study: {training / 3600:,.1f} h of training on {devices}, {evaluating:,.1f} h of evaluating {policies} "
        f"policies on 1: {devices * training / 3600 + evaluating:,.0f} device-hours{known}"
    )
    state = checkpoint_bytes(shape, study.training)
    kept = study.training.keep_checkpoints + 1
    disk = 4 * shape.parameters * policies
    host = host_bytes(shape, study.training, devices) + rows
    logits = ", and the sampler's logits" if rows else ""
    yield (
        f"host memory: {host / 1e9:,.1f} GB: the policy's file, which all ranks share, what is being written{logits}"
    )
    yield (
        f"disk: {disk / 1e9:,.1f} GB of policies, and {kept * state / 1e9:,.1f} GB of checkpoints for each job that "
        f"runs ({kept} of {state / 1e9:,.1f})"
    )


def _assumed(machine: Machine, prompt: int, response: int | None) -> Iterator[str]:
    length = "every response as long as it may be" if response is None else f"responses of {response} tokens"
    yield f"assumed: prompts of {prompt} tokens, {length}, and of the machine"
    for name, field in Machine.model_fields.items():
        if name not in ("name", "gpu", "memory"):
            value = getattr(machine, name)
            yield f"  {name:<14}{'as matmul' if value is None else f'{value:.3g}':>10}  {field.description}"
    yield "  no time to quantise weights at a hand-over, nor for the roundings of a quantised engine's matched control"


def _rows(values: dict[str, float], unit: float) -> Iterator[str]:
    for name, value in values.items():
        yield f"  {name:<22}{value / unit:>10.2f}"
