"""Measurements without training: whole distributions of engines, exact gradients of tiny models."""
