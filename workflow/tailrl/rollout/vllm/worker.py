"""What the sampler has vLLM's worker do: return its record, and take weights."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from tailrl.rollout.vllm.classes import give_classes
from tailrl.rollout.vllm.experts import ExpertsExtension, renew_kernels
from tailrl.rollout.vllm.quantization import finish_reload, formats, rounds_queries
from tailrl.rollout.vllm.recorder import SafeSetRecord, SafeSetRecorder


class WorkerExtension(ExpertsExtension):
    """Methods added to vLLM's worker, so that the sampler can reach it."""

    model_runner: Any

    def safe_set_recorder(self) -> SafeSetRecorder | None:
        """This worker's logits processor; None if vLLM did not install it."""
        runner = self.model_runner
        if hasattr(runner, "sampler") and hasattr(runner.sampler, "logits_processors"):
            processors = runner.sampler.logits_processors  # Model Runner V2
        else:
            processors = runner.input_batch.logitsprocs.argmax_invariant
        return next((p for p in processors if isinstance(p, SafeSetRecorder)), None)

    def records_safe_sets(self) -> bool:
        """Whether the processor is in this worker's model runner."""
        return self.safe_set_recorder() is not None

    def formats(self) -> tuple[set[str], set[str]]:
        """See the function."""
        return formats(self.model_runner.get_model())

    def rounds_queries(self) -> bool:
        """Whether attention rounds queries to the format of the cache, as FlashAttention 3 does."""
        return rounds_queries(self.model_runner.get_model())

    def give_classes(self, changed: dict[type[nn.Module], type[nn.Module]]) -> None:
        """See the function."""
        give_classes(self.model_runner.get_model(), changed)

    def take_safe_set_record(self) -> SafeSetRecord:
        """The record of this worker's logits processor."""
        recorder = self.safe_set_recorder()
        if recorder is None:
            raise RuntimeError("vLLM's model runner has no processor of ours")
        return recorder.take()

    def set_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Load named tensors in checkpoint format; the model's loader splits, fuses and casts them."""
        renew_kernels(self.model_runner.model)
        self.model_runner.reload_weights(weights_iterator=weights)
        if self.model_runner.vllm_config.quant_config is not None:
            finish_reload(self.model_runner.get_model())
