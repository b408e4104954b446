"""Training-inference mismatch in LLM reinforcement learning, and Dynamic Vocabulary Pruning (DVP).

What is public here is imported when it is first asked for; `import tailrl` alone loads no torch.

Objective       safe_set, token_logprobs: the safe set of a row of logits, and log-probs constrained to it
                constrained_logprobs: the same from hidden states and the head's weight, chunk by chunk
                ESTIMATORS: advantages (RLOO, REINFORCE, GRPO); correct: importance weights and masks (MIS, TIS, ...)
                batch_loss: the loss of a padded batch and its mask; LossInputs, loss, surrogate: of packed tokens
                log_ratio_metrics: k1, k3, perplexities, chi-squared, ...; tailrl.losses has all of these and more
                Disturbance, disturb: a mismatch of a known size, put on logits
Settings        read_study, Study, Arm, Vocabulary, Correction, Clip, SamplerSettings, Training
Sampling        make_sampler, Decoding, Request, Rollout: vLLM, transformers and the trainer's own bits
Training        train: one arm with one seed; load_policy, load_tokenizer
Diagnosis       diagnose: the mismatch in a log of any framework, its causes, and each remedy replayed on it
                explain: the log recomputed with its model under many hypotheses, and the one that reproduces it
Results         read_results: what a study's runs left
Errors          StudyError, one sentence on what and where: ConfigurationError, DataError, ModelError, StorageError
TRL             with_dvp: RLOOTrainer and GRPOTrainer on the constrained objective; needs TRL
"""

import sys
from importlib import import_module

# `__init__.pyi` has the same for type checkers, who would find no name here.
_MODULES = {
    "objective.safe_set": ("safe_set", "token_logprobs"),
    "kernels.logprobs": ("constrained_logprobs",),
    "objective.advantages": ("ESTIMATORS",),
    "objective.corrections": ("correct",),
    "objective.loss": ("LossInputs", "loss", "surrogate"),
    "objective.batch": ("batch_loss",),
    "objective.diagnostics": ("log_ratio_metrics",),
    "objective.disturbance": ("disturb",),
    "config.load": ("read_study",),
    "config.study": ("Study",),
    "config.arm": ("Arm", "Clip", "Correction"),
    "config.vocabulary": ("Vocabulary",),
    "config.sampler": ("Disturbance", "SamplerSettings"),
    "config.training": ("Training",),
    "rollout": ("Decoding", "make_sampler"),
    "rollout.types": ("Request", "Rollout"),
    "training.loop": ("train",),
    "model.policy": ("load_policy", "load_tokenizer"),
    "artifacts.results": ("read_results",),
    "diagnosis.diagnosis": ("diagnose",),
    "explanation.explanation": ("explain",),
    "runtime.errors": ("ConfigurationError", "DataError", "ModelError", "StorageError", "StudyError"),
    "integrations.trl": ("with_dvp",),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Written elsewhere: this file is a source of every job, and a new version alone makes no result stale.
        return import_module("tailrl.runtime.version").VERSION
    if name not in _HOME:
        raise AttributeError(f"module 'tailrl' has no attribute {name!r}")
    try:
        return getattr(import_module(f"tailrl.{_HOME[name]}"), name)
    except ModuleNotFoundError as error:
        from tailrl.runtime.extras import not_installed

        extra = {"training": "study", "model": "study", "integrations": "trl"}.get(_HOME[name].partition(".")[0])
        words = not_installed(error, f"tailrl.{name}", extra)
        words = words or f"tailrl.{name} needs {error.name}, which is not installed"
        # `hasattr` and `help` go on after an AttributeError, whose words `from tailrl import ...` would not show.
        kind = ImportError if sys._getframe(1).f_code.co_name == "_handle_fromlist" else AttributeError
        raise kind(words) from error


def __dir__() -> list[str]:
    return [*globals(), *_HOME]
