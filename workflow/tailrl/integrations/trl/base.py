"""Imports TRL's trainers, or raises ImportError with advice. No other module imports TRL."""

TRL = "1.16"
"""The series of versions that the adapter is tested with."""

try:
    import trl
    from trl import GRPOTrainer as GRPOTrainer
    from trl import RLOOTrainer as RLOOTrainer
except ImportError as error:
    raise ImportError(f"tailrl.trl needs TRL, which cannot be imported ({error}): pip install trl=={TRL}.*") from None

if trl.__version__.split(".")[:2] != TRL.split("."):
    raise ImportError(f"tailrl.trl overrides parts of TRL {TRL}, and knows no other: this one is {trl.__version__}")
