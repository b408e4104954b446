"""What verl and TRL log of a whole update, from their own code, beside ours: loss, clipping, entropy, gradient, rate.

The policy is a softmax of a hidden state times a matrix, so that logits, log-probs, entropies and gradients are exact
in both. verl's numbers come from its `ppo_loss`, its FSDP engine's optimizer step and scheduler, and its own metrics of
clocks; TRL's from `GRPOTrainer.train`, two updates on the same responses, of which the second has a ratio to clip.
"""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from framework_calls import definitions
from peer_sources import importable
from torch import Tensor, nn

from tailrl.config.arm import Arm, Clip, Correction
from tailrl.config.training import Training
from tailrl.objective.loss import surrogate
from tailrl.objective.safe_set import token_logprobs
from tailrl.training.optimizer import make_optimizer, optimizer_step

RESPONSES = 8
LONGEST = 12  # tokens
WIDTH = 6
VOCABULARY = 7
RATE = 0.3
LARGEST_NORM = 1.0
SECONDS = 4.0  # of a step, for metrics that divide by it
UPDATES = 50  # batches: an update of TRL's is a whole training run

LOSSES = "verl/workers/utils/losses.py"
ENGINE = "verl/workers/engine/fsdp/transformer_impl.py"
CLOCKS = "verl/trainer/ppo/metric_utils.py"

Value = tuple[str, str, float]
"""Source, name and value of a framework's metric."""


class Policy(nn.Module):
    """Logits of a hidden state: `weight` [V, D] times it."""

    def __init__(self, weight_VD: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_VD.clone())


class Step:
    """Hidden states [N, L, D], tokens [N, L], the mask, advantages [N] and the weights [V, D] that sampled."""

    def __init__(self, seed: int, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(5000 + seed)

        def normal(*shape: int) -> Tensor:
            """The same numbers in either dtype."""
            return torch.randn(shape, generator=generator).to(dtype)

        lengths_N1 = torch.randint(1, LONGEST + 1, (RESPONSES, 1), generator=generator)
        lengths_N1[0] = LONGEST
        self.mask_NL = torch.arange(LONGEST) < lengths_N1
        self.tokens_NL = torch.randint(VOCABULARY, (RESPONSES, LONGEST), generator=generator)
        self.hidden_NLD = normal(RESPONSES, LONGEST, WIDTH)
        self.advantage_N = 2 * normal(RESPONSES)
        self.weight_VD = 0.5 * normal(VOCABULARY, WIDTH)
        self.moved_VD = self.weight_VD + 0.4 * normal(VOCABULARY, WIDTH)

    def logits(self, weight_VD: Tensor) -> Tensor:
        """[N, L, V]."""
        return self.hidden_NLD @ weight_VD.T

    def logprobs(self, weight_VD: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of the tokens and entropies, [N, L] each, by torch alone."""
        log_NLV = self.logits(weight_VD).log_softmax(-1)
        chosen_NL = log_NLV.gather(-1, self.tokens_NL[..., None])[..., 0]
        return chosen_NL, -(log_NLV.exp() * log_NLV).sum(-1)


def take_update(step: Step, policy: Policy, clip: Clip) -> dict[str, float]:
    """Updates the policy as our training does, and returns what is logged, by our keys.

    train/loss is per response; the gradient is of the mean over tokens, as in both frameworks, since a norm depends
    on the scale of its loss.
    """
    mask_NL = step.mask_NL
    sequence_T = mask_NL.nonzero()[:, 0]
    scored = token_logprobs(step.logits(policy.weight)[mask_NL], step.tokens_NL[mask_NL], "full")
    old_T = step.logprobs(step.weight_VD)[0][mask_NL]
    advantage_T = step.advantage_N[sequence_T]
    made = surrogate(scored, old_T, advantage_T, sequence_T, RESPONSES, RESPONSES, Correction(), clip, logp_old_T=old_T)
    torch.autograd.backward(made.loss * RESPONSES / mask_NL.sum())
    settings = Training(optimizer="sgd", betas=(0.0, 0.999), learning_rate=RATE)
    optimizer = make_optimizer(policy, settings)
    norm = optimizer_step(policy, optimizer, LARGEST_NORM)
    return {
        "train/loss": made.loss.item(),
        "train/grad_norm": norm,
        "train/learning_rate": optimizer.param_groups[0]["lr"],
        "policy/entropy": scored.entropy_T.double().mean().item(),
        "policy/clip_fraction": made.clipped_T.double().mean().item(),
        "throughput/tokens_per_second": mask_NL.sum().item() / SECONDS,
        "time/step": SECONDS,
    }


def clip_of(preset: str) -> Clip:
    """The clip of a framework's default."""
    clip = Arm.model_validate({"correction": {"preset": preset}}).clip
    assert clip is not None
    return clip


def ours_of_updates(framework: str, seed: int) -> dict[tuple[str, str], float]:
    """Our numbers of an update under the framework's names, as `reports/metrics/aliases.yaml` relates them."""
    step = Step(seed)
    per_token = RESPONSES / step.mask_NL.sum().item()
    if framework == "TRL":
        policy = Policy(step.weight_VD)
        take_update(step, policy, clip_of("trl/default_1.16"))
        ours = take_update(step, policy, clip_of("trl/default_1.16"))
        values = {
            "loss": ours["train/loss"] * per_token,
            "clip_ratio/region_mean": ours["policy/clip_fraction"],
            "entropy": ours["policy/entropy"],
            "grad_norm": ours["train/grad_norm"],
            "learning_rate": ours["train/learning_rate"],
        }
    else:
        ours = take_update(step, Policy(step.moved_VD), clip_of("verl/default"))
        values = {
            "actor/pg_loss": ours["train/loss"] * per_token,
            "actor/pg_clipfrac": ours["policy/clip_fraction"],
            "actor/entropy": ours["policy/entropy"],
            "actor/grad_norm": ours["train/grad_norm"],
            "actor/lr": ours["train/learning_rate"],
            # verl counts prompts, here of one token each.
            "perf/throughput": ours["throughput/tokens_per_second"] * (1 + per_token),
            "perf/time_per_step": ours["time/step"],
        }
    return {(framework, name): value for name, value in values.items()}


def verl_updates(folder: Path, seeds: range) -> Iterator[tuple[int, Value]]:
    """verl's values of each update; to `actor/pg_clipfrac` its `actor/pg_clipfrac_lower` is added, as ours has both."""
    stubs = ("ray", "torchdata", "codetiming")
    with importable(folder, stubs=stubs):
        from hydra import compose, initialize_config_dir
        from tensordict import TensorDict
        from verl.trainer.ppo.core_algos import agg_loss
        from verl.utils import tensordict_utils, torch_functional
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
        from verl.workers.utils import losses

        with initialize_config_dir(str(folder / "verl/trainer/config"), version_base=None):
            settings = compose("ppo_trainer", ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"])
        losses.no_padding_2_padding = lambda values, _: values  # the layout of nested tensors alone
        config = omega_conf_to_dataclass(settings.actor_rollout_ref.actor)
        assert config.optim.clip_grad == LARGEST_NORM
        clocks = definitions(folder / CLOCKS, {}, "compute_throughout_metrics")
        for seed in seeds:
            step = Step(seed)
            mask_NL = step.mask_NL
            policy = Policy(step.moved_VD)
            logits_NLV = step.logits(policy.weight)
            new_NL = torch_functional.logprobs_from_logits_v2(logits_NLV, step.tokens_NL)
            entropy_NL = torch_functional.entropy_from_logits(logits_NLV.detach())
            old_NL = step.logprobs(step.weight_VD)[0]
            tensors = {"old_log_probs": old_NL, "advantages": step.advantage_N[:, None].expand_as(old_NL).contiguous()}
            data = TensorDict(tensors | {"response_mask": mask_NL.long()}, batch_size=RESPONSES)
            tensordict_utils.assign_non_tensor(
                data, dp_size=1, batch_num_tokens=mask_NL.sum().item(), global_batch_size=RESPONSES
            )
            loss, metrics = losses.ppo_loss(config, {"log_probs": new_NL}, data)
            loss.backward()
            optimizer = torch.optim.SGD(policy.parameters(), lr=RATE)
            engine = SimpleNamespace(
                module=policy, optimizer=optimizer, optimizer_config=config.optim, rank=1, _qat_enabled=False
            )
            norm = FSDPEngine.optimizer_step(engine)
            engine.optimizer_config = SimpleNamespace(
                total_training_steps=10, lr_warmup_steps=0, lr_warmup_steps_ratio=0.0, lr_scheduler_type="constant",
                min_lr_ratio=0.0, num_cycles=0.5, zero_indexed_step=True,
            )  # fmt: skip
            engine.lr_scheduler = FSDPEngine._build_lr_scheduler(engine, optimizer)
            counts = SimpleNamespace(meta_info={"global_token_num": (mask_NL.sum(1) + 1).tolist()})
            logged = clocks.compute_throughout_metrics(counts, {"step": SECONDS}, 1)
            clipped = sum(float(metrics[f"actor/pg_clipfrac{part}"].aggregate()) for part in ("", "_lower"))
            entropy = agg_loss(entropy_NL, mask_NL, config.loss_agg_mode)
            loss_source = f"{LOSSES}: ppo_loss"
            engine_source = f"{ENGINE}: FSDPEngine"
            for source, name, value in (
                (loss_source, "actor/pg_loss", metrics["actor/pg_loss"].aggregate()),
                (loss_source, "actor/pg_clipfrac", clipped),
                ("verl/utils/torch_functional.py: entropy_from_logits", "actor/entropy", entropy),
                (f"{engine_source}.optimizer_step", "actor/grad_norm", norm),
                (f"{engine_source}.lr_scheduler_step", "actor/lr", FSDPEngine.lr_scheduler_step(engine)),
                (f"{CLOCKS}: compute_throughout_metrics", "perf/throughput", logged["perf/throughput"]),
                (f"{CLOCKS}: compute_throughout_metrics", "perf/time_per_step", logged["perf/time_per_step"]),
            ):
                yield seed, (source, name, float(value))


def trl_updates(folder: Path, seeds: range) -> Iterator[tuple[int, Value]]:
    """TRL's values of each second update, from its own training loop."""
    with importable(folder), tempfile.TemporaryDirectory() as out:
        from datasets import Dataset
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer import grpo_trainer

        grpo_trainer.shuffle_sequence_dict = lambda batch: batch  # a row keeps its hidden states
        words = Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1, "a": 2}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>")
        sizes = {"hidden_size": WIDTH, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        settings = GRPOConfig(
            output_dir=out, per_device_train_batch_size=RESPONSES, num_generations=RESPONSES, num_iterations=2,
            max_steps=2, logging_steps=1, learning_rate=RATE, lr_scheduler_type="constant", optim="sgd",
            max_grad_norm=LARGEST_NORM, use_cpu=True, bf16=False, report_to="none", save_strategy="no",
            max_completion_length=LONGEST, disable_tqdm=True,
        )  # fmt: skip
        for seed in seeds:
            step = Step(seed, torch.float32)  # as TRL has its log-probs; ours are float64
            model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))
            model.lm_head.weight.data.copy_(step.weight_VD)
            trainer = GRPOTrainer(
                model=model,
                reward_funcs=lambda **_: [0.0] * RESPONSES,
                args=settings,
                train_dataset=Dataset.from_dict({"prompt": ["a"] * RESPONSES}),
                processing_class=tokenizer,
            )
            log: list[dict[str, float]] = []
            _give(trainer, step, log)
            trainer.train()
            for name in ("loss", "clip_ratio/region_mean", "entropy", "grad_norm", "learning_rate"):
                yield seed, ("trl/trainer/grpo_trainer.py: GRPOTrainer.train", name, log[1][name])


def _give(trainer: Any, step: Step, log: list[dict[str, float]]) -> None:
    """Gives a trainer this step's responses, log-probs and advantages, and keeps what it logs."""
    lengths = step.mask_NL.sum(1).tolist()
    rows = [[2] * length for length in lengths]

    def generate(prompts: list[Any]) -> tuple[Any, ...]:
        return [[2]] * len(prompts), rows, None, [""] * len(rows), None, {}, None, None

    def logprobs(model: Any, *_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Any, ...]:
        chosen_NL, entropy_NL = step.logprobs(model.lm_head.weight)
        return chosen_NL, entropy_NL.detach() if compute_entropy else None, None

    trainer._generate = generate
    trainer._get_per_token_logps_and_entropies = logprobs
    original = trainer._generate_and_score_completions

    def scored(inputs: Any) -> Any:
        return original(inputs) | {"advantages": step.advantage_N}

    trainer._generate_and_score_completions = scored
    trainer.log = lambda logs, *_: log.append(dict(logs) | _means(trainer))


def _means(trainer: Any) -> dict[str, float]:
    """The trainer's own metrics since the last call."""
    values = {name: sum(values) / len(values) for name, values in trainer._metrics["train"].items() if values}
    trainer._metrics["train"].clear()
    return values
