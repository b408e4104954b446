"""Exams: what the package answers to logs of known cause. README.md has the commands."""
