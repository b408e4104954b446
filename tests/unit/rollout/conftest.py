"""The policies of the exact engine's tests, as folders and in transformers engines, which other tests here share."""

from pathlib import Path

import pytest
from exact_fixture import CONFIGS, random_policy, sampler_of
from transformers_fixture import GQA, engine_of

from tailrl.rollout.transformers import TransformersSampler


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each architecture."""
    made = {}
    for name in CONFIGS:
        made[name] = tmp_path_factory.mktemp("policy")
        sampler_of(random_policy(name, "float32"), made[name])
    return made


@pytest.fixture(scope="session")
def engines(folders: dict[str, Path]) -> dict[str, TransformersSampler]:
    """One in float32 for each architecture."""
    return {name: engine_of(folder, name) for name, folder in folders.items()}


@pytest.fixture
def engine(engines: dict[str, TransformersSampler]) -> TransformersSampler:
    return engines[GQA]
