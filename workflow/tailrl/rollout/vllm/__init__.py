"""vLLM as the rollout engine. Only engine, experts, layers, processors and quantization import vLLM itself."""

import os

import torch

# vLLM reads these on import. In one process the engine loads in 4 s instead of 15 to 30, and weights need no copy
# through shared memory. A cache of 1 GiB holds far more than a step's sequences.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
# Model Runner V2 imports FlashInfer for its sampler, which would never run: each request has a seed.
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
# Otherwise int4 weights silently meet activations of 8 bits on a CPU with AMX.
os.environ["VLLM_CPU_INT4_W4A8"] = "0"
os.environ.pop("VLLM_MARLIN_INPUT_DTYPE", None)  # likewise on a GPU
# Model Runner V2 is vLLM's own choice where Triton works, which is a GPU; V1 is all that a CPU has. Each takes another
# processor, so the choice is fixed here, before vLLM reads it. On a GPU the user may still say 0.
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1" if torch.cuda.is_available() else "0")
