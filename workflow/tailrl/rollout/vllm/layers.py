"""vLLM's own hidden states, layer by layer: an engine in this process, eager, on one sequence at a time."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from tailrl.model.layer_outputs import Outputs, recorded
from tailrl.runtime import distributed
from tailrl.runtime.errors import ModelError, reason


class LayersExtension:
    """Methods added to vLLM's worker."""

    model_runner: Any

    def start_recording(self) -> None:
        """From now on the worker keeps what its model's layers give."""
        self.recording = recorded(self.model_runner.get_model())
        self.outputs = self.recording.__enter__()

    def take_outputs(self) -> Outputs:
        """What the layers gave since the last call, and forgets it."""
        taken = dict(self.outputs)
        self.outputs.clear()
        return taken


def engine_outputs(folder: Path, sequences: Sequence[Sequence[int]], dtype: str) -> list[Outputs]:
    """What the layers of a vLLM of this folder give for each sequence of token ids.

    Raises StudyError where vLLM cannot start with it.
    """
    distributed.stay_on_loopback()
    longest = max(map(len, sequences)) + 1
    try:
        engine = LLM(
            model=str(folder),
            trust_remote_code=False,
            dtype=dtype,
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=1,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            gpu_memory_utilization=0.5 if torch.cuda.is_available() else 0.1,
            worker_extension_cls=f"{LayersExtension.__module__}.{LayersExtension.__name__}",
            disable_log_stats=True,
        )
    except (OSError, ValueError, RuntimeError, AssertionError) as error:
        raise ModelError(f"{folder}: vLLM could not start with this policy: {reason(error)}") from error
    try:
        engine.collective_rpc("start_recording")
        return [_outputs(engine, ids) for ids in sequences]
    finally:
        engine.llm_engine.engine_core.shutdown()


def _outputs(engine: LLM, ids: Sequence[int]) -> Outputs:
    once = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
    engine.generate([TokensPrompt(prompt_token_ids=list(ids))], once, use_tqdm=False)
    [outputs] = engine.collective_rpc("take_outputs")
    # A step that was scheduled ahead may have run one token more.
    return {name: rows_PH[: len(ids)] for name, rows_PH in outputs.items()}
