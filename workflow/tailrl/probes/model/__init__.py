"""Probes a model without a study: an engine samples, the trainer scores, and both are compared token by token."""
