"""Log-probs and operators in chunks, on a CPU and on a GPU; packed rows."""
