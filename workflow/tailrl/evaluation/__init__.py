"""Held-out evaluation through lm-eval, and the model card."""
