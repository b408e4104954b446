"""Training: the supervised warm start and the reinforcement-learning loop."""
