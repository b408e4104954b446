"""The objective: rewards to advantages, mismatch to weights, log-probs to a loss. Small pure functions."""
