"""vLLM as the rollout engine. Only `engine` and `processor` import vLLM itself."""

import os

# vLLM reads these on import. In one process the engine loads in 4 s instead of 15 to 30, and weights need no copy
# through shared memory. A cache of 1 GiB holds far more than a step's sequences.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
