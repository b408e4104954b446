"""What every room uses: errors, seeds, files, processes. Knows nothing of reinforcement learning."""
