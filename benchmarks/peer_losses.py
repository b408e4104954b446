"""How each framework's own code computes a loss on given log-probs: a `Case` for each preset.

The functions import the framework's modules from its folder; packages that are not installed and play no part in the
loss are named as stubs. Settings are the framework's defaults, as its own configuration gives them, and what a mode
sets. Given lines of configuration, such as `tailrl diagnose` shows, are parsed by the framework's own configuration.
"""

import ast
import os
import re
import runpy
import shlex
import sys
import tomllib
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import yaml
from peer_sources import importable
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Padded log-probs [N, L] in float64: of the trainer before and after an update, the sampler, and the base."""

    train_NL: Tensor
    infer_NL: Tensor
    new_NL: Tensor
    base_NL: Tensor
    mask_NL: Tensor  # bool
    advantage_N: Tensor

    @property
    def age_N(self) -> Tensor:  # noqa: N802  its shape
        """How many versions the weights that sampled each response are behind: 0 to 4."""
        return torch.arange(len(self.advantage_N)) % 5

    @property
    def segment_T(self) -> Tensor:  # noqa: N802  its shape
        """The run of ones in the mask that each token is of, counted over all responses."""
        before_NL = torch.nn.functional.pad(self.mask_NL[:, :-1], (1, 0))
        begins_NL = self.mask_NL & ~before_NL
        return begins_NL.flatten().cumsum(0)[self.mask_NL.flatten()] - 1


Run = Callable[[Batch, Tensor], tuple[Tensor, Tensor]]
Scores = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits [T, V], tokens [T], the kept set [T, V] → log-probs [T]


@dataclass(frozen=True)
class Case:
    """A mode as the framework computes it."""

    mode: str
    function: str  # what was called
    run: Run  # batch, the trainer's log-probs now [N, L] with gradient → the loss, and the advantages [N] in it
    mean: str  # key of `peer_presets.share_of`
    kl_mean: str = ""  # that of the KL; "": the same
    beside: str = ""  # the preset whose clip and KL the framework has beside this mode
    moved: bool = True  # compared after an update; False: where one update a step is all there is
    value: bool = True  # whether the loss's value is compared, beside its gradient
    rewards: Callable[[Batch], Tensor] | None = None  # [N], minus a KL; the rewards themselves are the advantages
    gaps: bool = False  # whether the masks have gaps, as several turns give them
    scores: Scores | None = None  # in place of `run`, of a framework that replays a sampler's set


Cases = Iterator[Case]
Texts = Mapping[str, str]  # lines of configuration by a name, which becomes the case's mode


def expand(batch: Batch) -> Tensor:
    """The advantage of each token, [N, L]."""
    return batch.advantage_N[:, None].expand_as(batch.train_NL)


def verl(folder: Path, texts: Texts) -> Cases:
    """Hydra's composed configuration, the trainer's rollout correction, and the worker's `ppo_loss`."""
    with importable(folder, stubs=("ray", "torchdata")):
        from hydra import compose, initialize_config_dir
        from omegaconf import OmegaConf
        from tensordict import TensorDict
        from verl import DataProto
        from verl.trainer.config.algorithm import RolloutCorrectionConfig
        from verl.trainer.ppo import rollout_corr_helper
        from verl.utils import tensordict_utils
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.utils import losses

        def configured(*words: str) -> Any:
            with initialize_config_dir(str(folder / "verl/trainer/config"), version_base=None):
                # A batch size must be given; no default has one.
                return compose("ppo_trainer", ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *words])

        settings = configured()
        # The layout of nested tensors alone.
        losses.no_padding_2_padding = lambda log_probs, _: log_probs
        assert not settings.algorithm.use_kl_in_reward

        def run(correction: Any, loss_mode: str) -> Run:
            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                actor = settings.actor_rollout_ref.actor.copy()
                actor.policy_loss.loss_mode = loss_mode
                tensors = {"old_log_probs": batch.train_NL, "rollout_log_probs": batch.infer_NL}
                tensors |= {"response_mask": batch.mask_NL.long(), "advantages": expand(batch).contiguous()}
                proto = DataProto.from_dict(tensors)
                if correction.bypass_mode:
                    rollout_corr_helper.apply_bypass_mode(proto, correction, actor.policy_loss)
                elif correction.rollout_is or correction.rollout_rs:
                    proto, _ = rollout_corr_helper.compute_rollout_correction_and_add_to_batch(proto, correction)
                config = omega_conf_to_dataclass(actor)
                assert (config.loss_agg_mode, config.use_kl_loss, config.entropy_coeff) == ("token-mean", False, 0)
                names = ("old_log_probs", "advantages", "response_mask", "rollout_is_weights")
                kept = {name: proto.batch[name] for name in names if name in proto.batch}
                data = TensorDict(kept, batch_size=len(new_NL))
                tokens = data["response_mask"].sum().item()
                tensordict_utils.assign_non_tensor(
                    data, dp_size=1, batch_num_tokens=tokens, global_batch_size=len(new_NL)
                )
                found, _ = losses.ppo_loss(config, {"log_probs": new_NL}, data)
                return found, batch.advantage_N

            return loss

        def as_configured(correction: Any) -> Any:
            """A factory's settings as a user writes them into `algorithm.rollout_correction`."""
            chosen = {name: value for name, value in asdict(correction).items() if name != "_target_"}
            return OmegaConf.merge(settings.algorithm.rollout_correction, chosen)

        off = as_configured(RolloutCorrectionConfig.disabled())
        yield Case("default", "ppo_loss", run(off, "vanilla"), "tokens")
        factories = [name for name in vars(RolloutCorrectionConfig) if name.startswith(("decoupled_", "bypass_"))]
        for mode in factories:
            correction = getattr(RolloutCorrectionConfig, mode, None)
            if not callable(correction):
                continue
            correction = as_configured(correction())
            if correction.bypass_mode:
                # Its weights of REINFORCE are of the log-probs now, ours of those before the first update.
                weighs = correction.loss_type == "reinforce" and correction.rollout_is is not None
                yield Case(mode, "apply_bypass_mode, ppo_loss", run(correction, ""), "tokens", moved=not weighs)
            else:
                mean = "kept tokens" if correction.rollout_rs else "tokens"
                function = "compute_rollout_correction_and_add_to_batch, ppo_loss"
                yield Case(mode, function, run(correction, "vanilla"), mean, beside="verl/default")

        def bypassed(loss_mode: str) -> Run:
            """In bypass mode the old log-probs are the sampler's, and a loss mode of the user's is kept."""

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                moved = Batch(
                    batch.infer_NL, batch.infer_NL, batch.new_NL, batch.base_NL, batch.mask_NL, batch.advantage_N
                )
                return run(off, loss_mode)(moved, new_NL)

            return loss

        for mode in ("dppo_tv", "dppo_kl"):
            yield Case(mode, f"ppo_loss, loss_mode {mode}", bypassed(mode), "tokens", moved=False)
        for mode, mean in (("gspo", "tokens"), ("cispo", "tokens"), ("sapo", "responses")):
            yield Case(mode, f"ppo_loss, loss_mode {mode}", run(off, mode), mean)
        for name, text in texts.items():
            correction = configured(*shlex.split(text)).algorithm.rollout_correction
            mean = "kept tokens" if correction.rollout_rs else "tokens"
            function = "compute_rollout_correction_and_add_to_batch, ppo_loss"
            yield Case(name, function, run(correction, "vanilla"), mean, beside="verl/default")


def trl(folder: Path, texts: Texts) -> Cases:
    """Real trainers with a tiny model: they score completions and compute the loss, on log-probs that are given."""
    with importable(folder):
        from datasets import Dataset
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

        words = {"<pad>": 0, "<eos>": 1, "a": 2}
        raw = Tokenizer(WordLevel(words, unk_token="a"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        data = Dataset.from_list([{"prompt": "a"}] * 8)
        policy = mkdtemp()
        LlamaForCausalLM(LlamaConfig(vocab_size=3, **sizes)).save_pretrained(policy)

        def trainer_of(kind: Any, configuration: Any, **settings: Any) -> Any:
            machine = {"output_dir": mkdtemp(), "use_cpu": True, "bf16": False, "report_to": "none"}
            args = configuration(**machine, **settings)
            trainer = kind(policy, lambda **_: [], args, train_dataset=data, processing_class=tokenizer)
            trainer.use_vllm = True  # the engine itself is not asked
            return trainer

        def run(trainer: Any) -> Run:
            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                return _trl_loss(trainer, scored(trainer, batch), new_NL)

            return loss

        def scored(trainer: Any, batch: Batch) -> dict[str, Any]:
            rows = range(len(batch.mask_NL))
            lengths = batch.mask_NL.sum(-1).tolist()
            completions = [[2] * length for length in lengths]
            sampled = [batch.infer_NL[n, : lengths[n]].tolist() for n in rows]
            extra: tuple[Any, ...] = (None, [""] * len(rows), sampled, {}, None, None)
            if not isinstance(trainer, GRPOTrainer):
                extra = ([""] * len(rows),)
            trainer._generate = lambda _: ([[2]] * len(rows), completions, *extra)
            trainer._calculate_rewards = lambda *_: batch.advantage_N[:, None]

            def logprobs(model: Any, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
                found_NL = batch.base_NL if model is trainer.ref_model else batch.train_NL
                return found_NL, torch.zeros_like(found_NL), None

            trainer._get_per_token_logps_and_entropies = logprobs
            output: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": "a"}] * len(rows))
            return output

        function = "GRPOTrainer._generate_and_score_completions and _compute_loss"
        grpo = {"beta": GRPOConfig.beta}
        assert grpo == {"beta": 0.0}
        yield Case("default_1.16", function, run(trainer_of(GRPOTrainer, GRPOConfig)), "tokens")
        default = "trl/default_1.16"
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
            made = trainer_of(GRPOTrainer, GRPOConfig, vllm_importance_sampling_mode=mode)
            yield Case(mode, function, run(made), "tokens", beside=default)
        for name, text in texts.items():
            call = ast.parse(text.strip(), mode="eval").body
            assert isinstance(call, ast.Call) and ast.unparse(call.func) == "GRPOConfig"
            chosen = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
            made = trainer_of(GRPOTrainer, GRPOConfig, **chosen)
            corrected = made.vllm_importance_sampling_correction
            yield Case(name, function, run(made), "tokens", beside=default, moved=corrected)
        settings: dict[str, Any] = {"off_policy_mask_threshold": 0.5, "vllm_importance_sampling_correction": False}
        made = trainer_of(GRPOTrainer, GRPOConfig, **settings)
        yield Case("off_policy_mask", function, run(made), "tokens", moved=False, beside=default)
        made = trainer_of(GRPOTrainer, GRPOConfig, loss_type="sapo")
        yield Case("sapo", function, run(made), "responses")
        made = trainer_of(GRPOTrainer, GRPOConfig, loss_type="luspo", importance_sampling_level="sequence")
        yield Case("luspo", function, run(made), "responses' sums")
        # With one update a batch it would take no log-probs before the update, whose ratio is 1.
        settings = {"loss_type": "vespo", "vllm_importance_sampling_correction": False, "num_iterations": 2}
        yield Case("vespo", function, run(trainer_of(GRPOTrainer, GRPOConfig, **settings)), "tokens")
        rloo = trainer_of(RLOOTrainer, RLOOConfig, num_generations=8)  # the batch as one group

        def rewards(batch: Batch) -> Tensor:
            # What its leave-one-out baseline leaves of the rewards: A = G/(G − 1) (R − mean R).
            count = len(batch.advantage_N)
            advantage_N: Tensor = scored(rloo, batch)["advantages"]
            return advantage_N * (count - 1) / count

        yield Case(
            "rloo",
            "RLOOTrainer._generate_and_score_completions and _compute_loss",
            run(rloo),
            "responses' sums",
            moved=False,
            value=False,
            rewards=rewards,
        )


def _trl_loss(trainer: Any, inputs: dict[str, Any], new_NL: Tensor) -> tuple[Tensor, Tensor]:
    zero_NL = torch.zeros_like(new_NL)
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new_NL, zero_NL, None)
    trainer.current_gradient_accumulation_steps = 1
    return trainer._compute_loss(trainer.model, inputs), inputs["advantages"].double()


def skyrl(folder: Path, texts: Texts) -> Cases:
    """The worker's `_forward_backward_micro`, with its default algorithm, on a model that gives the log-probs."""
    import typing_extensions

    stubs = ("ray", "skyrl_gym", "cloudpathlib")
    # It is for Python 3.12, whose TypedDict pydantic takes; before, the one of typing_extensions.
    newer = mock.patch("typing.TypedDict", typing_extensions.TypedDict)
    with importable(folder, stubs=stubs), newer:
        import ray

        ray.is_initialized = lambda: False  # no actor holds the registries
        from skyrl.backends.skyrl_train.utils.ppo_utils import (
            PolicyLossRegistry,
            apply_loss_reduction_to_advantages_minibatch,
        )
        from skyrl.backends.skyrl_train.utils.sample_support import SAMPLE_SUPPORT_PADDING, SAMPLE_SUPPORT_TORCH_DTYPE
        from skyrl.backends.skyrl_train.utils.sample_support_replay import sample_support_scores
        from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
        from skyrl.train.config.config import AlgorithmConfig, OffPolicyCorrectionConfig, SkyRLTrainConfig

        def run(settings: AlgorithmConfig) -> Run:
            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                mask_NL = batch.mask_NL.double()
                advantage_NL = apply_loss_reduction_to_advantages_minibatch(
                    expand(batch), mask_NL, settings.loss_reduction, len(new_NL), 0
                )
                experience = mock.MagicMock(
                    action_log_probs=batch.train_NL,
                    base_action_log_probs=batch.base_NL,
                    advantages=advantage_NL,
                    num_actions=new_NL.shape[1],
                    loss_mask=mask_NL,
                    response_mask=mask_NL,
                    rollout_logprobs=batch.infer_NL,
                )
                entropy = torch.zeros(len(new_NL), new_NL.shape[1] + 2, dtype=torch.float64)
                taken: list[Tensor] = []
                worker = mock.MagicMock()
                worker.cfg.algorithm = settings
                worker.policy_loss_fn = PolicyLossRegistry.get(settings.policy_loss_type)
                worker.model.return_value = (new_NL, {"entropy": entropy})
                worker.mesh_rank.dp_size = 1
                worker.strategy.backward = lambda loss, *_: taken.append(loss)
                with mock.patch("torch.cuda.current_device", return_value="cpu"):
                    PolicyWorkerBase._forward_backward_micro(worker, experience, 1.0, return_per_token_outputs=False)
                return taken[0], batch.advantage_N

            return loss

        function = "PolicyWorkerBase._forward_backward_micro"
        default = "skyrl/default_0.4"
        yield Case("default_0.4", function, run(AlgorithmConfig()), "tokens", "responses")
        corrections: dict[str, dict[str, Any]] = {
            "tis_token": {"tis_ratio_type": "token"},
            "tis_sequence": {"tis_ratio_type": "sequence"},
            "mask_geometric": {"sequence_mask_metric": "geometric"},
            "mask_product": {"sequence_mask_metric": "product"},
            "outlier_token": {"outlier_token_is_threshold_low": 1e-4, "outlier_token_is_threshold_high": 100.0},
        }
        for mode, chosen in corrections.items():
            settings = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(**chosen))
            yield Case(mode, function, run(settings), "tokens", "responses", default)
        for kind, delta in (("binary_tv", 0.2), ("binary_kl", 0.05)):
            settings = AlgorithmConfig(policy_loss_type="dppo", use_kl_loss=False)
            settings.dppo.dppo_type = kind
            settings.dppo.delta_low = settings.dppo.delta_high = delta
            yield Case(f"dppo_{kind}", f"{function}, dppo", run(settings), "tokens", moved=False, value=False)

        def replayed(logits_TV: Tensor, tokens_T: Tensor, kept_TV: Tensor) -> Tensor:
            """A row of the support for each token, padded as the sampler's capture pads it."""
            width = int(kept_TV.sum(-1).max())
            support_TK = torch.full((len(tokens_T), width), SAMPLE_SUPPORT_PADDING, dtype=SAMPLE_SUPPORT_TORCH_DTYPE)
            for place, row_V in enumerate(kept_TV):
                tokens_K = row_V.nonzero().squeeze(-1)
                support_TK[place, : len(tokens_K)] = tokens_K.to(SAMPLE_SUPPORT_TORCH_DTYPE)
            vocabulary = {"vocab_start_index": 0, "vocab_end_index": logits_TV.shape[1]}
            scores = sample_support_scores(logits_TV, tokens_T, support_TK, **vocabulary, tp_group=None)
            found: Tensor = scores.logprobs
            return found

        def unused(*_: Any) -> Any:
            raise AssertionError("a replay is compared by its log-probs")

        yield Case("replay", "sample_support_scores", unused, "tokens", scores=replayed)
        for mode in ("gspo", "sapo"):
            settings = AlgorithmConfig(policy_loss_type=mode, loss_reduction="sequence_mean", use_kl_loss=False)
            yield Case(mode, f"{function}, {mode}", run(settings), "responses")
        for name, text in texts.items():
            settings = SkyRLTrainConfig.from_cli_overrides(shlex.split(text)).trainer.algorithm
            one = settings.policy_loss_type == "dppo"  # its ratio is to the sampler, so ours is compared at one update
            yield Case(name, function, run(settings), "tokens", "responses", default, moved=not one, value=not one)


def openrlhf(folder: Path, texts: Texts) -> Cases:
    """The command line's own parser and checks, then `PolicyLoss` and the rewards' KL with its arguments."""
    stubs = ("ray", "deepspeed", "flash_attn", "ring_flash_attn", "torchdata", "pylatexenc")
    with importable(folder, stubs=stubs):
        import ray  # noqa: F401  its stub, which `openrlhf_arguments` looks at
        from openrlhf.models.loss import PolicyLoss
        from openrlhf.models.utils import compute_approx_kl, compute_reward

        def run(*words: str) -> Run:
            args = openrlhf_arguments(*words)
            advantage = args.algo.advantage
            function = PolicyLoss(
                clip_eps_low=args.actor.eps_clip_low_high[0],
                clip_eps_high=args.actor.eps_clip_low_high[1],
                dual_clip=args.actor.dual_clip,
                token_level_loss=args.actor.loss_agg_mode == "token-mean",
                policy_loss_type=args.actor.policy_loss_type,
                is_correction_level=advantage.is_correction_level,
                is_correction_mode=advantage.is_correction_mode,
                is_correction_gating=advantage.is_correction_gating,
                is_correction_threshold=advantage.is_correction_threshold,
            )
            assert not args.algo.kl.use_loss

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                mask_NL = batch.mask_NL.double()
                found = function(new_NL, batch.train_NL, expand(batch), mask_NL, batch.infer_NL)
                return found[0], batch.advantage_N

            return loss

        def rewards(batch: Batch) -> Tensor:
            kl = openrlhf_arguments().algo.kl
            kl_NL = compute_approx_kl(batch.train_NL, batch.base_NL, kl_estimator=kl.estimator)
            reward_NL = compute_reward(batch.advantage_N, kl.init_coef, kl_NL, batch.mask_NL.double())
            total_N: Tensor = (reward_NL * batch.mask_NL).sum(-1).double()
            return total_N

        yield Case("default", "PolicyLoss, compute_reward", run(), "tokens", rewards=rewards)
        option = "--algo.advantage.is_correction_"
        modes: dict[str, tuple[str, ...]] = {
            "tis": (f"{option}level", "token", f"{option}mode", "clip"),
            "icepop": (f"{option}level", "token", f"{option}mode", "mask"),
            "seq-mask-tis": (f"{option}level", "seq", f"{option}mode", "mask"),
        }
        for level, gating, limit in (
            ("token", "binary_kl", "0.05"),
            ("token", "tv", "0.2"),
            ("seq", "binary_kl", "0.001"),
            ("seq", "tv", "0.02"),
        ):
            gate = (f"{option}level", level, f"{option}mode", "mask", f"{option}gating", gating)
            modes[f"{level}-mask-{gating}"] = (*gate, f"{option}threshold", limit)
        for mode, given in modes.items():
            yield Case(mode, "PolicyLoss", run(*given), "tokens", beside="openrlhf/default")
        words = ("--actor.policy_loss_type", "gspo", f"{option}level", "token")
        yield Case("gspo-rollout", "PolicyLoss", run(*words), "responses")
        yield Case("gspo", "PolicyLoss", run("--actor.policy_loss_type", "gspo"), "responses")
        for name, text in texts.items():
            yield Case(name, "PolicyLoss", run(*shlex.split(text)), "tokens", beside="openrlhf/default")


class _ReachedError(Exception):
    """The command line is parsed and checked."""


def openrlhf_arguments(*words: str) -> Any:
    """The arguments of `openrlhf.cli.train_ppo_ray` for these words, after its own checks."""
    import openrlhf.utils.config as config

    parsed: list[Any] = []
    original = config.hierarchize

    def hierarchize(args: Any) -> Any:
        parsed.append(original(args))
        return parsed[-1]

    def reached(*_: Any, **__: Any) -> Any:
        raise _ReachedError

    needed = ["--actor.model_name_or_path", "m", "--reward.remote_url", "r", "--data.prompt_dataset", "d"]
    with (
        mock.patch.object(config, "hierarchize", hierarchize),
        mock.patch.object(sys.modules["ray"], "is_initialized", reached, create=True),
        mock.patch.object(sys, "argv", ["train", *needed, *words]),
    ):
        try:
            runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__")
        except _ReachedError:
            return parsed[0]
    raise AssertionError("the command line did not reach its training")


def ms_swift(folder: Path, texts: Texts) -> Cases:
    """`GRPOTrainer._compute_loss_and_metrics` with the defaults of its own arguments."""
    stubs = ("trl.experimental.ppo", "binpacking", "attrdict", "oss2", "dacite", "addict", "cpm_kernels")
    with importable(folder, stubs=stubs):
        from swift.arguments import RLHFArguments
        from swift.rl_core.data import GRPOBatch
        from swift.rlhf_trainers.grpo_trainer import GRPOTrainer
        from transformers import HfArgumentParser

        defaults = {
            each.name: each.default_factory() if callable(each.default_factory) else each.default
            for each in fields(RLHFArguments)
        }

        def run(**chosen: Any) -> Run:
            args = SimpleNamespace(**(defaults | {"rlhf_type": "grpo"} | chosen))
            RLHFArguments._init_grpo(args)
            RLHFArguments._set_default(args)
            trainer = mock.MagicMock(args=args)
            GRPOTrainer._prepare_algorithm_params(trainer)
            trainer.beta = args.beta
            trainer.compute_entropy = False
            trainer.disable_rollout_importance_sampling = False
            trainer.sdar_loss_coef = 0
            trainer.chord_sft_iterator = None
            trainer._has_teacher = False
            for name in (
                "_get_rollout_is_correction",
                "_apply_rollout_importance_sampling",
                "_compute_sequence_level_ratios",
                "_compute_off_policy_sequence_mask",
            ):
                setattr(trainer, name, types.MethodType(getattr(GRPOTrainer, name), trainer))
            trainer._compute_rollout_offpolicy_metrics.return_value = {}
            trainer._compute_is_correction_metrics.return_value = {}
            trainer.accelerator.gather_for_metrics = lambda x: x
            trainer._metrics = {"train": defaultdict(list)}

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                trainer._get_per_token_logps_and_entropies.return_value = (new_NL, None)
                given = GRPOBatch(
                    completion_mask=batch.mask_NL,
                    truncated_mask=torch.zeros(len(new_NL), dtype=torch.bool),
                    seq_lengths=batch.mask_NL.sum(-1),
                    old_per_token_logps=batch.train_NL,
                    ref_per_token_logps=batch.base_NL,
                    rollout_per_token_logps=batch.infer_NL,
                    advantages=expand(batch),
                )
                with mock.patch("swift.rlhf_trainers.grpo_trainer.gather_object", lambda x: x):
                    found, _ = GRPOTrainer._compute_loss_and_metrics(trainer, None, {}, given)
                return found, batch.advantage_N

            return loss

        function = "GRPOTrainer._compute_loss_and_metrics"
        yield Case("default", function, run(), "responses")
        for mode in ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask"):
            # Its correction weighs the KL too, which none of ours does: compared without a KL.
            made = run(rollout_importance_sampling_mode=mode, beta=0.0)
            yield Case(mode, function, made, "responses")
        # A response that is masked takes its tokens out of its own mean, which is 0 then.
        made = run(off_policy_sequence_mask_delta=0.5, beta=0.0)
        yield Case("off_policy_sequence_mask", function, made, "responses")
        made = run(importance_sampling_level="sequence", beta=0.0)
        yield Case("gspo", function, made, "responses")
        yield Case("sapo", function, run(loss_type="sapo", beta=0.0), "responses")
        for name, text in texts.items():
            parser = HfArgumentParser(RLHFArguments)
            words = shlex.split(text)
            known = parser.parse_args(words)  # an unknown option ends it
            chosen = {word[2:]: getattr(known, word[2:]) for word in words if word.startswith("--")}
            yield Case(name, function, run(**chosen, beta=0.0), "responses", beside="ms-swift/token_truncate")


def prime_rl(folder: Path, texts: Texts) -> Cases:
    """`setup_rl_loss_fn` and `compute_loss`, the trainer's own, with `trainer.loss` as a user writes it."""
    packages = folder / "packages/prime-rl-configs/src"
    stubs = ("verifiers", "renderers", "torchtitan")
    with importable(folder / "src", packages, stubs=stubs):
        from prime_rl.configs.trainer import DefaultLossConfig, IPOLossConfig
        from prime_rl.trainer.rl.loss import compute_loss, setup_rl_loss_fn

        def run(config: Any) -> Run:
            function = setup_rl_loss_fn(config)

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                rows = [list(rows_NL) for rows_NL in (new_NL, batch.infer_NL, expand(batch), batch.mask_NL)]
                logp, infer, advantage, mask = rows
                tokens = int(batch.mask_NL.sum())
                found, _ = compute_loss(logp, infer, None, advantage, mask, None, None, None, function, tokens, 1, 1)
                return found, batch.advantage_N

            return loss

        dppo = run(DefaultLossConfig())
        yield Case("dppo", "compute_loss, default_loss_fn", dppo, "tokens", moved=False, value=False)
        for mode, kl_tau in (("default", 0.0), ("ipo", 1e-3)):
            ipo = run(IPOLossConfig(ipo_threshold=0.3, kl_tau=kl_tau))
            yield Case(mode, "compute_loss, ipo_loss_fn", ipo, "tokens", moved=False, value=False)
        for name, text in texts.items():
            given = IPOLossConfig(**tomllib.loads(text)["trainer"]["loss"])
            yield Case(name, "compute_loss, ipo_loss_fn", run(given), "tokens", moved=False, value=False)


def slime(folder: Path, texts: Texts) -> Cases:
    """`policy_loss_function` with the defaults of its own options."""
    stubs = ("ray", "megatron", "sglang", "sglang_router", "mbridge")
    with importable(folder, stubs=stubs):
        from argparse import ArgumentParser

        from slime.backends.megatron_utils import cp_utils
        from slime.backends.megatron_utils import loss as losses
        from slime.utils.arguments import get_slime_extra_args_provider

        torch.compiler.set_stance("force_eager")

        def parsed(*words: str) -> dict[str, Any]:
            parser = get_slime_extra_args_provider()(ArgumentParser())
            known: dict[str, Any] = vars(parser.parse_args(["--rollout-batch-size", "1", *words]))  # no default has one
            return known

        defaults = parsed()

        def run(**chosen: Any) -> Run:
            args = SimpleNamespace(**(defaults | chosen))
            args.eps_clip_high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                lengths = batch.mask_NL.sum(-1).tolist()

                def packed(rows_NL: Tensor) -> list[Tensor]:
                    return [row[:length] for row, length in zip(rows_NL, lengths, strict=True)]

                masks = [torch.ones(length, dtype=torch.float64) for length in lengths]
                given = {
                    "advantages": packed(expand(batch)),
                    "log_probs": packed(batch.train_NL),
                    "rollout_log_probs": packed(batch.infer_NL),
                    "ref_log_probs": packed(batch.base_NL),
                    "response_lengths": lengths,
                    "total_lengths": lengths,
                    "unconcat_tokens": None,
                    "loss_masks": masks,
                    "rollout_mask_sums": [mask.sum() for mask in masks],
                }
                now = {"log_probs": packed(new_NL), "entropy": [torch.zeros_like(mask) for mask in masks]}
                one = mock.MagicMock(get_context_parallel_world_size=lambda: 1)
                with (
                    mock.patch.object(losses, "get_log_probs_and_entropy", lambda *_, **__: (None, now)),
                    mock.patch.object(losses, "get_rollout_top_p_logprob_kwargs", lambda *_: {}),
                    mock.patch.object(losses, "all_gather_with_cp", lambda x, *_: x),
                    mock.patch.object(cp_utils, "mpu", one),
                ):
                    mean = cp_utils.get_sum_of_sample_mean(
                        lengths, lengths, masks, given["rollout_mask_sums"], args.calculate_per_token_loss
                    )
                    found, _ = losses.policy_loss_function(args, given, new_NL, mean)
                return found, batch.advantage_N

            return loss

        mean = "sum of responses"
        function = "policy_loss_function"
        yield Case("default", function, run(), mean)
        icepop = "slime.backends.megatron_utils.loss.icepop_function"
        yield Case("tis", function, run(use_tis=True), mean, beside="slime/default")
        made = run(use_tis=True, custom_tis_function_path=icepop)
        yield Case("icepop", function, made, mean, beside="slime/default")
        helper = folder / "examples/train_infer_mismatch_helper"
        settings = yaml.safe_load((helper / "mis.yaml").read_text(encoding="utf-8"))
        mis = "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp"
        made = run(**{"use_tis": True, "custom_tis_function_path": mis} | settings)
        yield Case("mis", f"{function}, compute_mis_weights_with_cp", made, mean, beside="slime/default")
        for mode in ("gspo", "cispo"):
            yield Case(mode, function, run(advantage_estimator=mode), mean)
        yield Case("opsm", function, run(use_opsm=True), mean)
        for name, text in texts.items():
            words, _, file = text.partition("# mis.yaml:")
            listed = yaml.safe_load("{" + re.sub(r"\n\s*#", " ", file) + "}") if file else {}
            made = run(**parsed(*shlex.split(words)) | (settings | listed if file else {}))
            yield Case(name, function, made, mean, beside="slime/default")


def nemo_rl(folder: Path, texts: Texts) -> Cases:
    """`ClippedPGLossFn` with the loss settings of `examples/configs/grpo_math_1B.yaml`."""
    # Its package of policies refuses transformers of this version; the loss uses none of it.
    with importable(
        folder,
        stubs=("ray", "megatron", "pynvml", "mlflow", "swanlab", "torch.utils.tensorboard", "nemo_rl.models.policy"),
    ):
        from nemo_rl.algorithms.loss.loss_functions import ClippedPGLossConfig, ClippedPGLossFn
        from omegaconf import OmegaConf

        text = (folder / "examples/configs/grpo_math_1B.yaml").read_text(encoding="utf-8")
        written = yaml.safe_load(text)["loss_fn"]

        def run(**chosen: Any) -> Run:
            function = ClippedPGLossFn(ClippedPGLossConfig(**written | chosen))

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                def shifted(rows_NL: Tensor) -> Tensor:
                    return torch.cat([torch.zeros(len(rows_NL), 1, dtype=rows_NL.dtype), rows_NL], 1)

                data = {
                    "token_mask": shifted(batch.mask_NL.double()),
                    "sample_mask": torch.ones(len(new_NL), dtype=torch.float64),
                    "advantages": shifted(expand(batch)),
                    "prev_logprobs": shifted(batch.train_NL),
                    "generation_logprobs": shifted(batch.infer_NL),
                    "reference_policy_logprobs": shifted(batch.base_NL),
                    "input_ids": torch.zeros(len(new_NL), new_NL.shape[1] + 1, dtype=torch.int64),
                }
                tokens = batch.mask_NL.sum().double()
                found, _ = function(new_NL, data, torch.tensor(float(len(new_NL))), tokens)
                return found, batch.advantage_N

            return loss

        function = "ClippedPGLossFn"
        # The KL has the value of k3 and the gradient of k2.
        yield Case("default", function, run(), "tokens", value=False)
        made = run(force_on_policy_ratio=True, reference_policy_kl_penalty=0.0)
        yield Case("force_on_policy_ratio", function, made, "tokens", moved=False)
        limits = {"icepop": (0.5, 5.0), "seq-mask-tis": (0.999, 1.002)}
        for mode, (low, high) in limits.items():
            made = run(
                use_importance_sampling_correction=True,
                truncated_importance_sampling_type=mode,
                truncated_importance_sampling_ratio=high,
                truncated_importance_sampling_ratio_min=low,
            )
            yield Case(mode, function, made, "tokens", beside="nemo-rl/default", value=False)
        for name, text in texts.items():
            chosen = OmegaConf.to_container(OmegaConf.from_dotlist(shlex.split(text)).loss_fn)
            yield Case(name, function, run(**chosen), "tokens", beside="nemo-rl/default", value=False)


def areal(folder: Path, texts: Texts) -> Cases:
    """`grpo_loss_fn` with the defaults of `PPOActorConfig`; its casts to float32 are taken off."""
    third_parties = ("ray", "torchdata", "megatron", "mbridge", "sglang", "colorlog")
    stubs = (*third_parties, "areal.infra", "areal.experimental", "areal.utils.stats_logger")
    with importable(folder, stubs=stubs):
        from areal.api.cli_args import PPOActorConfig, RejectionSamplingConfig
        from areal.trainer.ppo.actor import grpo_loss_fn
        from omegaconf import OmegaConf

        defaults = {each.name: each.default for each in fields(PPOActorConfig)}
        taken: tuple[str, ...] = ("eps_clip", "eps_clip_higher", "c_clip", "rejection_sampling", "m2_threshold")
        taken += ("importance_sampling_level", "prox_logp_method", "sapo_tau_pos", "sapo_tau_neg", "use_decoupled_loss")
        taken += ("use_sapo_loss",)

        def run(**chosen: Any) -> Run:
            settings = {name: (defaults | chosen)[name] for name in taken}

            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                decoupled, approximate = settings["use_decoupled_loss"], settings["prox_logp_method"] == "loglinear"
                given = {
                    "logprobs": batch.infer_NL,
                    "advantages": expand(batch),
                    "loss_mask": batch.mask_NL,
                    "versions": (9 - batch.age_N)[:, None].expand_as(batch.mask_NL),
                }
                if not approximate:
                    given["prox_logp"] = batch.train_NL if decoupled else batch.infer_NL
                with (
                    mock.patch.object(Tensor, "float", Tensor.double),
                    mock.patch("areal.trainer.ppo.actor.stats_tracker"),  # it takes float32 alone
                ):
                    found = grpo_loss_fn(
                        new_NL, torch.zeros_like(new_NL), given, current_version=9 if approximate else None, **settings
                    )
                return found, batch.advantage_N

            return loss

        function = "grpo_loss_fn"
        yield Case("default", function, run(), "tokens")
        decoupled: dict[str, Any] = {"use_decoupled_loss": True}
        yield Case("decoupled", function, run(**decoupled), "tokens")
        filters: dict[str, dict[str, Any]] = {
            "token_mask": {},
            "token_clamp": {"action": "clamp"},
            "icepop": {"lower": 0.5},
            "sequence_mask": {"level": "sequence"},
            "sequence_clamp": {"level": "sequence", "action": "clamp"},
            "token_kl_k2": {"metric": "kl_k2", "upper": 0.5},
            "sequence_kl_k2": {"level": "sequence", "metric": "kl_k2", "upper": 0.5},
        }
        for mode, chosen in filters.items():
            made = run(rejection_sampling=RejectionSamplingConfig(**chosen), **decoupled)
            yield Case(mode, function, made, "tokens", beside="areal/decoupled")
        # The mean is over the tokens that M2PO keeps.
        yield Case("m2po", function, run(m2_threshold=0.04, **decoupled), "kept tokens", beside="areal/decoupled")
        yield Case("a3po", function, run(prox_logp_method="loglinear", **decoupled), "tokens")
        yield Case("gspo", function, run(importance_sampling_level="sequence", **decoupled), "tokens")
        yield Case("sapo", function, run(use_sapo_loss=True), "tokens")
        for name, text in texts.items():
            given = OmegaConf.to_container(OmegaConf.from_dotlist(shlex.split(text)).actor)
            if "rejection_sampling" in given:
                given["rejection_sampling"] = RejectionSamplingConfig(**given["rejection_sampling"])
            mean = "kept tokens" if "m2_threshold" in given else "tokens"
            yield Case(name, function, run(**given), mean, beside="areal/decoupled")


def roll(folder: Path, texts: Texts) -> Cases:
    """`ActorWorker.loss_func` with the defaults of `RLVRConfig` and of `TrainInferCorrectionConfig`."""
    stubs = ("ray", "imageio", "roll.pipeline.base_worker", "roll.distributed", "roll.models", "roll.platforms")
    with importable(folder, stubs=stubs):
        os.environ["ROLL_LOG_DIR"] = mkdtemp()
        from roll.configs.base_config import (
            TrainInferCorrectionConfig,
            TrainInferFilterConfig,
            TrainInferISWeightConfig,
        )
        from roll.pipeline.rlvr.actor_worker import ActorWorker
        from roll.pipeline.rlvr.rlvr_config import RLVRConfig

        defaults = {each.name: each.default for each in fields(RLVRConfig)}

        def run(correction: Any) -> Run:
            def loss(batch: Batch, new_NL: Tensor) -> tuple[Tensor, Tensor]:
                worker = mock.MagicMock()
                worker.pipeline_config = SimpleNamespace(**(defaults | {"train_infer_correction": correction}))
                worker.pipeline_config.importance_sampling = "token"
                worker.strategy.op_compute_log_probs.return_value = new_NL
                worker.get_old_log_probs_with_cache.return_value = batch.train_NL
                worker.compute_sample_weights = types.MethodType(ActorWorker.compute_sample_weights, worker)
                shifted_NL = torch.nn.functional.pad(batch.mask_NL.long(), (1, 0))
                tensors = {
                    "response_mask": shifted_NL,
                    "ref_log_probs": batch.base_NL,
                    "advantages": expand(batch),
                    "input_ids": torch.zeros_like(shifted_NL),
                    "infer_logprobs": batch.infer_NL,
                }
                counts = {"response_mask": batch.mask_NL.sum()}
                samples = {"response_mask": len(new_NL)}
                data = SimpleNamespace(
                    batch=tensors,
                    meta_info={"batch_num_tokens": counts, "global_valid_samples": samples},
                    non_tensor_batch={},
                )
                found, _ = ActorWorker.loss_func(worker, data, new_NL)
                return found, batch.advantage_N

            return loss

        function, mean = "ActorWorker.loss_func, compute_train_infer_correction", "responses' kept tokens"
        yield Case("default", function, run(TrainInferCorrectionConfig()), "responses")
        for level in ("token", "segment", "geometric", "sequence"):
            for statistic in ("ratio", "diff"):
                one = TrainInferFilterConfig(
                    enabled=True,
                    agg_type=level,
                    ratio_enabled=statistic == "ratio",
                    diff_enabled=statistic == "diff",
                )
                made = run(TrainInferCorrectionConfig(filters=[one]))
                mode, gaps = f"{level}_{statistic}", level == "segment"
                yield Case(mode, function, made, mean, beside="roll/default", gaps=gaps)
        for level in ("token", "geometric", "sequence"):
            weight = TrainInferISWeightConfig(enabled=True, weight_type=level)
            made = run(TrainInferCorrectionConfig(is_weight=weight))
            yield Case(f"is_{level}", function, made, "responses", beside="roll/default")
        for name, text in texts.items():
            given = yaml.safe_load(text)["train_infer_correction"]
            filters = [TrainInferFilterConfig(**one) for one in given.get("filters", [])]
            weight = TrainInferISWeightConfig(**given.get("is_weight", {}))
            made = run(TrainInferCorrectionConfig(is_weight=weight, filters=filters))
            yield Case(name, function, made, mean if filters else "responses", beside="roll/default")


FRAMEWORKS: dict[str, Callable[[Path, Texts], Cases]] = {
    "verl": verl,
    "trl": trl,
    "skyrl": skyrl,
    "openrlhf": openrlhf,
    "ms-swift": ms_swift,
    "prime-rl": prime_rl,
    "slime": slime,
    "nemo-rl": nemo_rl,
    "areal": areal,
    "roll": roll,
}
