"""Two distributions over the whole vocabulary at the same state: the trainer's and an engine's."""
