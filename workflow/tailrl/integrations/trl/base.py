"""Imports TRL's trainers, or raises ImportError with advice. No other module imports TRL."""

import inspect
import warnings
from collections.abc import Iterator
from typing import Any

TRIED = ("1.13", "1.16")
"""The first and the last series of versions that the tests ran with: docs/results/trl_versions.csv."""

METHODS = (
    "_generate_single_turn",
    "_generate_and_score_completions",
    "_get_per_token_logps_and_entropies",
    "_compute_loss",
)
"""Methods of both trainers that the adapter overrides."""

SETTINGS = ("min_p", "beta", "use_vllm", "use_liger_kernel", "generation_kwargs")
"""Settings of both that it looks at."""

SOURCES = {
    "GRPOTrainer": ("old_per_token_logps", "sampling_per_token_logps", "num_items_in_batch", "vllm_generation"),
    "RLOOTrainer": ("old_logps", "vllm_generation"),
}
"""Names in a trainer's source that the adapter gives or reads: keys of its batches, and its vLLM."""


def missing(trl: Any) -> Iterator[str]:
    """What the adapter needs and this TRL does not have."""
    for name, words in SOURCES.items():
        trainer, config = getattr(trl, name), getattr(trl, name.replace("Trainer", "Config"))
        yield from (f"{name}.{method}" for method in METHODS if not hasattr(trainer, method))
        source = inspect.getsource(inspect.getmodule(trainer) or trainer)
        yield from (f"{word} in {name}" for word in words if word not in source)
        yield from (f"{config.__name__}.{setting}" for setting in SETTINGS if not hasattr(config, setting))


try:
    with warnings.catch_warnings():
        # TRL has not been tried with the vLLM of our pins. It says so at five places of its import, and again where a
        # trainer uses vLLM: there the warning stays.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM versions", UserWarning)
        import trl
        from trl import GRPOTrainer as GRPOTrainer
        from trl import RLOOTrainer as RLOOTrainer
except ImportError as error:
    first, last = TRIED
    raise ImportError(f"tailrl.trl needs TRL {first} to {last}, which cannot be imported ({error})") from None

if gone := list(missing(trl)):
    raise ImportError(
        f"tailrl.trl overrides parts of TRL, and TRL {trl.__version__} has no {', '.join(gone)}; "
        f"{' to '.join(TRIED)} were tried"
    )
