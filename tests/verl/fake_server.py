"""Stands in for verl's client of its vLLM servers: notes each request, and answers with three tokens."""

import json
from pathlib import Path
from typing import Any


class FakeClient:
    """Picklable; each request's sampling parameters become a line of the file."""

    # No dataclass: Hydra would turn one into a configuration.
    def __init__(self, file: Path) -> None:
        self.file = file

    async def generate(self, *_: Any, sampling_params: dict[str, Any], **__: Any) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        with self.file.open("a") as file:
            file.write(json.dumps(sampling_params) + "\n")
        return TokenOutput(
            token_ids=[7, 8, 1], log_probs=[-1.0, -2.0, -0.5], stop_reason="completed",
            extra_fields={"global_steps": 0, "min_global_steps": 0, "max_global_steps": 0},
        )  # fmt: skip
