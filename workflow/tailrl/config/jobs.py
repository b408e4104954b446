"""The settings of each kind of job: an evaluation, the problems, the policy, a training run."""

import math
from typing import Literal, Self

from pydantic import Field, model_validator

from tailrl.config.arm import ArmBlocks
from tailrl.config.base import HOTTEST, LARGEST_SEED, MOST_RESPONSES, MOST_TOKENS, Settings
from tailrl.config.curriculum import Curriculum
from tailrl.config.policy import Policy
from tailrl.config.sampler import SamplerSettings, VllmSettings
from tailrl.config.tasks import GeneratedTask, Task
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.training import Training, trainer_dtype
from tailrl.config.vocabulary import log_rho
from tailrl.runtime.timeouts import MONTH


class Evaluation(Settings):
    """Held-out problems, scored by lm-eval: k samples for each."""

    task: Task = ArithmeticTask(problems=200)
    samples: int = Field(8, ge=1, le=MOST_RESPONSES, description="k: responses per problem, for avg@k and pass@k")
    greedy: bool = Field(
        True,
        description="one more response to each problem, of the most probable tokens: it tells what a policy can do "
        "from how sharp it is",
    )
    sampler: SamplerSettings = VllmSettings()
    temperature: float = Field(1.0, ge=0.01, le=HOTTEST, description="sampling temperature; vLLM takes 0.01 to 2")
    max_new_tokens: int = Field(64, ge=1, le=MOST_TOKENS, description="longest response, tokens")
    seed: int = Field(0, le=LARGEST_SEED, description="seed of the samples, the same for every policy")
    rollout_timeout: float = Field(
        14400.0,
        gt=0,
        le=MONTH,
        description="seconds that the responses of one policy may take; after them the job is ended as hung",
    )

    @model_validator(mode="after")
    def _without_trainer(self) -> Self:
        if self.sampler.verify:
            raise ValueError("sampler.verify needs a trainer, which an evaluation does not have")
        if self.sampler.says_routes:
            raise ValueError("sampler.routes is for a trainer, which an evaluation does not have")
        self.sampler.check_temperature("temperature", self.temperature)
        if self.sampler.sharing != 1:
            raise ValueError("sampler.tensor_parallel is for the ranks of a run: an evaluation is one process")
        return self


class Problems(Settings):
    """The problems of a study, which the first job writes."""

    train: Task
    harder: tuple[GeneratedTask, ...] = ()
    evaluation: Task
    warm_start: tuple[GeneratedTask, ...]


class PolicyFile(Settings):
    """The base policy, which the second job makes."""

    policy: Policy


class Run(ArmBlocks):
    """The settings of one training job, with the arm's overrides applied."""

    study: str
    arm: str
    policy: Policy
    task: Task
    curriculum: Curriculum | None = None
    training: Training

    def computed_in(self, gpu: bool) -> Literal["float32", "bfloat16"]:
        """The trainer's number format on a machine with or without a GPU."""
        return trainer_dtype(self.training.dtype, self.sampler.exact, gpu)

    @property
    def policy_dtype(self) -> Literal["float32", "bfloat16"]:
        """Number format of the policies that the run leaves, snapshots and the last one alike.

        bfloat16 where trainer and sampler both compute in it: each rounds the float32 master weights to these bits, and
        so does an evaluation in bfloat16, whose scores therefore stay the same. The masters are in checkpoints alone.
        """
        return "bfloat16" if self.training.dtype == self.sampler.dtype == "bfloat16" else "float32"

    @property
    def needs_distributions(self) -> bool:
        """Whether the objective needs the sampler's whole distribution at every token."""
        return self.vocabulary.side == "replay" or self.correction.centering != "none"

    def floor_defeats_pruning(self, vocabulary_size: int) -> bool:
        """Whether the disturbance's floor lifts every token over the threshold in every state: nothing is pruned.

        Under the floor, a token has at least η/V and at most 1 − η + η/V. `entropy` compares with exp(−H), which is at
        most the largest probability.
        """
        rhos = [log_rho(rho, vocabulary_size) for rho in self.vocabulary.rhos]
        disturbed = self.vocabulary.side != "trainer" or self.disturbance.side == "both"
        eta = self.disturbance.floor
        least = eta / vocabulary_size
        return bool(rhos) and disturbed and least > 0 and math.log(least) >= max(rhos) + math.log(1 - eta + least)
