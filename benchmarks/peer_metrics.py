"""Frameworks' own metric functions beside ours on 150 random batches.

Each function is executed from its framework's source: a file's definitions without its imports, or for TRL the whole
trainer. Among the batches are responses of one token and of none, tools' tokens inside a response, ratios of e^±30 and
a sampler that gave no log-prob. Log-probs are float64; TRL's are float32, as its trainer has them.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from framework_calls import Batch, definitions, nemo_metrics, prime_metrics, slime_metrics, verl_helper
from numpy.typing import NDArray
from peer_sources import importable
from peer_updates import UPDATES, ours_of_updates, trl_updates, verl_updates
from torch import Tensor

from tailrl.config.arm import Correction
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.measure import measure
from tailrl.diagnosis.metrics import frameworks, named_metrics
from tailrl.objective.corrections import correct
from tailrl.objective.diagnostics import log_ratio_metrics
from tailrl.rollout.types import Rollout
from tailrl.stats.verl import verl_metrics
from tailrl.training.rollouts import response_metrics, reward_metrics

BATCHES = 150
SCALES = (0.01, 0.3, 2.0, 10.0)  # nats, standard deviation of the log-ratios
GROUP = 4  # responses to one prompt
LONGEST = 12  # tokens, TRL's limit here
THRESHOLDS = (1.2, 2.0, 5.0)
LEVELS = ("token", "sequence")  # of verl's rollout_is
OF_TRAINING = "logged by training: rollout_corr/"
VERL_NAMES = (
    *("kl", "k3_kl", "training_ppl", "training_log_ppl", "rollout_ppl", "rollout_log_ppl", "ppl_ratio"),
    *("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"),
)  # what reports/metrics/aliases.yaml says is the same in verl

Value = tuple[str, str, float]
"""Source, name and value of a framework's metric."""

Ours = dict[tuple[str, str], float]
"""Our values by framework and name."""


def random_batch(seed: int) -> Batch:
    """Padded log-probs; what is masked has values that no mean may see."""
    generator = torch.Generator().manual_seed(seed)
    responses = 1 if seed % 10 == 0 else int(torch.randint(2, 9, (), generator=generator))
    longest = 1 if seed % 10 < 2 else 40
    lengths_N1 = torch.randint(1, longest + 1, (responses, 1), generator=generator)
    mask_NL = torch.arange(longest) < lengths_N1
    if seed % 10 == 3:
        mask_NL &= torch.rand(mask_NL.shape, generator=generator) < 0.7
    if seed % 10 == 4:
        mask_NL[0] = False
    mask_NL[-1, 0] = True
    train_NL = -torch.empty(mask_NL.shape, dtype=torch.float64).exponential_(1.0, generator=generator)
    log_ratio_NL = SCALES[seed % 4] * torch.randn(mask_NL.shape, dtype=torch.float64, generator=generator)
    if seed % 10 == 5:
        log_ratio_NL[-1, 0] = 30.0 if seed % 20 == 5 else -30.0
    # Both at most 0, with the drawn ratio.
    infer_NL = train_NL - log_ratio_NL
    above_NL = infer_NL.clamp(min=0.0)
    advantage_NL = torch.randn(responses, 1, dtype=torch.float64, generator=generator).expand_as(mask_NL)
    return Batch(
        (train_NL - above_NL).where(mask_NL, -9.0), (infer_NL - above_NL).where(mask_NL, -1.0), mask_NL, advantage_NL
    )


def of_a_log(batch: Batch) -> Ours:
    """What `tailrl diagnose` shows under the frameworks' names."""
    rows = [
        LoggedRow("a batch", infer_L[mask_L].numpy(), train_L[mask_L].numpy())
        for train_L, infer_L, mask_L in zip(batch.train_NL, batch.infer_NL, batch.mask_NL, strict=True)
    ]
    measured = measure([("a batch", pack(rows))])
    return {(one.framework, one.name): one.value.mean for one in named_metrics(measured)}


def packed(batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Both sides' log-probs and the responses of the batch's tokens, [T] each."""
    sequence_NL = torch.arange(len(batch.mask_NL))[:, None].expand_as(batch.mask_NL)
    return batch.train_NL[batch.mask_NL], batch.infer_NL[batch.mask_NL], sequence_NL[batch.mask_NL]


def has_gaps(batch: Batch) -> bool:
    """Whether a masked token stands before one that counts."""
    return not torch.equal(batch.mask_NL, torch.arange(batch.mask_NL.shape[1]) < batch.mask_NL.sum(1)[:, None])


def is_whole(batch: Batch) -> bool:
    """Whether each response has a token."""
    return bool(batch.mask_NL.any(1).all())


def of_training(batch: Batch, threshold: float) -> Ours:
    """What the training loop logs of the batch under verl's names; some names at both levels of verl's weights.

    Of a batch with a response without a token, the perplexities are left out: verl gives it 1, we leave it out.
    """
    train_T, infer_T, sequence_T = packed(batch)
    count = len(batch.mask_NL)
    ours: Ours = {}
    for level in LEVELS:
        weights = verl_metrics(
            (train_T - infer_T).numpy(), sequence_T.numpy(), count, threshold, by_response=level == "sequence"
        )
        ours |= {("verl", f"rollout_corr_verl/{name} ({level})"): value for name, value in weights.items()}
    if is_whole(batch):
        logged = log_ratio_metrics(train_T, infer_T, sequence_T, count)
        ours |= {("verl", f"{OF_TRAINING}{name}"): logged[name] for name in VERL_NAMES}
    return ours


def verl_of_training(folder: Path, batch: Batch, threshold: float) -> Iterator[Value]:
    """verl's own numbers at the same settings, under the same names."""
    helper = verl_helper(folder)
    source = "verl/trainer/ppo/rollout_corr_helper.py: compute_rollout_correction_and_rejection_mask"
    for level in LEVELS:
        metrics = helper.compute_rollout_correction_and_rejection_mask(
            batch.train_NL, batch.infer_NL, batch.mask_NL.long(), rollout_is=level, rollout_is_threshold=threshold
        )[2]
        for name, value in metrics.items():
            yield source, f"{name.replace('rollout_corr/', 'rollout_corr_verl/')} ({level})", float(value)
            if level == "token":
                yield source, f"{OF_TRAINING}{name.removeprefix('rollout_corr/')}", float(value)


REJECTIONS = {
    "rollout_corr/rollout_rs_masked_fraction": ("token_k1", "0.5_2.0", {"token": "mask", "token_lower": 0.5}),
    "rollout_corr/rollout_rs_seq_masked_fraction": (
        "seq_mean_k3", 0.01, {"reject": [{"of": "k3", "by": "mean", "above": 0.01}], "log_ratio_limit": 20.0},
    ),
}  # fmt: skip
"""verl's settings and ours where the two definitions meet: tokens alone are rejected, or whole responses alone."""


def of_rejections(batch: Batch) -> Ours:
    """Our fractions of rejected tokens and responses."""
    train_T, infer_T, sequence_T = packed(batch)
    ours: Ours = {}
    for name, (_, _, settings) in REJECTIONS.items():
        delta_T = train_T - infer_T
        outside_T = torch.zeros_like(sequence_T, dtype=torch.bool)
        weights = correct(delta_T, outside_T, sequence_T, len(batch.mask_NL), Correction.model_validate(settings))
        judged = weights.rejected_N if "seq" in name else weights.masked_T
        ours["verl", name] = judged.double().mean().item()
    return ours


def verl_rejections(folder: Path, batch: Batch) -> Iterator[Value]:
    helper = verl_helper(folder)
    for name, (option, threshold, _) in REJECTIONS.items():
        metrics = helper.compute_rollout_correction_and_rejection_mask(
            batch.train_NL, batch.infer_NL, batch.mask_NL.long(), rollout_rs=option, rollout_rs_threshold=threshold
        )[2]
        yield "verl/trainer/ppo/rollout_corr_helper.py: compute_rollout_rejection_mask", name, float(metrics[name])


def of_responses(batch: Batch, longest: int) -> dict[str, float]:
    """What training logs of rewards and lengths, where a response below the limit has ended by itself."""
    nothing_T = np.zeros(1, np.float32)
    rollouts = [
        Rollout((1,), (2,) * length, nothing_T, nothing_T, np.ones(1, np.int32), stopped=ends)
        for length, ends in zip(batch.lengths, ended(batch, longest), strict=True)
    ]
    return reward_metrics(rewards_of(batch).reshape(-1, GROUP)) | response_metrics(rollouts)


def rewards_of(batch: Batch) -> NDArray[np.float32]:
    """A reward for each response [N]: 1 for an odd number of tokens."""
    return np.array(batch.lengths, np.float32) % 2


def ended(batch: Batch, longest: int) -> list[bool]:
    """Whether each response ended before the limit."""
    return [length < longest for length in batch.lengths]


def verl_data_metrics(folder: Path, batch: Batch) -> Iterator[Value]:
    """verl's metrics of rewards and lengths."""
    source = "verl/trainer/ppo/metric_utils.py"
    functions = definitions(folder / source, {}, "compute_data_metrics", "_compute_response_info")
    count = len(batch.mask_NL)
    scores_NL = torch.zeros(batch.mask_NL.shape)
    scores_NL[:, 0] = torch.from_numpy(rewards_of(batch))
    columns = dict.fromkeys(("token_level_scores", "token_level_rewards", "advantages", "returns"), scores_NL)
    columns |= {"prompts": torch.ones(count, 1), "responses": scores_NL, "response_mask": batch.mask_NL}
    columns["attention_mask"] = torch.cat([torch.ones(count, 1, dtype=torch.bool), batch.mask_NL], 1)
    data = SimpleNamespace(batch=columns, non_tensor_batch={})
    for name, value in functions.compute_data_metrics(data, use_critic=False).items():
        yield f"{source}: compute_data_metrics", name, float(value)


def of_verl(folder: Path, batch: Batch) -> Iterator[Value]:
    helper = verl_helper(folder)
    function = "compute_rollout_correction_and_rejection_mask"
    metrics = helper.compute_rollout_correction_and_rejection_mask(
        batch.train_NL, batch.infer_NL, batch.mask_NL.long(), rollout_is="token", rollout_is_threshold=2.0
    )[2]
    for name, value in metrics.items():
        yield f"verl/trainer/ppo/rollout_corr_helper.py: {function}", name, float(value)
    names = ("calculate_debug_metrics", "calculate_log_prob_diff", "pearson_correlation_coefficient")
    quiet = {"logger": SimpleNamespace(debug=lambda *_: None, warning=lambda *_: None)}
    functions = definitions(folder / "verl/utils/debug/metrics.py", quiet, *names)
    columns = {"rollout_log_probs": batch.infer_NL, "old_log_probs": batch.train_NL}
    columns |= dict.fromkeys(("responses", "response_mask"), batch.mask_NL)
    for name, value in functions.calculate_debug_metrics(SimpleNamespace(batch=columns)).items():
        yield "verl/utils/debug/metrics.py: calculate_debug_metrics", name, float(value)


def of_tinker(folder: Path, batch: Batch) -> Iterator[Value]:
    source = "tinker_cookbook/rl/metrics.py"
    needs = {"safezip": lambda *lists: zip(*lists, strict=True)}
    function = definitions(folder / source, needs, "compute_kl_sample_train").compute_kl_sample_train

    def column(values_L: Tensor) -> Any:
        return SimpleNamespace(to_torch=lambda: values_L)

    datums = [
        SimpleNamespace(loss_fn_inputs={"logprobs": column(infer_L), "mask": column(mask_L.float())})
        for infer_L, mask_L in zip(batch.infer_NL, batch.mask_NL, strict=True)
    ]
    for name, value in function(datums, list(batch.train_NL)).items():
        yield f"{source}: compute_kl_sample_train", name, float(value)


RESPONSE_METRICS: dict[str, dict[str, Callable[[dict[str, float]], float]]] = {
    "verl": {
        "critic/rewards/mean": lambda ours: ours["reward/mean"],
        "response_length/mean": lambda ours: ours["response/length_mean"],
        "response_length/max": lambda ours: ours["response/length_max"],
        "response_length/clip_ratio": lambda ours: 1 - ours["response/stopped_fraction"],
    },
    "TRL": {
        "reward": lambda ours: ours["reward/mean"],
        "completions/mean_length": lambda ours: ours["response/length_mean"],
        "completions/max_length": lambda ours: ours["response/length_max"],
        "completions/clipped_ratio": lambda ours: 1 - ours["response/stopped_fraction"],
        "frac_reward_zero_std": lambda ours: ours["reward/all_right_fraction"] + ours["reward/all_wrong_fraction"],
    },
}
"""Metrics of rewards and lengths by the framework's name, from ours as `reports/metrics/aliases.yaml` relates them."""

NOT_EXECUTED = {
    "verl": {},
    "TRL": {},
    "prime-rl": {
        "mismatch_kl/all/mean": "the mean of mismatch_kl, which is executed",
        "is_masked": "of its loss: the table of presets has it",
    },
}
"""Names of `reports/metrics/aliases.yaml` that no row has, with the reason."""

UPDATES_OF = {"verl": verl_updates, "TRL": trl_updates}

OF_A_LOG: dict[str, Callable[[Path, Batch], Iterator[Value]]] = {
    "verl": of_verl,
    "NeMo-RL": nemo_metrics,
    "prime-rl": prime_metrics,
    "slime": slime_metrics,
    "tinker-cookbook": of_tinker,
}


@dataclass
class SampledBatch:
    """Stands before vLLM, which no CPU test can have: gives a batch's lengths and the sampler's log-probs."""

    batch: Batch | None = None

    def sync_weights(self) -> None:
        """The trainer's log-probs are given too."""

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[Any, ...]:
        """As TRL's `VLLMGeneration.generate`; a log-prob that vLLM could not give is None."""
        assert self.batch is not None
        values = [
            [[None if math.isnan(x) else x] for x in row.tolist()] for row in self.batch.rows(self.batch.infer_NL)
        ]
        lasts = [0 if ends else 2 for ends in ended(self.batch, LONGEST)]
        return prompts, [[2] * (len(row) - 1) + [last] for row, last in zip(values, lasts, strict=True)], values, None


def trl_batch(seed: int) -> Batch:
    """Eight responses without gaps; in some the sampler gave no log-prob of a token."""
    generator = torch.Generator().manual_seed(1000 + seed)
    lengths_N1 = torch.randint(1, LONGEST + 1, (2 * GROUP, 1), generator=generator)
    mask_NL = torch.arange(int(lengths_N1.max())) < lengths_N1
    train_NL = -torch.empty(mask_NL.shape).exponential_(1.0, generator=generator)
    if seed % 3 == 0:
        lengths_N1[:GROUP] = LONGEST
        mask_NL = torch.arange(LONGEST) < lengths_N1
        train_NL = -torch.empty(mask_NL.shape).exponential_(1.0, generator=generator)
    infer_NL = train_NL + SCALES[seed % 4] * torch.randn(mask_NL.shape, generator=generator)
    infer_NL = infer_NL.clamp(max=0.0)
    if seed % 5 == 0:
        infer_NL[0, 0] = math.nan
    return Batch(train_NL.where(mask_NL, 0.0), infer_NL.where(mask_NL, 0.0), mask_NL, torch.zeros(mask_NL.shape))


def of_trl(folder: Path, seeds: range) -> Iterator[tuple[int, Value]]:
    """What GRPOTrainer logs by its defaults, from its own method that samples and scores a batch."""
    from datasets import Dataset
    from rloo import make_model
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with importable(folder), tempfile.TemporaryDirectory() as out:
        from trl import GRPOConfig, GRPOTrainer
        from trl.trainer import grpo_trainer

        if not Path(grpo_trainer.__file__).is_relative_to(folder):
            raise RuntimeError(f"TRL was imported from {grpo_trainer.__file__} before, not from {folder}")
        words = Tokenizer(models.WordLevel({"<end>": 0, "<pad>": 1, "a": 2}, unk_token="a"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        engine = SampledBatch()
        grpo_trainer.VLLMGeneration = lambda **_: engine

        def reward(**_: Any) -> list[float]:
            assert engine.batch is not None
            return [float(value) for value in rewards_of(engine.batch)]

        settings = GRPOConfig(
            output_dir=out, use_vllm=True, per_device_train_batch_size=2 * GROUP, num_generations=GROUP, beta=0.0,
            use_cpu=True, bf16=False, report_to="none", max_completion_length=LONGEST,
        )  # fmt: skip
        trainer = GRPOTrainer(
            model=make_model(),
            reward_funcs=reward,
            args=settings,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<end>", pad_token="<pad>"),
        )
        trainer.model.train()
        for seed in seeds:
            engine.batch = batch = trl_batch(seed)
            trainer._get_per_token_logps_and_entropies = lambda *_, batch=batch, **__: (batch.train_NL, None, None)
            trainer._generate_and_score_completions([{"prompt": "a"}] * 2 * GROUP)
            for name, values in trainer._metrics["train"].items():
                yield seed, ("trl/trainer/grpo_trainer.py: GRPOTrainer", name, values[-1])


def ours_of(framework: str, seed: int) -> Ours:
    """Our values on the batch of this number."""
    if framework == "TRL":
        batch = trl_batch(seed)
        related = of_responses(batch, LONGEST)
        return of_a_log(batch) | {("TRL", name): of(related) for name, of in RESPONSE_METRICS["TRL"].items()}
    batch = random_batch(seed)
    ours = of_training(batch, THRESHOLDS[seed % 3]) if framework == "verl" else {}
    if framework == "verl" and len(batch.mask_NL) % GROUP == 0 and is_whole(batch) and not has_gaps(batch):
        related = of_responses(batch, batch.mask_NL.shape[1])
        ours |= {("verl", name): of(related) for name, of in RESPONSE_METRICS["verl"].items()}
    if framework == "verl" and is_whole(batch):
        ours |= of_rejections(batch)
    return ours | (of_a_log(batch) if is_whole(batch) else {})


def theirs_of(framework: str, folder: Path, batches: int) -> Iterator[tuple[int, Value]]:
    """The framework's values, each with the number of its batch."""
    if framework == "TRL":
        yield from of_trl(folder, range(batches))
        return
    for seed in range(batches):
        batch = random_batch(seed)
        if framework == "verl":
            yield from ((seed, value) for value in verl_of_training(folder, batch, THRESHOLDS[seed % 3]))
            yield from ((seed, value) for value in verl_data_metrics(folder, batch))
            if is_whole(batch):
                yield from ((seed, value) for value in verl_rejections(folder, batch))
        # A log has no response without a token; NeMo-RL, prime-rl and slime are called without gaps.
        if is_whole(batch) and (framework in ("verl", "tinker-cookbook") or not has_gaps(batch)):
            yield from ((seed, value) for value in OF_A_LOG[framework](folder, batch))


def difference(theirs: float, ours: float) -> float:
    """Relative to a size of at least 1; 0 where both are NaN or the same infinity."""
    if theirs == ours or (math.isnan(theirs) and math.isnan(ours)):
        return 0.0
    return abs(theirs - ours) / max(1.0, abs(theirs))


def metric_rows(framework: str, folder: Path, batches: int = BATCHES) -> list[dict[str, Any]]:
    """For each metric that we show under a framework's name, the batch on which it differs most.

    Raises:
        RuntimeError: a metric of `diagnosis/frameworks.yaml` was not among those that the framework computed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for seed, (source, name, theirs), ours in pairs_of(framework, folder, batches):
        apart = difference(theirs, ours)
        row = rows.setdefault(name, {"quantity": name, "batches": 0, "difference": -1.0})
        row["batches"] += 1
        if not apart <= row["difference"]:
            row |= {"batch": seed, "theirs": theirs, "ours": ours, "difference": apart, "source": source}
    if missing := [name for name in frameworks()[framework] if name not in rows]:
        raise RuntimeError(f"{framework} computed no {', '.join(missing)}")
    return list(rows.values())


def pairs_of(framework: str, folder: Path, batches: int) -> Iterator[tuple[int, Value, float]]:
    """The framework's values of metrics that we have under its name, each with its batch and with our value."""
    ours, of = ours_of(framework, 0), 0
    for seed, value in theirs_of(framework, folder, batches):
        if seed != of:
            ours, of = ours_of(framework, seed), seed
        if (framework, value[1]) in ours:
            yield seed, value, ours[framework, value[1]]
    if framework in UPDATES_OF:
        for seed, value in UPDATES_OF[framework](folder, range(min(batches, UPDATES))):
            yield seed, value, ours_of_updates(framework, seed)[framework, value[1]]
