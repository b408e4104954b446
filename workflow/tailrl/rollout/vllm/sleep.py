"""vLLM's sleep beside a trainer on the same GPU: it gives its memory away while the trainer updates the policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Sleep:
    """When an engine sleeps. It wakes for the next weights alone, since every step hands over new ones."""

    def __init__(self, llm: Any, allowed: bool) -> None:
        """Of vLLM's `LLM`, which is awake; `allowed`: it has vLLM's sleep mode."""
        self.llm = llm
        self.allowed = allowed
        self.asleep = False

    def begin(self) -> bool:
        """Drop weights and cache, if the engine is awake and may sleep; returns whether it did."""
        if not self.allowed or self.asleep:
            return False
        self.llm.sleep(level=2)
        self.asleep = True
        return True

    @contextmanager
    def ended(self) -> Iterator[None]:
        """Around the hand-over of weights. The cache wakes after it, since it may gather a whole policy."""
        if self.asleep:
            self.llm.wake_up(tags=["weights"])
        yield
        if self.asleep:
            self.llm.wake_up(tags=["kv_cache"])
            self.asleep = False
