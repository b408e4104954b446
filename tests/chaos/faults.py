"""Faults that a resumed run could have, and how to plant them in a copy of the package.

Each is a replacement of single lines, behind a condition on the environment: all faults stand in one copy, and one is
on. So the undisturbed study has the same source files as those with a fault. The package itself knows nothing of this.
"""

from dataclasses import dataclass
from pathlib import Path

SWITCH = "TAILRL_PLANTED"
"""The variable that names the fault that is on."""
STATE, LOOP, STEP, KEPT = "training/state.py", "training/loop.py", "training/step.py", "training/kept_data.py"
LOAD_MOMENTS = 'self.optimizer.load_state_dict(self.optimizer.state_dict() | {"state": state})'
RESUME = "resumed = checkpoints.resume(state)"


@dataclass(frozen=True)
class Edit:
    """One line of a file, without its indentation, and the lines that stand for it."""

    file: str
    old: str
    new: tuple[str, ...]


def _without(part: str) -> Edit:
    zeroed = f'{{n: torch.zeros_like(t) if n == "{part}" else t for n, t in values.items()}}'
    found = f"{{index: {zeroed} for index, values in state.items()}}"
    return Edit(STATE, LOAD_MOMENTS, (f"state = {found}", LOAD_MOMENTS))


_OLD_RESTORE = 'tensor.copy_(groups["model"][name])'
_UPDATE = "updated = update(state.model, state.optimizer, samples, run, deal, watch, sync.delayed, job.scorer)"
_TENSORS = 'found = {f"model.{name}": tensor.detach() for name, tensor in _of_model(self.model).items()}'
_REQUESTS = (
    "requests = step_requests([job.prompts[i] for i in chosen], thresholds, settings.group_size, {seed}, state.step)"
)
_ORDER = "watch, order = Watch(settings, recorded), ProblemOrder(job.problems, run, job.seed, {recorded})"
_RATE = 'group["lr"] = settings.learning_rate * min(1.0, ({step} + 1) / (settings.warmup_steps + 1))'
_DIGESTS = "given = {int(step): str(digest) for step, digest in state}"
_CHECK = 'numbers = distributed.in_step(lambda: check(file))["numbers"]'
_LENGTH = "self.length, self.hash = len(lines), hashlib.sha256(lines)"
_RESTORED = 'say(f"{out}: this run is finished; its results are restored")'
_ADAPTED = 'self.threshold, self.gain, self.error = state["threshold"], state["gain"], state["error"]'
_FOLDER = 'checkpoints = Checkpoints(out / "checkpoints", run.training.keep_checkpoints, identity)'

FAULTS: dict[str, tuple[Edit, ...]] = {
    "no moment is restored": (Edit(STATE, LOAD_MOMENTS, ("pass",)),),
    "the first moment is not restored": (_without("exp_avg"),),
    "the second moment is not restored": (_without("exp_avg_sq"),),
    "the optimizer counts its steps anew": (_without("step"),),
    "the saved weights are one step old": (
        Edit(
            STEP,
            _UPDATE,
            (
                "import tailrl.training.state as planted",
                "own = planted._of_model(state.model)",
                "planted.BEFORE = {name: tensor.detach().clone() for name, tensor in own.items()}",
                _UPDATE,
            ),
        ),
        Edit(STATE, _TENSORS, ('found = {f"model.{name}": tensor for name, tensor in BEFORE.items()}',)),
    ),
    "one tensor is not restored": (
        Edit(STATE, _OLD_RESTORE, (f'name.endswith(".norm.weight") or {_OLD_RESTORE}',)),
    ),
    "the engine keeps the base policy's weights": (
        Edit(
            LOOP,
            RESUME,
            ("engine.sampler.load_weights((n, t.clone()) for n, t in model.state_dict().items())", RESUME),
        ),
        Edit(LOOP, "weight_sync(state.model)", ("resumed or weight_sync(state.model)",)),
        Edit(LOOP, "engine.weight_sync.again(state.model)", ("pass",)),
    ),
    "the stale engine gets fresh weights": (
        Edit(STATE, "self.weight_sync.past.extend(list(past[age].items()) for age in sorted(past))", ("pass",)),
    ),
    "the kept tokens are another run's": (
        Edit(
            KEPT,
            _DIGESTS,
            (
                _DIGESTS,
                "for step in given:",
                '    for other in self.folder.parents[2].glob(f"*/*/checkpoints/tokens-{step:08d}-*"):',
                "        self._file(step).write_bytes(data := other.read_bytes())",
                "        given[step] = hashlib.sha256(data).hexdigest()",
                "        if other.parent != self.folder:",
                "            break",
            ),
        ),
    ),
    "restored results have the tokens of another run": (
        Edit(
            LOOP,
            _RESTORED,
            (
                'for other in out.parents[1].glob("*/*/checkpoints/finished-*/tokens.npz"):',
                "    if out not in other.parents:",
                '        (checkpoints.finished / "tokens.npz").unlink()',
                '        (checkpoints.finished / "tokens.npz").write_bytes(other.read_bytes())',
            ),
        ),
    ),
    "the step is off by one": (
        Edit(STATE, "setattr(self, name, number)", ('setattr(self, name, number + 1 if name == "step" else number)',)),
    ),
    "each process draws from its own random stream": (
        Edit(STEP, _REQUESTS.format(seed="job.seed"), (_REQUESTS.format(seed="job.seed + len(state.resumed)"),)),
    ),
    "the order of the problems begins anew": (
        Edit(LOOP, _ORDER.format(recorded="recorded"), (_ORDER.format(recorded="[]"),)),
    ),
    "the learning rate warms up anew": (
        Edit(STEP, _RATE.format(step="step"), (_RATE.format(step="step - [0, *state.resumed][-1]"),)),
    ),
    "the metrics lack their last step": (
        Edit(KEPT, _LENGTH, (r'lines = lines[: lines.rstrip().rfind(b"\n") + 1]', _LENGTH)),
    ),
    "the threshold that follows the lost mass is not restored": (
        Edit("objective/adaptive_rho.py", _ADAPTED, ("pass",)),
    ),
    "the solved shares of the problems are not restored": (
        Edit("objective/adaptive_rho.py", 'self.solved = dict(state["solved"])', ("pass",)),
    ),
    "the newest state is left out": (
        Edit(
            "training/checkpoints.py",
            _CHECK,
            (
                "if file in self._files()[1:]:",
                '    raise DamagedError(file, "not looked at")',
                _CHECK,
            ),
        ),
    ),
    "a run with a state begins anew": (Edit(LOOP, RESUME, ("resumed = False",)),),
    "a finished run is trained again": (
        Edit(LOOP, _FOLDER, (_FOLDER, "__import__('shutil').rmtree(checkpoints.finished, ignore_errors=True)")),
    ),
    "the optimizer never moves a weight": (Edit("training/optimizer.py", "optimizer.step()", ("pass",)),),
}  # fmt: skip


def plant(package: Path) -> None:
    """Put all faults into a copy of the package, each off until SWITCH names it.

    Raises:
        ValueError: a line is not once in its file: the code has changed, and the fault must follow it.
    """
    for name, edits in FAULTS.items():
        for edit in edits:
            path = package / edit.file
            lines = path.read_text(encoding="utf-8").split("\n")
            places = [place for place, line in enumerate(lines) if line.strip() == edit.old]
            if len(places) != 1:
                raise ValueError(f"{name}: {edit.file} has {len(places)} times the line {edit.old!r}")
            indent = lines[places[0]].partition(edit.old)[0]
            lines[places[0] : places[0] + 1] = [f"{indent}{line}" for line in _guarded(name, edit)]
            path.write_text("\n".join(lines), encoding="utf-8")


def _guarded(name: str, edit: Edit) -> list[str]:
    """The lines for one. The old line stands once, so that another fault can find it."""
    condition = f'if __import__("os").environ.get("{SWITCH}") == "{name}":'
    if edit.old not in edit.new:
        return [condition, *(f"    {line}" for line in edit.new), "else:", f"    {edit.old}"]
    place = edit.new.index(edit.old)
    before, after = ([f"    {line}" for line in part] for part in (edit.new[:place], edit.new[place + 1 :]))
    return [*([condition, *before] if before else []), edit.old, *([condition, *after] if after else [])]
