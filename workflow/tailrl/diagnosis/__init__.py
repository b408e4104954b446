"""What a log of sampled tokens tells: the mismatch of its two log-probs, under every framework's names."""
