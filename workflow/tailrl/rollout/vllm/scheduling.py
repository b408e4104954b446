"""vLLM's arguments for its scheduler, and what vLLM made of them."""

from typing import Any

SEQUENCES_IN_FLIGHT = 128
BATCHED_TOKENS = 4096


def scheduling(gpu: bool, runner_v2: bool, max_length: int) -> dict[str, Any]:
    """vLLM's arguments for its scheduler: on a GPU its own recommendations, which it knows by the GPU's memory.

    vLLM 0.32 has 256 sequences in flight and 8,192 tokens a step there, 1,024 and 16,384 on an H100 or larger.
    """
    if gpu:
        # V1's processor reads the tokens sampled so far, which async scheduling does not have in time.
        return {"enable_chunked_prefill": True, "async_scheduling": runner_v2}
    return {
        "max_num_seqs": SEQUENCES_IN_FLIGHT,
        "max_num_batched_tokens": max(BATCHED_TOKENS, max_length),
        # vLLM 0.32 cannot prefill a seeded request in pieces on a CPU, whose generator has no offset.
        "enable_chunked_prefill": False,
        "async_scheduling": False,
    }


def described(config: Any) -> str:
    """What vLLM chose by the device, in a line of the log; `config` is its own."""
    scheduler = config.scheduler_config
    facts = [
        f"Model Runner V{2 if config.use_v2_model_runner else 1}",
        f"{scheduler.max_num_seqs} sequences in flight",
        f"{scheduler.max_num_batched_tokens} tokens a step",
        f"chunked prefill {'on' if scheduler.enable_chunked_prefill else 'off'}",
        f"async scheduling {'on' if scheduler.async_scheduling else 'off'}",
        f"CUDA graphs {config.compilation_config.cudagraph_mode.name.lower()}",
    ]
    return ", ".join(facts)
