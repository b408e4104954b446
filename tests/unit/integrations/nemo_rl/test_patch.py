"""The patch for NeMo-RL, applied to its source: min-p in the trainer's log-probs is our safe set.

PEERS=FOLDER names a folder with a checkout `nemo-rl` of the commit in docs/how-to/nemo-rl.md; without it nothing runs.
"""

import importlib
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from ranks_fixture import on_ranks

from tailrl.losses import constrained_logprobs, token_logprobs

ROOT = Path(__file__).parents[4]
PATCH = ROOT / "integrations/nemo-rl/min_p.patch"
SOURCE = Path(os.environ.get("PEERS") or "nowhere") / "nemo-rl"
V, H, RHO, TEMPERATURE = 40, 16, 0.1, 0.7

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not SOURCE.is_dir(), reason="PEERS has no folder nemo-rl")]


@pytest.fixture(scope="module")
def patched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """NeMo-RL's package with the patch, first on the path."""
    folder = tmp_path_factory.mktemp("nemo")
    shutil.copytree(SOURCE / "nemo_rl", folder / "nemo_rl")
    command = ["git", "apply", "--unidiff-zero", str(PATCH)]
    subprocess.run(command, cwd=folder, check=True, env=os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)})
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    for name in [name for name in sys.modules if name.partition(".")[0] == "nemo_rl"]:
        del sys.modules[name]


def module(name: str) -> ModuleType:
    return importlib.import_module(f"nemo_rl.{name}")


def test_the_patchs_own_tests_pass(patched: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/algorithms/test_min_p.py"]
    ended = subprocess.run(command, cwd=patched, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."})
    assert ended.returncode == 0 and "6 passed" in ended.stdout, ended.stdout + ended.stderr


def example() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states [2, 6, H], a head [V, H] and tokens [2, 6]; some tokens lie outside the set."""
    draw = torch.Generator().manual_seed(5)
    hidden, head = torch.randn(2, 6, H, generator=draw), torch.randn(V, H, generator=draw)
    return hidden, head, torch.randint(0, V, (2, 6), generator=draw)


@pytest.mark.usefixtures("patched")
def test_log_probs_and_gradients_of_one_process_are_ours() -> None:
    sampling = module("algorithms.logits_sampling_utils")
    hidden, head, tokens = example()
    theirs, ours = head.clone().requires_grad_(), head.clone().requires_grad_()
    logits = hidden @ theirs.T / TEMPERATURE
    filtered, _ = sampling.apply_top_k_top_p(logits, None, 1.0, min_p=RHO)
    logp = filtered.log_softmax(-1).gather(-1, tokens[..., None]).flatten()
    rows = hidden.flatten(0, 1)
    expected = constrained_logprobs(rows, ours, tokens.flatten(), "min_p", math.log(RHO), TEMPERATURE)
    inside = ~expected.outside_T
    assert 0 < inside.sum() < len(inside) and torch.equal(logp.isneginf(), ~inside)
    torch.testing.assert_close(logp[inside], expected.logp_T[inside], atol=1e-6, rtol=1e-6)
    logp[inside].sum().backward()
    expected.logp_T.sum().backward()
    assert theirs.grad is not None and ours.grad is not None
    torch.testing.assert_close(theirs.grad, ours.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("chunk", [None, 2])
def test_a_vocabulary_over_two_ranks(tmp_path: Path, chunk: int | None) -> None:
    """Tensor parallel: each rank has half of the vocabulary's logits."""
    utils, sampling = module("distributed.model_utils"), module("algorithms.logits_sampling_utils")
    hidden, head, tokens = example()
    logits = hidden @ head.T / TEMPERATURE

    def of_rank() -> tuple[torch.Tensor, torch.Tensor]:
        rank = dist.get_rank()
        own = logits[..., rank * V // 2 : (rank + 1) * V // 2].clone().requires_grad_()
        found = utils.from_parallel_logits_to_logprobs(
            own, tokens, rank * V // 2, (rank + 1) * V // 2, dist.group.WORLD, chunk_size=chunk,
            cp_group=dist.new_group([rank], use_local_synchronization=True),
            sampling_params=sampling.TrainingSamplingParams(min_p=RHO),
        )  # fmt: skip
        found[found > -math.inf].sum().backward()
        assert own.grad is not None
        return found.detach(), own.grad

    ranks = on_ranks(2, tmp_path, of_rank)
    whole = logits.clone().requires_grad_()
    expected = token_logprobs(whole[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), "min_p", math.log(RHO))
    expected.logp_T.sum().backward()
    assert whole.grad is not None
    wanted = expected.in_set().view(2, 5)
    for found, _ in ranks:
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.cat([grad for _, grad in ranks], -1), whole.grad, atol=1e-6, rtol=1e-5)
