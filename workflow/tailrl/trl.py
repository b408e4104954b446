"""DVP and corrections for TRL's trainers: the public name of `tailrl.integrations.trl`."""

from tailrl.integrations.trl import Correction, with_dvp

__all__ = ["Correction", "with_dvp"]
