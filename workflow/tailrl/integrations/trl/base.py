"""Imports TRL's trainers, or raises ImportError with advice. No other module imports TRL."""

import warnings

TRL = "1.16"
"""The series of versions that the adapter is tested with."""

try:
    with warnings.catch_warnings():
        # TRL has not been tried with the vLLM of our pins. It says so at five places of its import, and again where a
        # trainer uses vLLM: there the warning stays.
        warnings.filterwarnings("ignore", "TRL currently supports vLLM versions", UserWarning)
        import trl
        from trl import GRPOTrainer as GRPOTrainer
        from trl import RLOOTrainer as RLOOTrainer
except ImportError as error:
    raise ImportError(f"tailrl.trl needs TRL, which cannot be imported ({error}): pip install trl=={TRL}.*") from None

if trl.__version__.split(".")[:2] != TRL.split("."):
    raise ImportError(f"tailrl.trl overrides parts of TRL {TRL}, and knows no other: this one is {trl.__version__}")
