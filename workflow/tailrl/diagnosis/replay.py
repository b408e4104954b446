"""Remedies replayed on a log's tokens: what each would keep, weigh and drop, at several thresholds.

The weights are those of `tailrl.objective`, which training uses; `replay.yaml` lists the remedies as its settings. One
pass over the parts of a log, and a few sums for each row of the table. Tokens without two sound log-probs are left out.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import yaml
from pydantic import Field

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.config.arm import Clip, Correction
from tailrl.config.base import Kinds
from tailrl.config.presets import presets
from tailrl.config.vocabulary import MinP, Vocabulary
from tailrl.diagnosis.log import IntArray, Log
from tailrl.diagnosis.parts import part_of
from tailrl.diagnosis.replay_weights import ReplaySettings, by_advantage, sound_tokens, token_weights
from tailrl.objective.kl_estimates import k3
from tailrl.runtime.data_files import yaml_beside

NEEDS_ADVANTAGES = "needs advantages"  # the note of a remedy that judges by the advantage's sign, where none is logged
PARTLY_JUDGED = "of the {share:.1%} of the tokens that have advantages"
"""The note of such a remedy where only some have one."""

BASES = ("advantage", "reward")  # what the gradient's direction is taken with: the first that the log has
P_TOP_UNKNOWN = "largest probabilities are not logged and taken for 1: an upper bound of what is dropped"


class Lines(Record):
    """What sets a remedy in a framework, with places for numbers; `source`: the file and line that was read."""

    text: str
    source: str


class Remedy(Record, allow_inf_nan=True):
    """A remedy of `replay.yaml`, whose header says what each field is."""

    title: str
    words: str
    lines: dict[str, Lines]
    correction: dict[str, Any] = Field(default_factory=dict)
    clip: dict[str, Any] | None = None
    tries: dict[float, dict[str, Any]] = Field(default_factory=dict)
    rho: list[str] = Field(default_factory=list)

    def settings(self) -> Iterator[tuple[float, ReplaySettings]]:
        """Each threshold with the settings of the objective."""
        for rho in self.rho:
            vocabulary = MinP(rule="min_p", rho=rho)
            yield float(f"{math.exp(vocabulary.threshold(1)):.12g}"), vocabulary
        for threshold, setting in self.tries.items():
            if self.clip is not None:
                yield threshold, Clip.model_validate({**self.clip, **setting})
            else:
                yield threshold, Correction(**self.correction, **setting)


class NotReplayed(Record):
    """Entries of benchmarks/remedies.yaml that no log's columns suffice for; `words`: the reason."""

    words: str
    entries: list[str]


class Catalogue(Record):
    """`replay.yaml`: the frameworks' versions, the remedies by their key, and those that are not replayed."""

    versions: dict[str, str]
    remedies: dict[str, Remedy]
    not_replayed: list[NotReplayed]


@cache
def catalogue() -> Catalogue:
    """The remedies that are replayed."""
    return Catalogue.model_validate(yaml_beside(__file__, "replay.yaml"))


@dataclass(frozen=True, slots=True)
class Configured:
    """Lines of configuration of a framework at a version; `source`: the file and line of it that says so."""

    framework: str
    version: str
    text: str
    source: str


def preset_of(given: ReplaySettings, framework: str = "") -> str | None:
    """A preset with these settings, but for a limit of log-ratios, which hardly any token reaches; None: no such.

    It is one of the framework if that has one, or else of another.
    """
    same = [name for name, preset in presets().items() if preset.reference_kl is None and _parsed(name) == given]
    return next((name for name in same if name.startswith(f"{framework}/")), same[0] if same else None)


@cache
def _parsed(name: str) -> ReplaySettings | None:
    """A preset's settings without a limit of log-ratios where they are one block of an arm; None: it has several."""
    preset, free = presets()[name], {"log_ratio_limit": None}
    if preset.clip is None:
        return Correction(**preset.correction | free)
    return None if preset.correction else Clip.model_validate(preset.clip | free)


def configuration(remedy_name: str, threshold: float, framework: str = "") -> tuple[Configured, ...]:
    """What sets a remedy of `replay.yaml` at a threshold, in each framework that has it, and in a study of tailrl.

    The lines of `framework` come first. A study's lines name a preset with the same settings where there is one, of
    `framework` if it has one.
    """
    versions, remedy = catalogue().versions, catalogue().remedies[remedy_name]
    numbers = {"C": threshold, "low": 1 / threshold}
    numbers |= {"exp": math.exp(min(threshold, 700.0)), "exp_low": math.exp(-threshold)}
    words = {key: f"{number:.10g}" for key, number in numbers.items()}
    words |= {key: str(value) for key, value in remedy.tries.get(threshold, {}).items()}
    found = [
        Configured(name, versions[name], lines.text.strip().format(**words), lines.source)
        for name, lines in sorted(remedy.lines.items(), key=lambda item: item[0] != framework)
    ]
    given = dict(remedy.settings())[threshold]
    block = (given.whole() if isinstance(given, Kinds) else type(given)).__name__.lower()
    own = yaml.safe_dump({block: given.model_dump(exclude_defaults=True)}, default_flow_style=True, width=1000)
    own = own.strip()[1:-1]
    if preset := preset_of(given, framework.lower()):
        known = presets()[preset]
        limit = (known.clip or known.correction).get("log_ratio_limit")
        clamped = f", with log-ratios clamped to {limit:g} nats" if limit else ""
        own = f"correction: {{preset: {preset}}}\n# the same: {own}{clamped}"
    return (*found, Configured("tailrl", "", own, "config/arm.py"))


@dataclass(frozen=True, slots=True)
class Replayed:
    """A remedy at a threshold, on the tokens of a log.

    Attributes:
        name: the remedy's key in `replay.yaml`; threshold: its setting (of DVP ρ); inf: it has none.
        kept_tokens, kept_responses: shares that keep a weight above 0.
        ess: effective sample size of the tokens' weights, (Σw)² / (T Σw²): a share of the tokens, 0 weights included.
        largest: the largest weight; inf: it overflows float64.
        cosine: between the gradients in log-prob space with and without the remedy, Σ w_t A_t e_t and Σ A_t e_t; NaN
            without advantages or rewards.
        dropped_prob: mean π_train of the dropped tokens; NaN if none is dropped.
        kept_k3: nats, mean k3 over the kept tokens: what the remedy does not remove, but may weigh.
        note: a limit of these numbers, in words.
    """

    name: str
    threshold: float
    kept_tokens: float
    kept_responses: float
    ess: float
    largest: float
    cosine: float
    dropped_prob: float = math.nan
    kept_k3: float = math.nan
    note: str = ""


@dataclass(frozen=True, slots=True)
class PartSums:
    """What the sums of every setting need of a part.

    Attributes:
        k3_T, prob_T: of the trainer against the sampler, and of the trainer.
        sequence_T, first_T: each token's response; whether it is the first of it.
        values: for each of BASES that some token has: a², a and 1, each 0 where there is none, [3, T].
    """

    k3_T: FloatArray
    prob_T: FloatArray
    sequence_T: IntArray
    first_T: np.ndarray
    values: dict[str, FloatArray]

    @classmethod
    def of(cls, tokens: Log) -> "PartSums":
        """What is known of a part's `sound_tokens` before any setting."""
        delta_T = tokens.recomputed_T - tokens.sampler_T
        given = {"advantage": tokens.advantage_T, "reward": tokens.reward_S[tokens.sequence_T]}
        values = {
            name: np.stack([np.nan_to_num(a_T) ** 2, np.nan_to_num(a_T), ~np.isnan(a_T)]).astype(np.float64)
            for name, a_T in given.items()
            if not np.isnan(a_T).all()
        }
        first_T = np.diff(tokens.sequence_T, prepend=-1) != 0
        return cls(k3(delta_T), np.exp(tokens.recomputed_T), tokens.sequence_T, first_T, values)


def weight_sums(weight_T: FloatArray, known: PartSums) -> dict[str, float]:
    """The sums that a row of the table needs, of one setting's weights on a part."""
    kept_T = weight_T > 0
    with np.errstate(over="ignore"):  # an effective sample size of 0 then, and no cosine
        squared_T = weight_T**2
    found: dict[str, float] = {
        "tokens": len(weight_T),
        "responses": int(np.count_nonzero(np.bincount(known.sequence_T[kept_T]))),
        "kept": int(np.count_nonzero(kept_T)),
        "weight": weight_T.sum(),
        "squared": squared_T.sum(),
        "largest": weight_T.max(),
        "k3": known.k3_T[kept_T].sum(),
        "prob": known.prob_T[kept_T].sum(),
    }
    for name, value_3T in known.values.items():
        found[f"{name}_total"] = float(value_3T[1] @ known.first_T)
        found[f"{name}_responses"] = float(value_3T[2] @ known.first_T)
        for kind, by_T in (("weight", weight_T), ("squared", squared_T)):
            summed_3 = value_3T @ by_T if np.isfinite(by_T).all() else _times(value_3T, by_T).sum(1)
            found |= dict(zip((f"{name}_{kind}_{power}" for power in ("aa", "a", "1")), summed_3, strict=True))
    return {name: float(value) for name, value in found.items()}


def _times(value_3T: FloatArray, weight_T: FloatArray) -> FloatArray:
    """Values times weights, where a zero wins over an infinity: a token without an advantage adds nothing."""
    with np.errstate(invalid="ignore"):
        return np.where(value_3T == 0, 0.0, value_3T * weight_T)


def add_sums(sums: dict[str, float], more: dict[str, float]) -> None:
    """Adds a part's sums; of the largest weight it keeps the larger."""
    for name, value in more.items():
        sums[name] = max(value, sums.get(name, value)) if name == "largest" else sums.get(name, 0.0) + value


class Replay:
    """Adds up what each remedy does to the parts of a log.

    Where the log has the trainer's log-probs from the update's begin (`recomputed`), Δ is of these, and a remedy may
    judge how far the trainer moved since. Without advantages, a response's reward minus the mean reward stands for
    them.
    """

    def __init__(self) -> None:
        self._tries = [(name, *tried) for name, remedy in catalogue().remedies.items() for tried in remedy.settings()]
        self._sums = [dict[str, float]() for _ in self._tries]
        self._whole: dict[str, float] = {}
        self._judged: dict[str, float] = {}
        self._top_unknown = False

    @np.errstate(over="ignore", invalid="ignore")  # where a square overflows, nothing is left of the sample
    def add(self, log: Log) -> None:
        """Adds a part of a log."""
        tokens = sound_tokens(log)
        if not len(tokens.trainer_T):
            return
        unknown_T = np.isnan(tokens.trainer_top_T) | np.isnan(tokens.sampler_top_T)
        self._top_unknown = self._top_unknown or bool(unknown_T.any())
        known_T = ~np.isnan(tokens.advantage_T)
        judged = tokens if known_T.all() else part_of(tokens, known_T)
        for of, signed, whole in ((tokens, False, self._whole), (judged, True, self._judged)):
            if not len(of.trainer_T):
                continue
            known = PartSums.of(of)
            add_sums(whole, weight_sums(np.ones(len(of.trainer_T)), known))
            for sums, (_, _, settings) in zip(self._sums, self._tries, strict=True):
                if by_advantage(settings) == signed:
                    found = token_weights(of, settings)
                    add_sums(sums, {"overflow": 1.0} if found is None else weight_sums(found.weight_T, known))
                    if found is not None and found.ratio_X is not None:
                        add_sums(sums, {"ratio": float(found.ratio_X.sum()), "ratios": len(found.ratio_X)})

    def table(self) -> tuple[Replayed, ...]:
        """Each remedy at each threshold; empty without a sound token."""
        if not self._whole:
            return ()
        return tuple(
            self._row(name, threshold, settings, sums)
            for (name, threshold, settings), sums in zip(self._tries, self._sums, strict=True)
        )

    def _row(self, name: str, threshold: float, settings: ReplaySettings, sums: dict[str, float]) -> Replayed:
        if not sums:
            return Replayed(name, threshold, math.nan, math.nan, math.nan, math.nan, math.nan, note=NEEDS_ADVANTAGES)
        if "overflow" in sums:
            return Replayed(name, threshold, math.nan, math.nan, 0.0, math.inf, math.nan)
        whole = self._judged if by_advantage(settings) else self._whole
        share, dropped = whole["tokens"] / self._whole["tokens"], whole["tokens"] - sums["kept"]
        note = PARTLY_JUDGED.format(share=share) if share < 1 else ""
        if isinstance(settings, Vocabulary) and self._top_unknown:
            note = P_TOP_UNKNOWN
        return Replayed(
            name=name,
            threshold=threshold,
            kept_tokens=sums["kept"] / whole["tokens"],
            kept_responses=sums["responses"] / whole["responses"],
            ess=_share(sums["weight"], sums["squared"], whole["tokens"]),
            largest=sums["largest"] / (sums["ratio"] / sums["ratios"] if sums.get("ratio") else 1.0),
            cosine=_cosine(sums, whole),
            dropped_prob=(whole["prob"] - sums["prob"]) / dropped if dropped else math.nan,
            kept_k3=sums["k3"] / sums["kept"] if sums["kept"] else math.nan,
            note=note,
        )


def _cosine(sums: dict[str, float], whole: dict[str, float]) -> float:
    """By advantages, or else by rewards minus their mean over responses.

    With a value a, A = a − m: the sums of w A², w² A² and A² follow from those of a² and a.
    """
    basis = next((name for name in BASES if whole.get(f"{name}_responses")), None)
    if basis is None:
        return math.nan
    mean = whole[f"{basis}_total"] / whole[f"{basis}_responses"] if basis == "reward" else 0.0

    def about(of: dict[str, float], kind: str) -> float:
        names = (f"{basis}_{kind}_{power}" for power in ("aa", "a", "1"))
        aa, a, one = (of[name] for name in names)
        return aa - 2 * mean * a + mean**2 * one

    both = about(sums, "squared") * about(whole, "weight")
    return about(sums, "weight") / math.sqrt(both) if both > 0 and math.isfinite(both) else math.nan


def _share(weight: float, squared: float, count: float) -> float:
    """Effective sample size as a share; a square that overflows leaves none."""
    return weight / math.sqrt(squared) * (weight / math.sqrt(squared)) / count if squared > 0 else 0.0
