"""How much the kernels hold at a time. A plan counts with these numbers where no torch is installed."""

CHUNK_ROWS = 256  # of a chunk on a CPU; at most 256: an entry stores its row of the chunk in one byte
CHUNK_BYTES = 64 * 2**20  # of a chunk's logits on a CPU, the largest tensor held at a time
KEPT_BYTES = 64 * 2**20  # of the entries that one call keeps on a CPU, so that memory stops growing with T
GPU_MATRIX_BYTES = 2**30  # of logits in the forward, of their gradient in the backward: the largest tensor on a GPU
GPU_KEPT_BYTES = 2**30  # of the entries that one call keeps on a GPU; rows beyond it are computed again
LOGITS_AT_ONCE, GPU_LOGITS_AT_ONCE = 2**21, 2**25
"""Logits in a chunk of whole rows: 8 MiB of float32, as a CPU's cache likes, or 128; the backward holds ten of them."""
