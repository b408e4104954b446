"""Explains a log by experiment: recomputes it under each hypothesis, and names the one that reproduces it.

E in a name: entries of a reduced row of logits, see `rows`. The other letters are those of CONTRIBUTING.md.
"""
