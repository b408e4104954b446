"""verl's checkpoint engine `files`: weights go to samplers with accelerators of their own by a file.

verl's own engines need a GPU: the one called nccl imports cupy (checkpoint_engine/nccl_checkpoint_engine.py, line 23).
"""

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

SECONDS = 120


@CheckpointEngineRegistry.register("files")
class FileWeights(CheckpointEngine):
    """Each version of the weights is a file in a folder, which the samplers wait for."""

    def __init__(self, bucket_size: int, folder: str, is_master: bool = False) -> None:  # noqa: ARG002
        self.folder = Path(folder)

    def prepare(self) -> dict[str, Any]:
        return {}

    @classmethod
    def build_topology(cls, *_: Any) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        return {}, {}

    def init_process_group(self) -> None: ...

    def finalize(self) -> None: ...

    def _file(self, version: int | None) -> Path:
        return self.folder / f"{version}.pt"

    async def send_weights(
        self, weights: Generator[tuple[str, Tensor], None, None], global_steps: int | None = None
    ) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self._file(global_steps).with_suffix(".part")
        torch.save({name: weight.detach().clone() for name, weight in weights}, aside)
        aside.replace(self._file(global_steps))

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, Tensor], None]:
        async with asyncio.timeout(SECONDS):
            while not self._file(global_steps).exists():
                await asyncio.sleep(0.05)
        for name, weight in torch.load(self._file(global_steps)).items():
            yield name, weight
