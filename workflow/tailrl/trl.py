"""DVP, corrections, logs and alarms for TRL's trainers: the public name of `tailrl.integrations.trl`."""

from tailrl.integrations.trl import Correction, with_doctor, with_dvp, with_log

__all__ = ["Correction", "with_doctor", "with_dvp", "with_log"]
