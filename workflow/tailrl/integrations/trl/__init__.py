"""DVP and corrections such as MIS for TRL: `with_dvp` adds them to RLOOTrainer and GRPOTrainer.

`with_log` writes what a trainer samples as a log for `tailrl diagnose`; `with_doctor` raises the alarms of `tailrl
watch` in the trainer's own log.

Trainer = with_dvp(RLOOTrainer, rho=math.exp(-13), correction=Correction(sequence="mis", veto=1e-4))
Trainer(model, reward, args=RLOOConfig(min_p=math.exp(-13), beta=0.0, ...), train_dataset=problems).train()
"""

from typing import TypeVar

from tailrl.config.arm import Correction
from tailrl.integrations.trl.base import GRPOTrainer, RLOOTrainer
from tailrl.integrations.trl.checks import check_adapter
from tailrl.integrations.trl.doctor import with_doctor
from tailrl.integrations.trl.log import with_log
from tailrl.integrations.trl.trainer import DVPMixin

__all__ = ["Correction", "with_doctor", "with_dvp", "with_log"]

Trainer = TypeVar("Trainer")


def with_dvp(trainer: type[Trainer], rho: float, correction: Correction | None = None) -> type[Trainer]:
    """A subclass of one of TRL's trainers that follows the constrained objective.

    Args:
        trainer: RLOOTrainer, GRPOTrainer or a subclass of one.
        rho: ρ of min-p, 0 < ρ ≤ 1; `args.min_p` of the trainer must be the same number.
        correction: weights of the sampled responses, from the sampler's log-probs; None: 1 each.

    Raises:
        StudyError: at once for an unsupported trainer, ρ or correction; when the trainer is made, for unsupported
            settings or an unsupported model.
    """
    correction = correction or Correction()
    check_adapter(trainer, (RLOOTrainer, GRPOTrainer), rho, correction, tokens=issubclass(trainer, GRPOTrainer))
    fields = {"rho": rho, "correction": correction, "__doc__": trainer.__doc__}
    return type(f"DVP{trainer.__name__}", (DVPMixin, trainer), fields)
