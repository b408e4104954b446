"""A study's parts together."""
