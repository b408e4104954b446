"""`tailrl.losses`, and the loops of examples/loops that use it, against `batch_loss` of plain logits."""

import importlib.util
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tailrl import losses
from tailrl.losses import Correction, Vocabulary, batch_loss

LOOPS = Path(__file__).parents[2] / "examples/loops"
KEYS = {
    "dvp/kept_mass_train_mean",
    "dvp/sampled_outside_train_support_fraction",
    "dvp/sampled_outside_train_support_count",
    "rollout_corr/k3_kl",
    "rollout_corr/rollout_is_mean",
    "rollout_corr/rollout_rs_seq_masked_fraction",
    "rollout_corr/veto_seq_fraction",
}


def loop(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, LOOPS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def compare(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys() and any(grad.abs().max() > 0 for grad in one.values())
    for name, grad in one.items():
        torch.testing.assert_close(grad, other[name], rtol=1e-4, atol=1e-6)


def test_the_plain_loop_learns_and_says_what_it_left_out() -> None:
    history = loop("plain").train(40)
    assert KEYS | {"reward"} == history[0].keys()
    assert history[-1]["reward"] > history[0]["reward"] + 0.2
    assert any(line["dvp/sampled_outside_train_support_count"] > 0 for line in history)
    for line in history:
        assert 0 < line["dvp/kept_mass_train_mean"] <= 1 and line["rollout_corr/k3_kl"] >= 0


def test_the_torchtune_like_loss_is_batch_loss() -> None:
    torch.manual_seed(1)
    module = loop("torchtune_like")
    model, correction = module.Decoder(40), Correction(sequence="mis", veto=1e-4)
    batch = module.random_batch(40)
    logits_NLV, mask_NL = model(batch["tokens"]), batch["labels"] != module.IGNORE
    labels_NL = batch["labels"].where(mask_NL, 0)
    vocabulary = Vocabulary(rule="min_p", rho="0.5")
    others = (mask_NL, batch["logp_infer"], batch["advantages"], vocabulary, correction)
    expected, of_tokens = batch_loss(logits_NLV / 0.8, labels_NL, *others)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    dvp = module.DVPLoss(math.log(0.5), correction, temperature=0.8)
    dvp.set_model_output(model)
    loss = dvp(model(batch["tokens"]), batch["labels"], batch["logp_infer"], batch["advantages"])
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    compare(gradients(model), wanted)
    assert dvp.metrics.keys() == KEYS and dvp.metrics["rollout_corr/k3_kl"] == pytest.approx(of_tokens["k3_kl"])
    assert dvp.metrics["dvp/sampled_outside_train_support_count"] > 0
    assert module.Recipe(module.Decoder(40), dvp).step(batch)["loss"] != 0


def test_the_trainer_like_loop_accumulates_batch_loss(tmp_path: Path) -> None:
    """Two micro-batches of four; an optimiser of the Trainer's own moves the weights by the mean gradient."""
    torch.manual_seed(1)
    module = loop("hf_trainer_like")
    rows = module.random_rows(40)
    model = module.small_model(40)
    inputs = module.collate(rows)
    logits_NLV = model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]).logits[:, :-1]
    tokens = inputs["input_ids"][:, 1:]
    vocabulary = Vocabulary(rule="min_p", rho="0.5")
    others = (inputs["scored"], inputs["logp_infer"], inputs["advantage"], vocabulary, module.DVPTrainer.correction)
    expected, _ = batch_loss(logits_NLV, tokens, *others)
    expected.backward()
    wanted = gradients(model)
    model.zero_grad()
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    settings: dict[str, Any] = {"optim": "sgd", "learning_rate": 1.0, "lr_scheduler_type": "constant", "max_steps": 1}
    settings |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0}
    trainer = module.make_trainer(model, rows, str(tmp_path), **settings)
    trainer.train()
    compare({name: before[name] - weight.detach() for name, weight in model.named_parameters()}, wanted)
    logged = [line for line in trainer.state.log_history if line.keys() >= KEYS]
    assert len(logged) == 2 and sum(line["dvp/sampled_outside_train_support_count"] for line in logged) > 0


def test_metrics_by_hand() -> None:
    """Two responses: one with a token outside and vetoed, one of ratio e^0.1."""
    trainer_T = torch.tensor([-1.0, -math.inf, -2.0])
    sampler_T = torch.tensor([-1.0, -3.0, -2.1])
    sequence_T = torch.tensor([0, 0, 1])
    outside_T = trainer_T.isneginf()
    delta_T = trainer_T.masked_fill(outside_T, 0.0) - sampler_T
    weights = losses.correct(delta_T, outside_T, sequence_T, 2, Correction(sequence="tis", veto=1e-4))
    found = losses.loss_metrics(trainer_T, torch.tensor([0.9, 0.5, 0.7]).log(), sampler_T, sequence_T, weights)
    expected = [0.7, 1 / 3, 1.0, (0.0 + math.exp(0.1) - 1.1) / 2, math.exp(0.1) / 2, 0.0, 0.5]
    assert list(found.values()) == pytest.approx(expected, rel=1e-5)


def test_without_torch_one_sentence_says_what_is_missing() -> None:
    script = "import sys; sys.modules['torch'] = None; import tailrl; import tailrl.losses"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = ended.stderr.strip().splitlines()[-1]
    assert ended.returncode == 1
    assert last.startswith('ImportError: tailrl.losses needs torch, which is not installed: pip install ".[diagnose]"')


def test_the_public_names_are_typed_and_there() -> None:
    for name in losses.__all__:
        assert getattr(losses, name) is not None
