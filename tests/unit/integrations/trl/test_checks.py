"""What the adapter refuses, each with a sentence that names the setting."""

import importlib
import inspect
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
import trl
from ranks_fixture import on_ranks
from step_fixture import RHO
from transformers import LlamaConfig, PreTrainedTokenizerFast
from trl import RLOOTrainer, SFTTrainer
from trl_fixture import make_trainer

from tailrl.config.rejection import Rejection
from tailrl.integrations.trl import Correction, base, with_dvp
from tailrl.integrations.trl.checks import check_trainer
from tailrl.runtime.errors import StudyError

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "no min_p": ("rloo", {"min_p": None}),
    "min_p": ("grpo", {"min_p": 2 * RHO}),
    "top_p": ("rloo", {"top_p": 0.9}),
    "top_k": ("grpo", {"top_k": 20}),
    "repetition_penalty": ("rloo", {"repetition_penalty": 1.1}),
    "generation_kwargs": ("rloo", {"generation_kwargs": {"min_p": 0.1, "seed": 1}}),
    "vllm_structured_outputs_regex": ("grpo", {"vllm_structured_outputs_regex": "[0-9]+"}),
    "use_transformers_continuous_batching": ("rloo", {"use_transformers_continuous_batching": True}),
    "beta": ("rloo", {"beta": 0.05}),
    "use_liger_kernel": ("grpo", {"use_liger_kernel": True}),
    "loss_type": ("grpo", {"loss_type": "vespo"}),
    "off_policy_mask_threshold": ("grpo", {"off_policy_mask_threshold": 0.5}),
    "entropy_coef": ("grpo", {"entropy_coef": 0.01}),
    "vllm_importance_sampling_correction": ("grpo", {"use_vllm": True}),
    "rollout_func": ("grpo", {"given": {"rollout_func": print}}),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_make_another_objective(
    policy_folder: Path, tokenizer: PreTrainedTokenizerFast, tmp_path: Path, name: str
) -> None:
    kind, settings = SETTINGS[name]
    with pytest.raises(StudyError, match=rf"^{name.removeprefix('no ')}: "):
        make_trainer(kind, policy_folder, tokenizer, tmp_path, **settings)


def test_a_trainer_without_settings() -> None:
    with pytest.raises(StudyError, match=r"^args: .* min_p=0\.22"):
        with_dvp(RLOOTrainer, RHO)("model", print)


@pytest.mark.parametrize("rho", [0.0, -0.1, 1.5, math.nan])
def test_a_rho_that_is_none(rho: float) -> None:
    with pytest.raises(StudyError, match=r"^rho: "):
        with_dvp(RLOOTrainer, rho)


def test_a_weight_of_a_token_where_the_loss_has_none() -> None:
    with pytest.raises(StudyError, match=r"^correction\.token: tis: RLOOTrainer's ratio is a whole response's"):
        with_dvp(RLOOTrainer, RHO, Correction(token="tis"))
    with pytest.raises(StudyError, match=r"^correction.rejects: r_ppo: it is 1 in the first update"):
        with_dvp(RLOOTrainer, RHO, Correction(sequence="reject_k3", rejects="r_ppo"))
    with pytest.raises(StudyError, match=r"^correction.reject: by: token: RLOOTrainer's ratio is a whole response's"):
        with_dvp(RLOOTrainer, RHO, Correction(reject=(Rejection(of="k3", by="token", above=1.0),)))
    with pytest.raises(StudyError, match=r"^correction.centering: it needs the sampler's whole distribution"):
        with_dvp(RLOOTrainer, RHO, Correction(centering="full"))
    with pytest.raises(StudyError, match=r"^correction.normalise: TRL computes the loss in parts"):
        with_dvp(RLOOTrainer, RHO, Correction(sequence="mis", normalise=True))


def test_a_trainer_that_samples_nothing() -> None:
    with pytest.raises(StudyError, match=r"^SFTTrainer: with_dvp knows RLOOTrainer and GRPOTrainer only"):
        with_dvp(SFTTrainer, RHO)


class Head:
    """A model as far as the checks look: its configuration and its head."""

    def __init__(self, bias: object = None, text: object = None, **config: Any) -> None:
        self.config = LlamaConfig(**config)
        if text is not None:
            self.config.get_text_config = lambda: text
        self.head = SimpleNamespace(weight=None, bias=bias)

    def get_output_embeddings(self) -> SimpleNamespace:
        return self.head


def server(mode: str) -> SimpleNamespace:
    client = SimpleNamespace(get_server_info=lambda: {"model_config": {"logprobs_mode": mode}})
    return SimpleNamespace(vllm_client=client)


def trainer_of(**settings: Any) -> SimpleNamespace:
    plain: dict[str, Any] = {"accelerator": SimpleNamespace(is_main_process=True)}
    plain |= {"aux_loss_enabled": False, "is_fsdp_enabled": False}
    return SimpleNamespace(**(plain | {"use_vllm": True, "vllm_mode": "colocate"} | settings))


@pytest.mark.parametrize(
    ("trainer", "model", "words"),
    [
        ({}, {"text": LlamaConfig()}, "multimodal"),
        ({"aux_loss_enabled": True}, {}, "router_aux_loss_coef"),
        ({"vllm_mode": "server", "vllm_generation": server("raw_logprobs")}, {}, "raw_logprobs"),
        ({}, {"logits_scaling": 8.0}, r"^logits_scaling: 8\.0"),
        ({}, {"final_logit_softcapping": 30.0}, r"^final_logit_softcapping: 30\.0"),
        ({}, {"bias": 1}, "output bias"),
    ],
)
def test_a_model_or_a_way_of_running_that_is_not_known(
    trainer: dict[str, Any], model: dict[str, Any], words: str
) -> None:
    with pytest.raises(StudyError, match=words):
        check_trainer(trainer_of(**trainer), Head(**model))


def test_what_is_known_passes() -> None:
    check_trainer(trainer_of(vllm_mode="server", vllm_generation=server("processed_logprobs")), Head())


@pytest.mark.parametrize("mode", ["processed_logprobs", "raw_logprobs"])
def test_of_several_processes_the_main_one_alone_asks_the_server(mode: str, tmp_path: Path) -> None:
    """The others have no client, and learn the answer."""

    def check() -> str:
        main = dist.get_rank() == 0
        given = server(mode) if main else SimpleNamespace()
        accelerator = SimpleNamespace(is_main_process=main)
        try:
            check_trainer(trainer_of(vllm_mode="server", vllm_generation=given, accelerator=accelerator), Head())
        except StudyError as error:
            return str(error)
        return ""

    said = on_ranks(2, tmp_path, check)
    assert [("raw_logprobs" in words) == (mode == "raw_logprobs") for words in said] == [True, True], said


def test_without_trl_one_sentence_says_what_is_missing() -> None:
    script = "import sys; sys.modules['trl'] = None; import tailrl.trl"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith("ImportError: tailrl.trl needs TRL 1.13 to 1.16, which cannot be imported")


@pytest.mark.slow
def test_the_import_is_without_trls_warnings_of_vllm() -> None:
    """The pinned vLLM is newer than those that TRL names. Any other warning of a user's stays one."""
    script = "import tailrl.trl, warnings; warnings.warn('TRL currently supports vLLM versions of then')"
    command = [sys.executable, "-W", "error::UserWarning", "-c", script]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert ended.stderr.strip().splitlines()[-1] == "UserWarning: TRL currently supports vLLM versions of then"


@pytest.mark.parametrize(
    ("of", "gone", "words"),
    [
        (RLOOTrainer, "_generate_single_turn", "RLOOTrainer._generate_single_turn"),
        (trl.GRPOConfig, "min_p", "GRPOConfig.min_p"),
    ],
)
def test_a_trl_without_what_the_adapter_overrides(
    monkeypatch: pytest.MonkeyPatch, of: type, gone: str, words: str
) -> None:
    """A version is known by what it has, not by its number."""
    monkeypatch.setattr(trl, "__version__", "1.99.0")
    importlib.reload(base)
    for owner in [kind for kind in of.__mro__ if gone in vars(kind)]:
        monkeypatch.delattr(owner, gone)
    with pytest.raises(ImportError, match=rf"TRL 1\.99\.0 has no {words}; 1\.13 to 1\.16 were tried$"):
        importlib.reload(base)


def test_a_trl_whose_batches_have_other_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "getsource", lambda _: "vllm_generation num_items_in_batch sampling_per_token_logps")
    assert list(base.missing(trl)) == ["old_per_token_logps in GRPOTrainer", "old_logps in RLOOTrainer"]


def test_trls_client_of_a_server_wants_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the server mode has not run on a CPU: the page says so, and this ends when TRL lifts it."""
    client = pytest.importorskip("trl.generation.vllm_client").VLLMClient
    transfer = {"weight_transfer_config": {"backend": "nccl"}}
    monkeypatch.setattr(client, "get_server_info", lambda _: transfer, raising=False)  # since TRL 1.16
    monkeypatch.setattr(client, "get_world_size", lambda _: 1)
    one = object.__new__(client)
    one.group_port = 51216
    with pytest.raises(NotImplementedError, match="needs a CUDA device, got 'cpu'"):
        one.init_communicator(device="cpu")
