"""Number formats of vLLM that need instructions which not every CPU has.

vLLM 0.32 has no int4 kernel in its library for AVX2, and fails with its first batch. oneDNN multiplies int8 without
VNNI too. But it adds pairs of products in 16 bits, where they saturate: log-probs are off by 0.2 nats.
"""

from collections.abc import Collection

from tailrl.config.sampler import SamplerSettings

AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
FP8_CACHE = ("an fp8 cache needs AVX-512 or AMX", (AVX512, {"amx_tile"}))
# What a format needs, in words, and as sets of CPU flags. It needs all flags of one of the sets.
INSTRUCTIONS: dict[str | None, tuple[str, tuple[set[str], ...]]] = {
    "fp8_e4m3": FP8_CACHE,
    "fp8_e5m2": FP8_CACHE,
    "int4": ("int4 weights need AVX-512", (AVX512,)),
    "int8": ("int8 weights need VNNI", ({"avx512_vnni"}, {"avx_vnni"})),
}


def lacking(sampler: SamplerSettings, flags: Collection[str]) -> dict[str, str]:
    """Why vLLM cannot sample so on a CPU with these flags, by key; empty if it can.

    Without any flag nothing is known of the CPU, and fp8 weights alone are refused: they need a GPU.
    """
    formats = sampler.formats
    if formats is None or formats.TRAINERS_BITS:
        return {}
    if formats.quantization == "fp8":
        return {"quantization": "fp8 weights need a GPU"}
    found = {}
    for key, name in (("kv_cache_dtype", formats.kv_cache_dtype), ("quantization", formats.quantization)):
        words, sets = INSTRUCTIONS.get(name, ("", (set(),)))
        if flags and not any(needed <= set(flags) for needed in sets):
            found[key] = f"on a CPU {words}, which this one has not"
    return found
