"""Alarms on a running training, from its logs or from within its loop."""

from tailrl.watch.alarms import Alarm, Alarms, Step

__all__ = ["Alarm", "Alarms", "Step"]
