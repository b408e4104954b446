"""A step's numbers from its logged tokens: parts of a step add up, in memory that does not grow with its tokens."""

import hashlib
import math
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.lags import AHEAD_ROW, UNKNOWN_ROW, Sizes, lag_rows
from tailrl.diagnosis.log import IntArray, Log, sound, spans
from tailrl.watch.alarms import Step, median

SURE, GAP = math.log(0.5), 2.0
"""Nats: a confident disagreement is a token above SURE on one side and lower by more than GAP on the other."""

LEAST_REST = 1e-3  # 1 − p of tokens that the level is of: surer ones differ by rounding of the log-probs themselves
FEWEST_UNSURE = 20  # tokens that a level needs
CERTAIN = -1e-3  # nats: log-probs above are equal on both sides for many reasons
RATIO_ENDS = (math.log(0.8), math.log(1.2))  # nats: PPO's usual clip
LEAST_NATS = 0.5  # of a response whose repetition says something
LEAST_SHARE = 0.1  # of a step's tokens, that a lag needs for the step's level to be of it


MOST_ALIKE = 0.75  # of the prompts: rounding may part some responses that were drawn with the same numbers


@dataclass
class Floor:
    """Sums over the tokens of one lag: of ℓ, of |ℓ| / (1 − p), and counts."""

    sizes: Sizes = field(default_factory=Sizes)
    scaled: Sizes = field(default_factory=Sizes)
    confident: int = 0

    def add(self, trainer_T: FloatArray, sampler_T: FloatArray) -> None:
        """Adds tokens with two log-probs, nats."""
        delta_T = trainer_T - sampler_T
        rest_T = -np.expm1((trainer_T + sampler_T) / 2)
        unsure_T = rest_T > LEAST_REST
        self.sizes.add_tokens(delta_T)
        self.scaled.add_tokens(delta_T[unsure_T] / rest_T[unsure_T])
        self.confident += int(((np.maximum(trainer_T, sampler_T) >= SURE) & (np.abs(delta_T) > GAP)).sum())


@dataclass
class Group:
    """The responses to one prompt: sums of rewards, advantages, their squares and products; digests with nats."""

    count: int = 0
    reward: float = 0.0
    advantage: float = 0.0
    reward_squared: float = 0.0
    advantage_squared: float = 0.0
    product: float = 0.0
    texts: Counter[int] = field(default_factory=Counter)
    nats: float = 0.0

    def add(self, reward: float, advantage: float, text: int, nats: float) -> None:
        """Adds a response."""
        self.count += 1
        self.texts[text] += 1
        self.nats = nats
        if math.isfinite(reward) and math.isfinite(advantage):
            self.reward += reward
            self.advantage += advantage
            self.reward_squared += reward**2
            self.advantage_squared += advantage**2
            self.product += reward * advantage

    @property
    def slope(self) -> float:
        """How advantages rise with rewards: least squares; NaN where rewards are all equal."""
        spread = self.reward_squared - self.reward**2 / self.count
        return (self.product - self.reward * self.advantage / self.count) / spread if spread > 1e-9 else math.nan

    @property
    def correlation(self) -> float:
        """Of advantages with rewards; NaN where one of them does not vary."""
        spread = self.advantage_squared - self.advantage**2 / self.count if self.count else 0.0
        reward = self.reward_squared - self.reward**2 / self.count if self.count else 0.0
        return self.slope * math.sqrt(reward / spread) if spread > 1e-12 and reward > 1e-9 else math.nan


@dataclass
class TokenTable:
    """What is kept of a step's responses; its parts are added as they come.

    Attributes:
        floors: the sums of each lag's tokens, by the row's number as in `diagnosis.lags`.
        responses, logged: how many, and their tokens, with log-probs or without.
        k3, outside, unsure, equal: Σk3, and numbers of tokens as in `Step`.
        version: the newest one; versions: responses with one, and with a step.
        ahead, ahead_by: responses with a version after their step, and by how much at most.
        groups: the responses to each prompt by its digest; all in one where prompts are not logged.
        reward, rewarded: their sum, and how many responses have one.
        replies: see `Step`. digest: of the sampler's weights, where the log has one.
    """

    floors: dict[int, Floor] = field(default_factory=lambda: defaultdict(Floor))
    responses: int = 0
    logged: int = 0
    k3: float = 0.0
    outside: int = 0
    unsure: int = 0
    equal: int = 0
    version: float = math.nan
    ahead: int = 0
    ahead_by: float = 0.0
    versions: int = 0
    digest: str = ""
    reward: float = 0.0
    rewarded: int = 0
    groups: dict[int, Group] = field(default_factory=lambda: defaultdict(Group))
    replies: set[int] = field(default_factory=set)

    @np.errstate(over="ignore", invalid="ignore")
    def add(self, log: Log, prompt_S: IntArray | None = None) -> None:
        """Adds a part of the step's log; `prompt_S`: each response's prompt as a digest, or 0 where it is not known."""
        sound_T = sound(log)
        self.logged += len(sound_T)
        trainer_T, sampler_T = np.minimum(log.trainer_T[sound_T], 0.0), np.minimum(log.sampler_T[sound_T], 0.0)
        lag_S = log.step_S - log.version_S
        row_T = lag_rows(lag_S)[log.sequence_T[sound_T]]
        for row in np.unique(row_T).tolist():
            self.floors[row].add(trainer_T[row_T == row], sampler_T[row_T == row])
        delta_T = trainer_T - sampler_T
        unsure_T = np.maximum(trainer_T, sampler_T) < CERTAIN
        self.k3 += float((np.expm1(delta_T) - delta_T).sum())
        self.outside += int(((delta_T < RATIO_ENDS[0]) | (delta_T > RATIO_ENDS[1])).sum())
        self.unsure += int(unsure_T.sum())
        self.equal += int((unsure_T & (trainer_T == sampler_T)).sum())
        self._versions(log, lag_S)
        self._responses(log, np.zeros(len(log.start_S), np.int64) if prompt_S is None else prompt_S)

    def _versions(self, log: Log, lag_S: FloatArray) -> None:
        known_S = np.isfinite(log.version_S)
        if known_S.any():
            self.version = float(np.nanmax([self.version, log.version_S[known_S].max()]))
        self.versions += int(np.isfinite(lag_S).sum())
        ahead_S = lag_S < 0
        self.ahead += int(ahead_S.sum())
        self.ahead_by = max(self.ahead_by, float(-lag_S[ahead_S].min()) if ahead_S.any() else 0.0)

    def _responses(self, log: Log, prompt_S: IntArray) -> None:
        self.responses += len(log.start_S)
        self.reward += float(np.nansum(log.reward_S))
        self.rewarded += int(np.isfinite(log.reward_S).sum())
        for number, (span, reply) in enumerate(zip(spans(log), reply_digests(log), strict=True)):
            token_T, sampler_T = log.token_T[span], log.sampler_T[span]
            nats = -float(np.nansum(sampler_T))
            text = digest(token_T.tobytes() if (token_T >= 0).all() else sampler_T.tobytes())
            advantage_T = log.advantage_T[span]
            advantage = (
                float(advantage_T[np.isfinite(advantage_T)].mean()) if np.isfinite(advantage_T).any() else math.nan
            )
            self.groups[int(prompt_S[number])].add(float(log.reward_S[number]), advantage, text, nats)
            if nats >= LEAST_NATS:
                self.replies.add(reply)

    def as_step(self, number: float) -> Step:
        """The step's numbers."""
        row, floor = self._floor()
        tokens = sum(one.sizes.tokens for one in self.floors.values())
        every = Sizes()
        for one in self.floors.values():
            every.merge(one.sizes)
        scaled = floor.scaled
        known = {prompt: group for prompt, group in self.groups.items() if prompt}
        groups = [group for group in known.values() if group.count > 1]
        alike = [group for group in groups if len(group.texts) == 1]
        whole = self.groups.get(0, Group())
        return Step(
            number=number,
            tokens=tokens,
            responses=self.responses,
            lag=float(row) if row >= 0 else math.nan,
            floor_tokens=floor.sizes.tokens,
            level=scaled.quantile(0.5) if scaled.tokens >= FEWEST_UNSURE else math.nan,
            level_tokens=scaled.tokens,
            mean_abs=every.mean_abs,
            k3=self.k3 / tokens if tokens else math.nan,
            tail=float(floor.sizes.beyond[1]),
            confident=floor.confident,
            unsound=1 - tokens / self.logged if self.logged else math.nan,
            outside=self.outside / tokens if tokens else math.nan,
            ess=every.ess,
            unsure=self.unsure,
            equal=self.equal,
            version=self.version,
            ahead=self.ahead if self.versions else math.nan,
            ahead_by=self.ahead_by,
            digest=self.digest,
            reward=self.reward / self.rewarded if self.rewarded else math.nan,
            slope=median([group.slope for group in groups if math.isfinite(group.slope)]),
            shift=_shift(groups),
            correlation=whole.correlation if not known else math.nan,
            alike_prompts=len(alike) if len(alike) >= MOST_ALIKE * len(groups) else 0,
            alike_nats=math.fsum(group.nats * (group.count - 1) for group in alike),
            prompts=frozenset(known),
            replies=frozenset(self.replies),
        )

    def _floor(self) -> tuple[int, Floor]:
        """The least lag with LEAST_SHARE of the tokens, and its sums; else all that there is of unknown lag."""
        total = sum(floor.sizes.tokens for floor in self.floors.values())
        many = {row: floor for row, floor in self.floors.items() if floor.sizes.tokens >= LEAST_SHARE * total}
        known = sorted(row for row in many if row >= 0)
        row = known[0] if known else UNKNOWN_ROW if UNKNOWN_ROW in many else AHEAD_ROW
        return row, many.get(row, Floor())


def _shift(groups: list[Group]) -> float:
    """|mean| by the root mean square of the advantages of prompts whose rewards vary."""
    chosen = [group for group in groups if math.isfinite(group.slope) and group.advantage_squared > 0]
    if not chosen:
        return math.nan
    count = sum(group.count for group in chosen)
    size = math.sqrt(math.fsum(group.advantage_squared for group in chosen) / count)
    return abs(math.fsum(group.advantage for group in chosen)) / count / size


def reply_digests(log: Log) -> list[int]:
    """A digest of each sequence: of its tokens, and of the sampler's log-probs as float32."""
    sampler_T = log.sampler_T.astype(np.float32)
    return [digest(log.token_T[span].tobytes() + sampler_T[span].tobytes()) for span in spans(log)]


def digest(content: bytes) -> int:
    """A number of 63 bits for some bytes, never 0."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big") >> 1 or 1
