# The public names for type checkers; `__init__.py` imports each when it is first asked for.

from tailrl.artifacts.results import read_results as read_results
from tailrl.config.arm import Arm as Arm
from tailrl.config.arm import Clip as Clip
from tailrl.config.arm import Correction as Correction
from tailrl.config.load import read_study as read_study
from tailrl.config.sampler import Disturbance as Disturbance
from tailrl.config.sampler import SamplerSettings as SamplerSettings
from tailrl.config.study import Study as Study
from tailrl.config.training import Training as Training
from tailrl.config.vocabulary import Vocabulary as Vocabulary
from tailrl.diagnosis.diagnosis import diagnose as diagnose
from tailrl.explanation.explanation import explain as explain
from tailrl.integrations.trl import with_dvp as with_dvp
from tailrl.kernels.logprobs import constrained_logprobs as constrained_logprobs
from tailrl.model.policy import load_policy as load_policy
from tailrl.model.policy import load_tokenizer as load_tokenizer
from tailrl.objective.advantages import ESTIMATORS as ESTIMATORS
from tailrl.objective.batch import batch_loss as batch_loss
from tailrl.objective.corrections import correct as correct
from tailrl.objective.diagnostics import log_ratio_metrics as log_ratio_metrics
from tailrl.objective.disturbance import disturb as disturb
from tailrl.objective.loss import LossInputs as LossInputs
from tailrl.objective.loss import loss as loss
from tailrl.objective.loss import surrogate as surrogate
from tailrl.objective.safe_set import safe_set as safe_set
from tailrl.objective.safe_set import token_logprobs as token_logprobs
from tailrl.rollout import Decoding as Decoding
from tailrl.rollout import make_sampler as make_sampler
from tailrl.rollout.types import Request as Request
from tailrl.rollout.types import Rollout as Rollout
from tailrl.runtime.errors import ConfigurationError as ConfigurationError
from tailrl.runtime.errors import DataError as DataError
from tailrl.runtime.errors import ModelError as ModelError
from tailrl.runtime.errors import StorageError as StorageError
from tailrl.runtime.errors import StudyError as StudyError
from tailrl.training.loop import train as train

__version__: str
_HOME: dict[str, str]
