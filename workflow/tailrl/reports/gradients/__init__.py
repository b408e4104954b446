"""Gradient estimators against the exact gradient of tiny models."""
