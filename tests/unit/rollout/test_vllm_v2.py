"""The processor of vLLM's Model Runner V2 against that of V1, which the engines of `test_vllm.py` hold to definitions.

No GPU is needed: V2's `apply` takes CPU tensors and a context made here. The whole of V2 runs in a slow test, in a
process where Triton interprets its kernels.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate
from vllm.v1.worker.cpu import buffer_utils as cpu_buffer_utils
from vllm.v1.worker.gpu import buffer_utils
from vllm.v1.worker.gpu.sample.logits_processor import LogitsContext, build_custom_logits_processors_params_validator

from tailrl.config.sampler import Disturbance
from tailrl.rollout import is_kept
from tailrl.rollout.vllm.processor import SafeSetProcessor
from tailrl.rollout.vllm.processor_v2 import SafeSetProcessorV2
from tailrl.rollout.vllm.recorder import SafeSetRecord

pytestmark = pytest.mark.vllm

V, SLOTS = 50, 8
TEMPERATURE = 0.7
DISTURBED = Disturbance(noise=0.2, bias=0.2, floor=0.01).model_dump()
BATCHES = {
    "full": {"rule": "full"},
    "min_p": {"rule": "min_p", "threshold": -2.0},
    "top_p": {"rule": "top_p", "threshold": 0.8},
    "disturbed": {"rule": "min_p", "threshold": -2.0, "disturbance": DISTURBED},
    "shared noise": {"rule": "min_p", "threshold": -2.0, "disturbance": DISTURBED, "shared_noise": True},
    "kept": {"rule": "min_p", "threshold": -2.0, "disturbance": DISTURBED, "keep_every": 2},
}


@pytest.fixture(autouse=True)
def host_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's buffers of its CPU's runner: those of a GPU need memory that the GPU can read."""
    monkeypatch.setattr(buffer_utils, "UvaBuffer", cpu_buffer_utils.UvaBuffer)


@dataclass
class InFlight:
    """A request in flight: its slot in V2, the tokens of its prompt, and those sampled so far."""

    request: int
    slot: int
    prompt: int
    sampled: int = 0


def extras(sequence: InFlight, batch: dict[str, Any]) -> dict[str, Any]:
    return batch | {"request": sequence.request, "seed": 90 + sequence.request, "start": sequence.request % 3}


def states() -> SimpleNamespace:
    """V2's buffers by slot, as far as the processor reads them."""
    lengths = (SimpleNamespace(np=np.zeros(SLOTS, np.int32)) for _ in range(2))
    return SimpleNamespace(max_num_reqs=SLOTS, **dict(zip(("prompt_len", "prefill_len"), lengths, strict=True)))


def v2_of(sequences: Sequence[InFlight], batches: Sequence[dict[str, Any]]) -> SafeSetProcessorV2:
    made = SafeSetProcessorV2(None, states())
    for sequence, batch in zip(sequences, batches, strict=True):
        made.states.prompt_len.np[sequence.slot] = made.states.prefill_len.np[sequence.slot] = sequence.prompt
        given = extras(sequence, batch) | {"temperature": TEMPERATURE}
        assert made.add_request(sequence.slot, SamplingParams(temperature=1.0, extra_args=given))
    made.apply_staged_writes()
    return made


def context(sequences: Sequence[InFlight], lengths: Sequence[int] | None = None, padding: int = 3) -> LogitsContext:
    """A step in which these requests have a row each, in this order; lengths: of the tokens seen, this step's too."""
    slots = np.array([sequence.slot for sequence in sequences])
    seen = [s.prompt + s.sampled for s in sequences] if lengths is None else lengths
    return LogitsContext(
        expanded_idx_mapping=torch.from_numpy(slots),
        idx_mapping=torch.from_numpy(slots),
        idx_mapping_np=slots,
        expanded_local_pos=torch.zeros(len(slots), dtype=torch.int32),
        input_ids=torch.zeros(len(slots), dtype=torch.int32),
        pos=torch.tensor(seen) - 1,
        seq_lens_upper_bound_np=np.array([*seen, *[0] * padding], np.int32),
    )


def v1_applied(made: SafeSetProcessor, logits: Tensor) -> Tensor:
    return made.apply(logits / TEMPERATURE)


def same(found: SafeSetRecord, expected: SafeSetRecord) -> None:
    """Equal to the bit, entry by entry."""
    for name in ("request", "index", "log_kept", "kept_vocab"):
        left, right = getattr(found, name), getattr(expected, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    assert [place[:2] for place in found.logits] == [place[:2] for place in expected.logits]
    assert all(torch.equal(left[2], right[2]) for left, right in zip(found.logits, expected.logits, strict=True))


def test_vllm_takes_the_processor() -> None:
    """By V2's own loader, which refuses V1's."""
    validate = build_custom_logits_processors_params_validator([SafeSetProcessorV2])
    validate(SamplingParams(extra_args={"request": 0}))
    with pytest.raises(ValueError, match="SafeSetProcessor is not a subclass"):
        build_custom_logits_processors_params_validator([SafeSetProcessor])


@pytest.mark.parametrize("batches", [[name] for name in BATCHES] + [list(BATCHES)], ids=lambda names: "+".join(names))
def test_tokens_and_records_are_those_of_v1(batches: list[str]) -> None:
    """To the bit, over five steps in which V2 puts the rows into another order each time and moves none of its slots.

    The token drawn is the largest logit plus noise, the same for both: V2's law where the logits are V1's.
    """
    rng, order = np.random.default_rng(0), np.random.default_rng(1)
    sequences = [InFlight(request, slot, 3 + request) for request, slot in enumerate((5, 2, 7, 0, 3, 6))]
    settings = [BATCHES[batches[i % len(batches)]] for i in range(len(sequences))]
    v2, tokens = v2_of(sequences, settings), [[] for _ in sequences]
    for _ in range(5):
        rows = order.permutation(len(sequences))
        logits = torch.tensor(rng.normal(0, 2, (len(rows), V)), dtype=torch.float32)
        noise = torch.tensor(rng.gumbel(size=(len(rows), V)), dtype=torch.float32)
        v1 = SafeSetProcessor(None, torch.device("cpu"), False)
        added = [
            (place, SamplingParams(extra_args=extras(sequences[row], settings[row])), None, tokens[row])
            for place, row in enumerate(rows)
        ]
        v1.update_state(BatchUpdate(batch_size=0, removed=[], added=added, moved=[]))
        expected = v1_applied(v1, logits)
        given = logits.clone()
        found = v2.apply(given, context([sequences[row] for row in rows]))
        assert found is given, "vLLM prefers logits changed in place"
        assert torch.equal(found, expected)
        same(v2.take(), v1.take())
        for place, token in enumerate((found + noise).argmax(-1).tolist()):
            tokens[rows[place]].append(token)
            sequences[rows[place]].sampled += 1
    assert any(map(is_kept, range(90, 96), range(6), [2] * 6))


def test_a_piece_of_a_prompt_leaves_no_record() -> None:
    """Nor does a piece of the tokens that a preempted request is given once more; the last piece has the next token."""
    first, again = InFlight(0, 1, prompt=20), InFlight(1, 4, prompt=5, sampled=9)
    made = v2_of([first, again], [BATCHES["kept"]] * 2)
    made.states.prefill_len.np[again.slot] = 14  # five tokens of its prompt and nine sampled ones
    for lengths, recorded in [
        ((8, 6), []),
        ((16, 13), []),
        ((20, 14), [(0, 0), (1, 9)]),
        ((21, 15), [(0, 1), (1, 10)]),
    ]:
        made.apply(torch.randn(2, V), context([first, again], lengths))
        record = made.take()
        assert list(zip(record.request.tolist(), record.index.tolist(), strict=True)) == recorded
        assert {place[:2] for place in record.logits} <= set(recorded)


def test_a_slot_that_another_request_gets_forgets_the_one_before() -> None:
    one, other = InFlight(0, 2, prompt=3), InFlight(5, 2, prompt=9)
    made = v2_of([one, other], [BATCHES["min_p"], BATCHES["full"]])
    fresh = v2_of([other], [BATCHES["full"]])
    logits = torch.randn(1, V)
    assert torch.equal(made.apply(logits.clone(), context([other])), fresh.apply(logits.clone(), context([other])))
    same(made.take(), fresh.take())


def test_a_request_of_vllms_own_stays_as_it_is() -> None:
    """V2 warms itself up with requests that know nothing of safe sets, and may decode them beside ours."""
    ours, theirs = InFlight(0, 1, prompt=3), InFlight(-1, 2, prompt=2)
    made = v2_of([ours], [BATCHES["min_p"]])
    assert not made.add_request(theirs.slot, SamplingParams(temperature=0.0))
    made.apply_staged_writes()
    logits = torch.randn(2, V)
    found = made.apply(logits.clone(), context([theirs, ours]))
    assert torch.equal(found[0], logits[0])
    record = made.take()
    assert record.request.tolist() == [0]


def test_several_rows_a_request_are_refused() -> None:
    """Speculative decoding would shift every record."""
    sequence = InFlight(0, 1, prompt=3)
    with pytest.raises(RuntimeError, match="1 requests have 2 rows"):
        v2_of([sequence], [BATCHES["full"]]).apply(torch.randn(2, V), context([sequence]))


PRELUDE = """
from types import SimpleNamespace
from triton.backends import backends

# vLLM takes Triton on a CPU if Triton has a backend for one, and asks of that no more than whether it is active.
backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))
"""
"""What a process runs before it imports vLLM, with TRITON_INTERPRET=1, to have the whole of Model Runner V2."""


@pytest.mark.slow
def test_the_whole_of_model_runner_v2(tmp_path: Path) -> None:
    """Scheduler, sampler and kernels, with prompts in pieces and preempted requests: `v2_engine.py` has more."""
    found = {}
    for name, prelude in (("v1", ""), ("v2", PRELUDE)):
        v2 = name == "v2"
        runner = {"VLLM_USE_V2_MODEL_RUNNER": str(int(v2))} | ({"TRITON_INTERPRET": "1"} if v2 else {})
        environment = os.environ | runner | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
        script = f"{prelude}\nimport pathlib, v2_engine\nv2_engine.main(pathlib.Path({str(tmp_path)!r}), {v2})"
        ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr[-5000:]
        found[name] = json.loads((tmp_path / f"{name}.json").read_text(encoding="utf-8"))
    v1, v2 = found["v1"], found["v2"]
    assert v2["tokens"] == v1["tokens"]
    for numbers in ("log_kept", "kept_vocab"):
        for left, right in zip(v2[numbers], v1[numbers], strict=True):
            np.testing.assert_allclose(left, right, atol=1e-5, rtol=0)
    assert v2["preempted"]
    assert max(v1["self_test"], v2["self_test"]) < 1e-5
