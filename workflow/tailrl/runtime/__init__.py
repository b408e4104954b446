"""Used by every room: errors, seeds, files, processes. Knows nothing of reinforcement learning."""
