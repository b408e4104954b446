"""Metrics of a run: their names, the file they go to, alarms on them, and W&B."""
