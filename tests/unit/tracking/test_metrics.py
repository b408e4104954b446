"""The catalogue of metrics: what it says is there, and no other module writes a key."""

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

import tailrl
from tailrl.objective.diagnostics import advantage_skew, log_ratio_metrics, weight_metrics
from tailrl.reports.metrics.page import ALIASES
from tailrl.rollout.types import Rollout
from tailrl.stats.verl import verl_metrics
from tailrl.tracking.metrics import (
    CORR,
    CORR_UNMASKED,
    CORR_VERL,
    CURRICULUM,
    METRICS,
    PHASES,
    ROUTING,
    TIME,
    VERIFICATION,
    in_group,
)
from tailrl.training.rollouts import response_metrics, reward_metrics

ROOM = Path(tailrl.__file__).parent
CATALOGUE = ROOM / "tracking" / "metrics.py"
EVERY = METRICS | VERIFICATION | ROUTING | CURRICULUM
GROUPS = {key.split("/")[0] for key in EVERY}

RATIOS = """kl k3_kl delta_abs_mean delta_abs_max rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low
training_ppl rollout_ppl ppl_ratio log_ppl_diff log_ppl_abs_diff chi2_token chi2_seq"""
WEIGHTS = "rollout_is_mean rollout_is_std rollout_is_min rollout_is_max rollout_is_eff_sample_size"
LOG_PERPLEXITIES = "training_log_ppl rollout_log_ppl log_ppl_diff_max log_ppl_diff_min"
VERL = f"""{WEIGHTS} rollout_is_ratio_fraction_high rollout_is_ratio_fraction_low rollout_is_seq_mean rollout_is_seq_std
rollout_is_seq_min rollout_is_seq_max rollout_is_seq_max_deviation rollout_is_seq_fraction_high
rollout_is_seq_fraction_low chi2_token chi2_seq"""
KEYS = [
    ("train", "step loss grad_norm skipped learning_rate"),
    ("reward", "mean all_right_fraction all_wrong_fraction"),
    ("response", "length_mean length_max stopped_fraction"),
    ("policy", "clip_fraction entropy reference_k1 reference_k3"),
    ("rollout_corr", RATIOS),
    ("rollout_corr_unmasked", RATIOS),
    ("rollout_corr", "delta_seq_abs_mean"),
    ("rollout_corr_unmasked", "delta_seq_abs_mean"),
    ("rollout_corr_raw", WEIGHTS),
    ("rollout_corr", WEIGHTS),
    ("rollout_corr", LOG_PERPLEXITIES),
    ("rollout_corr_unmasked", LOG_PERPLEXITIES),
    ("rollout_corr_verl", VERL),
    ("rollout_corr", "c_positive_advantage c_negative_advantage"),
    ("rollout_corr", "truncated_fraction rollout_is_batch_norm_factor"),
    ("rollout_corr", "rollout_rs_masked_fraction rollout_rs_seq_masked_fraction veto_seq_fraction"),
    ("dvp", "kept_mass_train_mean kept_mass_train_min kept_mass_rollout_mean kept_mass_rollout_min"),
    ("dvp", "lost_mass_per_response bias_bound_paper total_variation threshold"),
    ("dvp", "kept_vocab_per_token_train kept_vocab_per_token_rollout"),
    ("dvp", "sampled_outside_train_support_fraction sampled_outside_train_support_count outside_delta_abs_mean"),
    ("time", "rollout reward forward backward optimizer weights metrics step"),
    ("throughput", "tokens_per_second"),
    ("verification", "rounds agreement proposed_per_kept seconds"),
    ("routing", "flip_fraction layer_flip_fraction_mean layer_flip_fraction_first layer_flip_fraction_last"),
    ("routing", "layer_flip_fraction_max flipped_k3_kl unflipped_k3_kl flipped_k3_share"),
    ("curriculum", "level"),
]

LITERAL = re.compile(
    "|".join(
        (
            *map(re.escape, EVERY),
            r"rollout_corr(?!ection)",  # verl's block of settings begins alike
            # A part of a key; a path as train/<arm> or train/*/ is none, nor is .../train/.
            rf"(?<![\w/])(?:{'|'.join(GROUPS)})/(?:[a-z_{{]|$)",
        )
    )
)


def literals(source: str) -> Iterator[str]:
    """The strings in a module's code that are a metric's key, or have one or a part of one; docstrings are left out."""
    tree = ast.parse(source)
    documents = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documents:
            continue
        if LITERAL.search(node.value):
            yield node.value


@pytest.mark.parametrize("file", sorted(ROOM.rglob("*.py")), ids=lambda file: str(file.relative_to(ROOM)))
def test_keys_are_written_in_the_catalogue_alone(file: Path) -> None:
    assert bool([*literals(file.read_text(encoding="utf-8"))]) == (file == CATALOGUE)


@pytest.mark.parametrize(
    "planted",
    [
        'KEY = "reward/mean"',
        'key = f"time/{phase}"',
        'keys = {"1 - dvp/kept_mass_{}_mean": 1}',
        'key = "dvp/" + name',
        'group = "rollout_corr_unmasked"',
        'raise StudyError(f"{path}: train/step is missing")',
        "run.metric('verification/rounds')",
    ],
)
def test_a_planted_key_is_found(planted: str) -> None:
    assert [*literals(planted)]


@pytest.mark.parametrize(
    "innocent", ['"""The mean of reward/mean."""', 'jobs = folder.glob("train/*/seed*")', 'x = "train/<arm>/run.json"']
)
def test_docstrings_and_paths_are_no_keys(innocent: str) -> None:
    assert not [*literals(innocent)]


@pytest.mark.parametrize("key", EVERY)
def test_each_metric_is_described_and_computed_somewhere(key: str) -> None:
    metric = EVERY[key]
    assert metric.unit and metric.meaning
    assert callable(pkgutil.resolve_name(metric.computed_by))


@pytest.mark.parametrize("nats", [0.0, 1e-7, 1e-3, 1.0, 30.0, 300.0])
def test_no_mismatch_gives_a_value_out_of_its_metrics_range(nats: float) -> None:
    """From equal log-probs, where only rounding is left, to ratios beyond float32."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(30):
        trainer_T = -torch.rand(40, generator=generator) * 20
        sampler_T = (trainer_T + nats * torch.randn(40, generator=generator)).clamp(max=0)
        sequence_T, weight_N = torch.arange(40) // 5, (nats * torch.randn(8, generator=generator)).exp()
        ratios = log_ratio_metrics(trainer_T, sampler_T, sequence_T, 8)
        groups = {
            CORR: ratios | weight_metrics(weight_N) | advantage_skew(trainer_T, sampler_T, torch.randn(40)),
            CORR_UNMASKED: ratios,
            CORR_VERL: verl_metrics(
                (trainer_T - sampler_T).double().numpy(), sequence_T.numpy(), 8, most=2.0, by_response=False
            ),
        }
        for group, values in groups.items():
            for name, value in values.items():
                metric = METRICS[in_group(group, name)]
                assert not np.isfinite(value) or metric.refusal(value) is None, f"{name} {value}"


def test_the_ranges() -> None:
    """Rounding alone may lead out of one; a mass and a norm are as the definitions bound them."""
    mass, norm, ratio = EVERY["dvp/kept_mass_train_mean"], EVERY["train/grad_norm"], EVERY["rollout_corr/chi2_seq"]
    assert mass.refusal(1.0000002) is None and mass.refusal(-1e-7) is None
    assert mass.refusal(1.01) == mass.refusal(7.0) == "it lies between 0 and 1"
    assert norm.refusal(float(np.finfo(np.float32).max)) is None
    assert norm.refusal(1e300) == norm.refusal(-1.0) == "it lies between 0 and 3.40282e+38"
    assert ratio.refusal(1e300) is None and ratio.refusal(-2.0) == "it lies between -1 and inf"
    assert all("not finite" in metric.refusal(value) for metric in EVERY.values() for value in (np.nan, np.inf))
    assert all(metric.least <= 0 <= metric.most or metric.unit == "perplexity" for metric in EVERY.values())


def test_every_name_stands_for_a_metric_of_the_catalogue() -> None:
    constants = vars(tailrl.tracking.metrics).items()
    names = {name: value for name, value in constants if isinstance(value, str) and re.fullmatch(r"\w+/\w+", value)}
    assert len(names) > 40 and {*names.values()} <= {*EVERY} and len({*names.values()}) == len(names)


def test_what_is_said_to_compute_a_metric_does() -> None:
    zeros = torch.zeros(3)
    rollout = Rollout((1,), (2,), *[np.zeros(1, np.float32)] * 2, np.ones(1, np.int32), stopped=True)
    found = {
        "objective.diagnostics.log_ratio_metrics": log_ratio_metrics(zeros, zeros, torch.arange(3), 3),
        "objective.diagnostics.advantage_skew": advantage_skew(zeros, zeros, zeros),
        "objective.diagnostics.weight_metrics": weight_metrics(zeros),
        "stats.verl.verl_metrics": verl_metrics(np.zeros(3), np.arange(3), 3, most=2.0, by_response=False),
        "training.rollouts.reward_metrics": reward_metrics(np.zeros((1, 2), np.float32)),
        "training.rollouts.response_metrics": response_metrics([rollout]),
    }
    for function, computed in found.items():
        own = [key for key, metric in METRICS.items() if metric.computed_by == f"tailrl.{function}"]
        assert {key.split("/")[-1] for key in computed} == {key.split("/")[-1] for key in own}


def test_the_keys_stay_what_they_are() -> None:
    """Users' dashboards and scripts have them. `metrics.jsonl` has them in this order (tests/unit/training)."""
    expected = [f"{group}/{name}" for group, names in KEYS for name in names.split()]
    assert [*EVERY] == expected


def test_groups() -> None:
    assert in_group(CORR, "k3_kl") == "rollout_corr/k3_kl"
    assert [METRICS[in_group(TIME, phase)].unit for phase in PHASES] == ["seconds"] * 7
    with pytest.raises(KeyError, match="time/sleep"):
        in_group(TIME, "sleep")


# --- names in other frameworks -------------------------------------------------------------------------

VERL_RATIOS = """kl k3_kl training_ppl training_log_ppl rollout_ppl rollout_log_ppl log_ppl_diff log_ppl_abs_diff
log_ppl_diff_max log_ppl_diff_min ppl_ratio"""


def test_every_alias_leads_to_a_metric() -> None:
    assert [*ALIASES] == ["verl", "TRL", "prime-rl"]
    for names in ALIASES.values():
        for alias in names.values():
            assert alias["ours"] in METRICS and alias.keys() <= {"ours", "note"}


def test_verls_names_lead_to_verls_definitions() -> None:
    """What we define as verl does has its name; what we define otherwise has it in a group of its own."""
    expected = {f"rollout_corr/{name}": f"rollout_corr/{name}" for name in VERL_RATIOS.split()}
    expected |= {f"rollout_corr/{name}": f"rollout_corr_verl/{name}" for name in VERL.split()}
    assert {name: alias["ours"] for name, alias in ALIASES["verl"].items() if name in expected} == expected
    assert not [name for name in expected if "note" in ALIASES["verl"][name]]
