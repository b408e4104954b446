"""A study as a typed model: a task, a policy, training settings and arms. `config.load` reads it."""

import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)

from tailrl.config import verl
from tailrl.config.ablation import Ablation
from tailrl.config.arm import Arm, ArmBlocks, Correction
from tailrl.config.base import HOTTEST, LONGEST_NAME, NAME, NAME_RULE, STUDY_NAME, Kinds, Seeds, Settings, Text
from tailrl.config.curriculum import Curriculum
from tailrl.config.distributions import ComparedEngine, Distributions, DistributionSettings
from tailrl.config.gradients import GradientQuality, Gradients
from tailrl.config.jobs import Evaluation, Problems, Run
from tailrl.config.merging import merged
from tailrl.config.messages import near, sentences
from tailrl.config.policy import MADE_MODELS, Policy, PretrainedPolicy, ScratchPolicy, lacking, lies
from tailrl.config.pooled import BASE_ARM as BASE_ARM
from tailrl.config.pooled import Pool
from tailrl.config.results import FOLDERS, RESERVED
from tailrl.config.sampler import ExactSettings, SamplerSettings
from tailrl.config.source_files import own_code
from tailrl.config.tasks import DataSetTask, GeneratedTask, Task
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.training import Training
from tailrl.config.vocabulary import log_rho
from tailrl.runtime.errors import ConfigurationError, one_line
from tailrl.runtime.import_path import source_of

MOST_ARMS = 1000
"""Arms of a study, with those of its ablations."""

MOST_RESPONSES_A_STEP = 1_000_000
"""Of a training step, and of an evaluation for each of its policies: the largest runs have ten thousand."""

MOST_TOKENS_A_STEP = 10_000_000_000
"""Of the same: the log-probs and records of so many take hundreds of gigabytes."""

SAMPLED = ("temperature", "max_new_tokens", "token_budget", "rollout_timeout", "dtype")
"""Fields of `training` that the comparison of distributions takes too."""

NOT_OF_A_PART = {"name", "extends", "parts", "pooled", "endpoint"}
"""Settings of a whole study."""

DENSE = "the policy is dense and has no experts; leave it out"
MIXTURE = "the policy is a mixture, whose experts are not quantised; leave it out"

WILDCARD = re.compile(r"\{\s*\w")
"""What Snakemake takes for a wildcard in the path of an input."""


def _unless_it_extends(schema: dict[str, Any]) -> None:
    """Required keys, in the schema: a file that extends another need not have them."""
    schema |= {"if": {"not": {"required": ["extends"]}}, "then": {"required": schema.pop("required")}}


def _forget(arm: Arm, parents: list[str], field: str, block: dict[str, Any]) -> None:
    """Removes from a block what the kind that is varied does not read: the base arm's settings of another kind."""
    settings: Any = arm
    for part in parents:
        settings = getattr(settings, part)
    unread: Iterable[str] = ()
    if isinstance(settings, Kinds) and field == settings.TOLD_BY:
        form = settings.whole().kind_of(block)
        unread = block.keys() - form.model_fields.keys() if form else ()
    elif isinstance(settings, Correction) and field in settings.READS:
        unread = settings.unread(field, block[field])
    for name in unread:
        block.pop(name, None)


def _check_products(key: str, problems: int, words: str, responses: int, tokens: int) -> None:
    """Raises ValueError for more responses, or more tokens in them, than one step or evaluation can have."""
    if problems * responses > MOST_RESPONSES_A_STEP:
        raise ValueError(
            f"{key}: {problems} {words} with {responses} responses each are more than {MOST_RESPONSES_A_STEP} responses"
        )
    if problems * responses * tokens > MOST_TOKENS_A_STEP:
        raise ValueError(
            f"{key}: {problems} {words} with {responses} responses of {tokens} tokens are more than "
            f"{MOST_TOKENS_A_STEP} tokens"
        )


def _key(arm: Arm) -> str:
    """A text that equal arms share."""
    return arm.model_dump_json()


class _Parts(dict[str, "Study"]):
    """A study's parts by their names. They follow from its settings, and make two studies no different ones."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Parts)

    __hash__ = None


class Study(Settings):
    """A study: the content of `config.yaml` or of a file in `studies/`."""

    model_config = ConfigDict(json_schema_extra=_unless_it_extends)

    name: str = Field(pattern=STUDY_NAME, description="names the folder results/<name>")
    description: str = Field("", description="one line for the report; {part} stands for the name of a part")
    endpoint: str = Field("", description="what decides, fixed before the first run; the pages quote it")
    extends: str | None = Field(
        None,
        exclude=True,
        description="another YAML file, by its path from this one, whose settings this file overrides; mappings are "
        "merged key by key, unless they name another kind of block, such as another task or engine; anything else is "
        "replaced",
    )
    seeds: Seeds = Field((0, 1, 2), description="one training run per arm and seed")
    task: Task = ArithmeticTask()
    curriculum: Curriculum | None = Field(
        None, description="harder tasks, which follow as a run's reward rises; null: one task"
    )
    policy: Policy = ScratchPolicy()
    training: Training = Training()
    arms: dict[str, Arm] = Field(min_length=1, description="the ways to train that the study compares")
    ablations: dict[str, Ablation] = Field(default_factory=dict, description="one target ablate_<name> each")
    evaluation: Evaluation = Evaluation()
    baselines: tuple[Annotated[float, Field(le=HOTTEST)], ...] = Field(
        (),
        description="temperatures at which the untrained policy is evaluated too, as a baseline of sharpening alone; "
        "0.01, the lowest, takes the most probable token unless two are nearly equal",
    )
    gradient_quality: GradientQuality = GradientQuality()
    distributions: DistributionSettings = DistributionSettings()
    makes: tuple[Literal["report", "distributions", "gradients"], ...] = Field(
        (),
        description="the pages of a study: its report, that of distributions.engines, that of gradient_quality; none: "
        "the report, and that of the engines where they are named",
    )
    parts: dict[Text, dict[str, Any]] = Field(
        default_factory=dict,
        description="the study several times, each time with these settings merged in; results/<name>/<part>",
    )
    pooled: Pool | None = Field(None, description="the page over the parts")

    _parts: _Parts = PrivateAttr(default_factory=_Parts)

    @model_validator(mode="wrap")
    @classmethod
    def _with_parts(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        study = handler(data)
        if isinstance(data, Mapping) and study.parts:
            # Merged into what was given: presets in it are not expanded yet, which a part may replace.
            study._parts = study._merged_parts(data)
            study._check_parts()
        return study

    @field_validator("arms", "ablations", mode="before")
    @classmethod
    def _without_null(cls, blocks: Any) -> Any:
        # So a file leaves out an arm or ablation of the file that it extends, and a part one of its study.
        if not isinstance(blocks, dict):
            return blocks
        return {name: block for name, block in blocks.items() if block is not None}

    def _check_parts(self) -> None:
        parts = self.each()
        if self.pooled is not None:
            self.pooled.check_parts(self.parts)
            pooled = [parts[name] for name in self.pooled_parts]
            if any("report" not in part.pages for part in pooled):
                raise ValueError("pooled: needs the report of each part, which makes leaves out")
            self.pooled.check_arms([part.arm_seeds() for part in pooled])
        kept = {part.training.snapshot_every is None for part in parts.values()}
        routed = {part.says_experts for part in parts.values()}
        if len(kept) > 1 or len(routed) > 1:
            key = "training.snapshot_every" if len(kept) > 1 else "distributions.engines: sampler.routes"
            raise ValueError(f"parts: {key} is set in some and not in others: their files would differ")

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if self.extends is not None:
            raise ValueError("extends: only a file can extend another one")
        for name in (*self.arms, *self.ablations):
            if not re.fullmatch(NAME, name) or name == BASE_ARM:
                raise ValueError(
                    f"{one_line(repr(name))} cannot name an arm or ablation: {NAME_RULE} (not {BASE_ARM!r})"
                )
        size = len(self.arms) + sum(len(ablation.bases) * len(ablation.values) for ablation in self.ablations.values())
        if size > MOST_ARMS:
            raise ValueError(f"arms and ablations: {size} ways to train, of which a study has at most {MOST_ARMS}")
        for name, ablation in self.ablations.items():
            for base in ablation.bases:
                if base not in self.arms:
                    raise ValueError(f"ablations.{name}.base: there is no arm {base!r}{near(base, self.arms)}")
        if isinstance(self.policy, ScratchPolicy):
            size = self.policy.vocabulary_size
            for rho in self.distributions.rho:
                if log_rho(rho, size) > 0:
                    raise ValueError(f"distributions.rho: {rho} is above 1 for {size} tokens")
        try:
            if len(self.baseline_evaluations()) < len(self.baselines):
                raise ValueError(f"baselines: the same temperature is given twice: {list(self.baselines)}")
        except ValidationError as error:
            raise ValueError(f"baselines: {sentences(error, Evaluation)}") from None
        for name, engine in self.distributions.engines.items():
            self._check_experts(f"distributions.engines.{name}.sampler", engine.sampler)
        self._check_experts("evaluation.sampler", self.evaluation.sampler)
        named: tuple[Iterable[str], ...] = (self.arms, self.ablations, self.distributions.engines)
        for (key, endings), names in zip(RESERVED.items(), named, strict=True):
            for name in names:
                if name.endswith(endings):
                    raise ValueError(f"{key}.{name}: files of results end so, as {', '.join(endings)}; rename it")
        held_out = self.evaluation.task.problems or 1
        _check_products("evaluation", held_out, "problems", self.evaluation.samples, self.evaluation.max_new_tokens)
        for name, arm in self.all_arms().items():
            self._check_sizes(name, arm, self._run(name, arm))
        return self

    def _check_sizes(self, name: str, arm: Arm, run: Run) -> None:
        """Raises ValueError for sizes that do not fit together: training would fail only after the base policy."""
        self._check_experts(f"arms.{name}.sampler", run.sampler)
        training = run.training
        if training.backend == "verl":
            try:
                verl.check(run)
            except ValueError as error:
                raise ValueError(f"arms.{name}: {error}") from None
        _check_products(f"arms.{name}", training.prompts, "prompts", training.group_size, training.max_new_tokens)
        # An arm's own setting hides the study's.
        of_arm = {key: f"arms.{name}.training.{key}" for key in arm.training}
        harder = {f"curriculum.harder.{place}": task for place, task in enumerate(self._harder())}
        for what, task in {"the task": self.task, **harder}.items():
            if isinstance(task, GeneratedTask) and run.training.prompts > task.problems:
                key = of_arm.get("prompts", "training.prompts")
                raise ValueError(f"{key}: {run.training.prompts} prompts a step, but {what} has {task.problems}")
        if isinstance(self.policy, ScratchPolicy):
            lengths = {
                of_arm.get("max_new_tokens", "training.max_new_tokens"): run.training.max_new_tokens,
                "evaluation.max_new_tokens": self.evaluation.max_new_tokens,
            }
            for key, longest in lengths.items():
                if longest >= self.policy.max_length:
                    raise ValueError(f"{key}: {longest} new tokens do not fit the policy's {self.policy.max_length}")
            size = self.policy.vocabulary_size
            for rho in run.vocabulary.rhos:
                if log_rho(rho, size) > 0:
                    raise ValueError(f"arms.{name}.vocabulary: a rho of {rho} is above 1 for {size} tokens")
            # A budget moves rho; training itself warns then.
            certain = arm.vocabulary.target is None and not arm.deliberate
            if certain and run.floor_defeats_pruning(size):
                raise ValueError(
                    f"arms.{name}.disturbance: a floor of {run.disturbance.floor:g} gives each of {size} tokens "
                    f"at least rho times the largest probability, so that {run.vocabulary.rule} prunes nothing; "
                    "raise rho, lower the floor, or say deliberate: true"
                )

    def _check_experts(self, key: str, sampler: SamplerSettings) -> None:
        """Raises ValueError for routes without experts, or experts in few bits, of a policy that the study makes."""
        if isinstance(self.policy, ScratchPolicy):
            if sampler.says_routes and self.policy.experts is None:
                raise ValueError(f"{key}.routes: {DENSE}")
            if sampler.quantizes and self.policy.experts is not None:
                raise ValueError(f"{key}.quantization: {MIXTURE}")

    def each(self) -> dict[str, "Study"]:
        """The study's parts by their names, such as causes/1; of a study without parts the study by its own."""
        return dict(self._parts) or {self.name: self}

    @property
    def pooled_parts(self) -> tuple[str, ...]:
        """The names of the parts that the page over them holds, such as causes/1; none without such a page."""
        names = (self.pooled.parts or self.parts) if self.pooled else ()
        return tuple(f"{self.name}/{name}" for name in names)

    def _merged_parts(self, given: Mapping[str, Any]) -> _Parts:
        """The parts, of plain settings of the whole study; raises ValueError for one that cannot be."""
        shared = {key: value for key, value in given.items() if key not in NOT_OF_A_PART}
        studies = _Parts()
        for name, settings in self.parts.items():
            if not re.fullmatch(NAME, name):
                raise ValueError(f"{one_line(repr(name))} cannot name a part: {NAME_RULE}")
            if name in FOLDERS:
                raise ValueError(f"parts.{name}: is the name of a folder of results; give the part another name")
            if wrong := settings.keys() & NOT_OF_A_PART:
                raise ValueError(f"parts.{name}.{min(wrong)}: is set for the whole study")
            whole = merged((shared, settings), type(self)) | {"name": f"{self.name}/{name}"}
            whole["description"] = whole.get("description", "").replace("{part}", name)
            try:
                studies[whole["name"]] = type(self).model_validate(whole)
            except ValidationError as error:
                raise ValueError(f"parts.{name}: {sentences(error, type(self))}") from None
        return studies

    @property
    def pages(self) -> tuple[str, ...]:
        """What a call for all of the study makes, of `makes`."""
        engines = ("distributions",) if "engines" in self.distributions.model_fields_set else ()
        return self.makes or ("report", *engines)

    @property
    def says_experts(self) -> bool:
        """Whether one of the compared engines says which experts it chose."""
        return any(engine.sampler.says_routes for engine in self.distributions.engines.values())

    def problems(self) -> Problems:
        """The settings of the job that writes the problems."""
        warm_start = self.policy.warm_start.stages if isinstance(self.policy, ScratchPolicy) else ()
        return Problems(train=self.task, harder=self._harder(), evaluation=self.evaluation.task, warm_start=warm_start)

    def _harder(self) -> tuple[GeneratedTask, ...]:
        return self.curriculum.harder if self.curriculum else ()

    def gradients(self) -> Gradients:
        """The settings of the job that measures the arms' gradient estimators on tiny models."""
        return Gradients(arms=self.arms, quality=self.gradient_quality)

    def compared(self, engine: str) -> Distributions:
        """The settings of the job that compares one engine's distributions with the trainer's."""
        return self._distributions(engine, self.distributions.engines[engine])

    def trainers_own(self) -> Distributions:
        """The same for a job that needs the trainer's distributions alone, on its own samples."""
        return self._distributions("trainer", ComparedEngine(sampler=ExactSettings(engine="exact", dtype="float32")))

    def _distributions(self, name: str, engine: ComparedEngine) -> Distributions:
        block, training = self.distributions, self.training
        return Distributions(
            name=name,
            engine=engine,
            **{key: getattr(block, key) for key in ("responses", "every", "rho", "seed")},
            **{key: getattr(training, key) for key in SAMPLED},
        )

    def baseline_evaluations(self) -> dict[str, Evaluation]:
        """The evaluations of the untrained policy at the temperatures of `baselines`, by the name of their files."""
        settings = self.evaluation.model_dump()
        return {
            f"{BASE_ARM}@{temperature:g}": Evaluation.model_validate({**settings, "temperature": temperature})
            for temperature in self.baselines
        }

    def local_files(self) -> list[str]:
        """The data files of this machine that the study names."""
        tasks = (self.task, self.evaluation.task)
        return sorted({task.path for task in tasks if isinstance(task, DataSetTask) and task.path})

    def local_policy(self) -> list[str]:
        """The files of the policy's folder; none for a policy from scratch or from the hub."""
        folder = Path(self.policy.folder or "")
        there = folder.name and lies(Path.is_dir, folder)
        return sorted(str(file) for file in folder.iterdir() if file.is_file()) if there else []

    def check_files(self) -> None:
        """Raises StudyError if a file or folder that the study names does not exist, or cannot be a rule's input."""
        for key, task in (("task", self.task), ("evaluation.task", self.evaluation.task)):
            if not isinstance(task, DataSetTask) or task.path is None:
                continue
            if not lies(Path.is_file, task.path):
                raise ConfigurationError(f"{key}.path: there is no data file {one_line(task.path)}")
            if Path(task.path).suffix not in (".parquet", ".jsonl"):
                raise ConfigurationError(
                    f"{key}.path: the name of {one_line(task.path)} must end in .parquet or .jsonl"
                )
        if isinstance(self.policy, PretrainedPolicy):
            path = self.policy.path
            there = lies(Path.is_dir, path) or path in MADE_MODELS
            if not there and (path.startswith((".", "/", "~")) or path.count("/") > 1):
                raise ConfigurationError(f"policy.path: there is no folder {one_line(path)}")
            if there and path not in MADE_MODELS and (words := lacking(Path(path))):
                raise ConfigurationError(f"policy.path: {one_line(path)}: {words}")
        for path in own_code(self.model_dump()):
            if source_of(path) is None:
                raise ConfigurationError(
                    f"{path}: there is no module {path.partition(':')[0]} here or on Python's path"
                )
        for key, files in (("task.path", self.local_files()), ("policy.path", self.local_policy())):
            for file in filter(WILDCARD.search, files):
                raise ConfigurationError(
                    f"{key}: Snakemake takes the braces in {one_line(file)} for a wildcard; rename it"
                )

    def ablation_arms(self, name: str) -> dict[str, Arm]:
        """The arms of one ablation by name, base by base in its values' order; raises ValueError for an unknown field.

        A name is `<ablation>=<value>`, after `<base>+` if there are several bases. An arm that equals an arm of the
        study has that arm's name, and is not trained twice.
        """
        ablation = self.ablations[name]
        arms: dict[str, Arm] = {}
        own, seen = {_key(arm): known for known, arm in self.arms.items()}, set[str]()
        for base, value in itertools.product(ablation.bases, ablation.values):
            data = self.arms[base].model_dump()
            *parents, leaf = ablation.field.split(".")
            block: Any = data
            for part in parents:
                block = block.get(part) if isinstance(block, dict) else None
            known = block if parents != ["training"] else Training.model_fields
            if not isinstance(block, dict) or leaf not in known:
                word, there = (leaf, known) if isinstance(block, dict) else (parents[0], data)
                hint = "" if word in there else near(word, list(there))
                raise ValueError(f"ablations.{name}.field: an arm has no field {ablation.field!r}{hint}")
            block[leaf] = value
            _forget(self.arms[base], parents, leaf, block)
            if parents == ["training"] and value == getattr(self.training, leaf):
                del block[leaf]  # the study's own value overrides nothing
            try:
                arm = Arm.model_validate(data)
            except ValidationError as error:
                raise ValueError(f"ablations.{name}, value {value!r}: {sentences(error, Arm)}") from None
            if (key := _key(arm)) in seen:
                raise ValueError(f"ablations.{name}: value {value!r} makes the same arm as an earlier one")
            seen.add(key)
            prefix = f"{base}+" if len(ablation.bases) > 1 else ""
            made = own.get(key, f"{prefix}{name}={str(value).replace('/', '-')}")
            if len(made) > LONGEST_NAME:
                raise ValueError(
                    f"ablations.{name}: the name of its arm {one_line(made)} has {len(made)} characters, and files' "
                    f"names have room for {LONGEST_NAME}"
                )
            if made in arms:
                raise ValueError(f"ablations.{name}: two of its arms would be called {made!r}: write the values apart")
            arms[made] = arm
        return arms

    def all_arms(self) -> dict[str, Arm]:
        """The study's own arms and those of every ablation; raises ValueError if two different arms share a name."""
        arms = dict(self.arms)
        for ablation in self.ablations:
            for name, arm in self.ablation_arms(ablation).items():
                if arms.setdefault(name, arm) != arm:
                    raise ValueError(f"ablations.{ablation}: its arm {name!r} is another arm's name too; rename one")
        return arms

    def arm_seeds(self) -> dict[str, tuple[int, ...]]:
        """The seeds of every arm's runs, arms of ablations among them."""
        return {name: arm.seeds or self.seeds for name, arm in self.all_arms().items()}

    def runs(self) -> dict[str, Run]:
        """The settings of every arm's training job."""
        return {name: self._run(name, arm) for name, arm in self.all_arms().items()}

    def run(self, arm_name: str) -> Run:
        """The settings of one arm's training job."""
        return self._run(arm_name, self.arms.get(arm_name) or self.all_arms()[arm_name])

    def _run(self, arm_name: str, arm: Arm) -> Run:
        """Raises ValueError if the arm's overrides do not fit."""
        try:
            training = Training.model_validate({**self.training.model_dump(), **arm.training})
        except ValidationError as error:
            raise ValueError(f"arms.{arm_name}.training: {sentences(error)}") from None
        if "snapshot_every" in arm.training:
            raise ValueError(
                f"arms.{arm_name}.training.snapshot_every: arms are compared at the same steps; set it in training"
            )
        try:
            arm.check(training)
        except ValueError as error:
            raise ValueError(f"arms.{arm_name}: {error}") from None
        own = {name: getattr(arm, name) for name in ArmBlocks.model_fields}
        shared = {name: getattr(self, name) for name in ("policy", "task", "curriculum")}
        return Run(study=self.name, arm=arm_name, training=training, **shared, **own)
