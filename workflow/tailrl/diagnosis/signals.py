"""What tells causes of a mismatch apart, added up over a log in one pass.

With t, s: the trainer's and the sampler's log-prob of a sampled token, nats; p, q: their probabilities; ℓ = t − s;
d = tanh(ℓ/2) = (p − q)/(p + q); x = ℓ / (1 − p̄), p̄ the geometric mean of p and q. Under noise on the logits the size
of x does not depend on p̄.

Tokens to which both sides give exactly 1 are left out: a pruned policy has sets of one token at most places, and a
median or a share over them would say nothing of the others.
"""

from dataclasses import dataclass, field

import numpy as np

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import IntArray, Log

LAGS = (-2, -1, 0, 1, 2)  # tokens by which the trainer's log-probs are moved against the sampler's
LOG_TEMPERATURES = np.round(np.arange(-1.0, 1.01, 0.1), 1)  # ln of the sampler's temperature over the trainer's: a grid
REST_TOKENS = (1, 16, 64)
"""Other tokens that share the rest of the probability, in fits of a temperature: from peaked to flat states."""

SIZE_EDGES = np.concatenate([[-np.inf], np.linspace(-9, 2, 111), [np.inf]])
"""Of log10 |x|: a histogram, which gives quantiles to a quarter of their size."""

LEAST_REST = 1e-4  # 1 − p̄ is taken for no less: below, float32 has few digits of it
HEAD, RARE = -0.05, -3.0  # nats: a token above HEAD is certain, one below RARE is rare
IMPROBABLE = -2.5
"""Nats: a token that one side is certain of and the other finds less probable than this has no log-prob of the one."""

LEVEL_WIDTH, LEVELS, NEAR_LEVELS = 0.05, 1200, 10
"""Bins of −log-prob, nats: their width, their number, and how many are near the last."""

PATTERNS = {"odds": 18, "token": 4096, "place": 64, "pair": 4096}
"""Groups of tokens, by their log-odds of p̄ (a nat wide), by their id (several share a group), by their place in the
response (the last one holds all later ones), by their id and the id before it."""

PAIR_FACTOR = 1031  # of the id before a token, in its number of a pair: a prime, so that pairs spread over the groups
EARLY, LATE = 4, 16  # tokens at a response's beginning; the place where its later part begins
SHORTEST = 8  # tokens of a response that is asked for the place where its mismatch changes
DEEPEST = 15.0  # nats: −log-probs of tokens that only one side is certain of are cut there


LOGIT_EDGE = 16.0  # log-odds are cut there


def log_odds(logp_T: FloatArray) -> FloatArray:
    """log(p / (1 − p)) from log p, within ±LOGIT_EDGE: noise on logits has the same size everywhere on this axis."""
    with np.errstate(divide="ignore"):
        found: FloatArray = np.clip(logp_T - np.log(-np.expm1(logp_T)), -LOGIT_EDGE, LOGIT_EDGE)
    return found


@dataclass
class Signals:
    """Sums over the sound tokens of a log.

    Attributes:
        sums: named sums over tokens.
        lag_sums: for each of LAGS: tokens compared and Σ|ℓ| after the move; shifted, compared: numbers of sequences in
            which another lag fits at least four times better, and of those with 4 tokens or more.
        temperature: (2, REST_TOKENS, grid): Σ ℓ g and Σ g² of the ℓ that each ratio of temperatures would give.
        sizes: counts of SIZE_EDGES.
        levels: for either side the tokens by −log-prob, in bins of LEVEL_WIDTH.
        edges: the least and largest ℓ.
        patterns: for each of PATTERNS, (2, groups): tokens, and Σx cut to 3 nats.
        lowest: for either side, its least log-prob and the tokens with exactly that; lowest_places: their different
            pairs of place and token id, for a response that was sampled several times repeats its least log-prob.
        zeros: for either side, tokens that are left out: see `_filled`.
        per_sequence: rows of (tokens, Σd, Σd², Σℓ, reward or advantage, version, step, fall), one array a part. fall:
            see `_falls`.
        floors: rows of (Σℓ², Σ of the squared noise floor) over tokens that the trainer scored twice, one array a part.
        vocabulary: the largest token id plus one.
    """

    sums: dict[str, float] = field(default_factory=dict)
    lag_sums: FloatArray = field(default_factory=lambda: np.zeros((2, len(LAGS))))
    shifted: FloatArray = field(default_factory=lambda: np.zeros(len(LAGS)))
    compared: int = 0
    temperature: FloatArray = field(default_factory=lambda: np.zeros((2, len(REST_TOKENS), len(LOG_TEMPERATURES))))
    sizes: FloatArray = field(default_factory=lambda: np.zeros(len(SIZE_EDGES) - 1))
    lowest: dict[str, tuple[float, int]] = field(default_factory=dict)
    lowest_places: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    levels: dict[str, IntArray] = field(default_factory=dict)
    edges: tuple[float, float] = (np.inf, -np.inf)
    patterns: dict[str, FloatArray] = field(default_factory=lambda: {k: np.zeros((2, n)) for k, n in PATTERNS.items()})
    zeros: dict[str, int] = field(default_factory=lambda: {"sampler": 0, "trainer": 0})
    per_sequence: list[FloatArray] = field(default_factory=list)
    floors: list[FloatArray] = field(default_factory=list)
    vocabulary: int = 0

    def add(self, log: Log, sound_T: np.ndarray) -> None:
        """Adds a part of a log; `sound_T`: which tokens have two log-probs."""
        sound_T = sound_T & ~self._filled(log, sound_T) & ~((log.trainer_T == 0) & (log.sampler_T == 0))
        trainer_T, sampler_T = np.minimum(log.trainer_T[sound_T], 0.0), np.minimum(log.sampler_T[sound_T], 0.0)
        sequence_T, position_T = log.sequence_T[sound_T], log.position_T[sound_T]
        if not len(trainer_T):
            return
        last_T = np.concatenate([np.diff(sequence_T) != 0, [True]])
        self._lags(trainer_T, sampler_T, sequence_T, len(log.start_S))
        for name, own_T in (("sampler", sampler_T), ("trainer", trainer_T)):
            self._least(name, own_T, position_T, log.token_T[sound_T])
        self.vocabulary = max(self.vocabulary, int(log.token_T.max()) + 1)
        self._sums(log, sound_T, trainer_T, sampler_T)
        delta_T = trainer_T - sampler_T
        d_T = np.tanh(delta_T / 2)
        x_T = delta_T / np.maximum(-np.expm1((trainer_T + sampler_T) / 2), LEAST_REST)
        self.edges = min(self.edges[0], float(delta_T.min())), max(self.edges[1], float(delta_T.max()))
        self._places(x_T, position_T, last_T)
        self._patterns(x_T, (trainer_T + sampler_T) / 2, log.token_T[sound_T], sequence_T, position_T)
        size_T = np.log10(np.maximum(np.abs(x_T), 1e-12))
        self.sizes += np.histogram(size_T, SIZE_EDGES)[0]
        self._temperatures(trainer_T, sampler_T, delta_T)
        self._sequences(log, sequence_T, d_T, delta_T, size_T)
        self._floors(log, sequence_T, log.again_T[sound_T] - trainer_T, delta_T)

    def _filled(self, log: Log, sound_T: np.ndarray) -> np.ndarray:
        """Tokens in a run of exact zeros on one side, of which the other finds one improbable: no log-probs, a filling.

        A truncated sampler has such zeros too, at tokens that the trainer finds probable, and a greedy one at all
        tokens of a sequence.
        """
        filled_T = np.zeros(len(sound_T), bool)
        starts_T = np.concatenate([[True], np.diff(log.sequence_T) != 0])
        for name, own_T, other_T in (
            ("sampler", log.sampler_T, log.trainer_T),
            ("trainer", log.trainer_T, log.sampler_T),
        ):
            zero_T = sound_T & (own_T == 0)
            run_T = np.cumsum(starts_T | np.concatenate([[True], zero_T[1:] != zero_T[:-1]])) - 1
            deep_R = np.bincount(run_T[zero_T & (other_T < IMPROBABLE)], minlength=run_T[-1] + 1) > 0
            if name == "sampler":
                begins, ends = np.flatnonzero(starts_T), np.flatnonzero(np.append(starts_T[1:], True))
                deep_R[run_T[begins][run_T[begins] == run_T[ends]]] = False
            found_T = zero_T & deep_R[run_T]
            self.zeros[name] += int(found_T.sum())
            filled_T |= found_T
        return filled_T

    def _count(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value)

    def _lags(self, trainer_T: FloatArray, sampler_T: FloatArray, sequence_T: IntArray, count: int) -> None:
        """How well the trainer's numbers, moved by each lag, fit the sampler's."""
        fit_LS, tokens_LS = np.zeros((2, len(LAGS), count))
        for i, lag in enumerate(LAGS):
            first, second = slice(max(0, -lag), len(trainer_T) - max(0, lag)), slice(max(0, lag), None)
            own_T, other_T = sampler_T[first], trainer_T[second][: len(sampler_T[first])]
            same_T = sequence_T[first] == sequence_T[second][: len(own_T)]
            size_T = np.abs(own_T - other_T)[same_T]
            fit_LS[i] = np.bincount(sequence_T[first][same_T], size_T, count)
            tokens_LS[i] = np.bincount(sequence_T[first][same_T], minlength=count)
            self.lag_sums[:, i] += tokens_LS[i].sum(), fit_LS[i].sum()
        long_S = tokens_LS.min(0) >= EARLY
        mean_LS = fit_LS[:, long_S] / tokens_LS[:, long_S]
        better_LS = mean_LS * 4 < mean_LS[LAGS.index(0)]
        best_S = mean_LS.argmin(0)
        self.compared += int(long_S.sum())
        self.shifted += np.bincount(best_S[better_LS.any(0)], minlength=len(LAGS))

    def _least(self, name: str, own_T: FloatArray, position_T: IntArray, token_T: IntArray) -> None:
        low, same = self.lowest.get(name, (np.inf, 0))
        least = min(low, float(own_T.min()))
        self.lowest[name] = least, (same if least == low else 0) + int((own_T == least).sum())
        places = self.lowest_places.get(name, set()) if least == low else set()
        lowest_T = own_T == least
        pairs = zip(position_T[lowest_T].tolist(), token_T[lowest_T].tolist(), strict=True)
        self.lowest_places[name] = places | set(pairs)
        place_T = np.minimum(-own_T / LEVEL_WIDTH, LEVELS - 1).astype(np.int64)
        found = np.bincount(place_T, minlength=LEVELS)
        self.levels[name] = self.levels.get(name, 0) + found

    def least(self, side: str) -> tuple[float, int, int]:
        """A side's least log-prob, the tokens with exactly that, and those within about half a nat above it."""
        low, same = self.lowest.get(side, (0.0, 0))
        place = int(min(-low / LEVEL_WIDTH, LEVELS - 1))
        near = self.levels[side][max(0, place - NEAR_LEVELS) : place + 1].sum() if side in self.levels else 0
        return low, same, int(near) - same

    def cut(self, side: str) -> bool:
        """Whether many different tokens share a side's least log-prob exactly, while few come near it."""
        low, _, near = self.least(side)
        return low < -0.5 and len(self.lowest_places.get(side, ())) >= max(5.0, 0.3 * near)

    def _sums(self, log: Log, sound_T: np.ndarray, trainer_T: FloatArray, sampler_T: FloatArray) -> None:
        delta_T = trainer_T - sampler_T
        squared_T = delta_T**2
        mean_T = (trainer_T + sampler_T) / 2
        head_T, rare_T = mean_T > HEAD, mean_T < RARE
        self._count(
            tokens=len(delta_T),
            size=np.abs(delta_T).sum(),
            squared=squared_T.sum(),
            positive=squared_T[delta_T > 0].sum(),
            above=(delta_T > 0).sum(),
            head=head_T.sum(),
            head_size=np.abs(delta_T)[head_T].sum(),
            head_signed=delta_T[head_T].sum(),
            head_rest=-np.expm1(mean_T[head_T]).sum(),
            rare=rare_T.sum(),
            rare_size=np.abs(delta_T)[rare_T].sum(),
            rare_signed=delta_T[rare_T].sum(),
            sure_and_not=((sampler_T > HEAD) & (trainer_T < RARE)).sum(),
            depth=np.minimum(-trainer_T, DEEPEST)[(sampler_T > HEAD) & (trainer_T < RARE)].sum(),
            impossible=((trainer_T < -12) & (sampler_T > trainer_T + 2)).sum(),
            entropy=-sampler_T.sum(),
        )
        for name, chosen_T in (("seen", log.seen_T[sound_T] == 1), ("new", log.seen_T[sound_T] == 0)):
            own_T = delta_T[chosen_T]
            self._count(**{f"{name}_sided": (own_T != 0).sum(), f"{name}_above": (own_T > 0).sum()})
            self._count(**{f"{name}_size": np.abs(own_T).sum(), f"{name}_signed": own_T.sum()})
        again_T, recomputed_T = log.again_T[sound_T], log.recomputed_T[sound_T]
        both_T = np.isfinite(again_T)
        self._count(again=both_T.sum(), again_squared=((again_T - trainer_T)[both_T] ** 2).sum())
        self._count(again_paired=squared_T[both_T].sum())
        both_T = np.isfinite(recomputed_T)
        self._count(recomputed=both_T.sum())
        self._count(engine_squared=((sampler_T - recomputed_T)[both_T] ** 2).sum(), paired=squared_T[both_T].sum())
        ranked_T = np.isfinite(log.rank_T[sound_T])
        self._count(ranked=ranked_T.sum())
        if ranked_T.any():
            self.sums["rank"] = max(self.sums.get("rank", 0.0), float(log.rank_T[sound_T][ranked_T].max()))

    def _places(self, x_T: FloatArray, position_T: IntArray, last_T: np.ndarray) -> None:
        """By place in the response, and how far neighbours agree. |x| is cut, for it has a long tail."""
        size_T = np.minimum(np.abs(x_T), 3.0)
        first_T, early_T = position_T == 0, (position_T > 0) & (position_T < EARLY)
        middle_T = ~(first_T | early_T | last_T)
        places = {"first": first_T, "early": early_T, "last": last_T, "middle": middle_T}
        places["late"] = middle_T & (position_T >= LATE)
        for name, chosen_T in places.items():
            self._count(**{name: chosen_T.sum(), f"{name}_size": size_T[chosen_T].sum()})
        cut_T = np.clip(x_T, -3.0, 3.0)
        pair_T = ~last_T[:-1]
        self._count(neighbours=(cut_T[:-1] * cut_T[1:])[pair_T].sum(), cut_squared=(cut_T**2).sum())
        self._count(size_neighbours=(size_T[:-1] * size_T[1:])[pair_T].sum(), pairs=pair_T.sum(), cut_size=size_T.sum())

    def _patterns(
        self, x_T: FloatArray, mean_T: FloatArray, token_T: IntArray, sequence_T: IntArray, position_T: IntArray
    ) -> None:
        """Sums by probability, by token, by place, and by token with the one before it."""
        half = PATTERNS["odds"] // 2
        first_T = np.concatenate([[True], np.diff(sequence_T) != 0])
        before_T = np.where(first_T, -1, np.roll(token_T, 1))
        groups = {
            "odds": np.clip(np.floor(log_odds(mean_T)), -half, half - 1).astype(np.int64) + half,
            "token": token_T % PATTERNS["token"],
            "place": np.minimum(position_T, PATTERNS["place"] - 1),
            "pair": (before_T * PAIR_FACTOR + token_T) % PATTERNS["pair"],
        }
        cut_T = np.clip(x_T, -3.0, 3.0)
        for name, group_T in groups.items():
            self.patterns[name] += [np.bincount(group_T, w, PATTERNS[name]) for w in (np.ones(len(cut_T)), cut_T)]

    def _temperatures(self, trainer_T: FloatArray, sampler_T: FloatArray, delta_T: FloatArray) -> None:
        """Fits of ℓ as a ratio of temperatures gives it where REST_TOKENS equal tokens hold the rest."""
        with np.errstate(divide="ignore"):
            odds_T = sum(own - np.log(np.maximum(-np.expm1(own), 1e-8)) for own in (trainer_T, sampler_T)) / 2
        weight_T = np.minimum(1.0, 3.0 / np.maximum(np.abs(delta_T), 1e-12)) ** 2
        weighted_T = weight_T * delta_T
        for k, others in enumerate(np.log(REST_TOKENS)):
            logit_T = odds_T + others
            # log p of a token at each inverse temperature; the grid is symmetric, so each serves two ratios.
            logp = [-np.logaddexp(0, others - logit_T * np.exp(log_ratio / 2)) for log_ratio in LOG_TEMPERATURES]
            for i, (cold_T, hot_T) in enumerate(zip(logp, logp[::-1], strict=True)):
                # The sampler at the higher temperature: its logits are divided by more.
                g_T = cold_T - hot_T
                self.temperature[0, k, i] += weighted_T @ g_T
                self.temperature[1, k, i] += weight_T @ g_T**2
        squared_T = weight_T * delta_T**2
        self._count(weighted_squared=squared_T.sum(), lost=squared_T[sampler_T > HEAD].sum())

    def _sequences(
        self, log: Log, sequence_T: IntArray, d_T: FloatArray, delta_T: FloatArray, size_T: FloatArray
    ) -> None:
        count = len(log.start_S)
        first_S = np.minimum(log.start_S, len(log.advantage_T) - 1)
        advantage_S = log.advantage_T[first_S]
        gain_S = np.where(np.isfinite(advantage_S), advantage_S, log.reward_S)
        sums = [np.bincount(sequence_T, values, count) for values in (np.ones(len(d_T)), d_T, d_T**2, delta_T)]
        fall_S = _falls(sequence_T, size_T, count)
        self.per_sequence.append(np.array([*sums, gain_S, log.version_S, log.step_S, fall_S]))

    def _floors(self, log: Log, sequence_T: IntArray, again_T: FloatArray, delta_T: FloatArray) -> None:
        both_T = np.isfinite(again_T)
        squares = [np.bincount(sequence_T[both_T], own[both_T] ** 2, len(log.start_S)) for own in (delta_T, again_T)]
        self.floors.append(np.array(squares))

    def sequences(self) -> FloatArray:
        """Rows of tokens, Σd, Σd², Σℓ, gain, version, step and fall: [8, S]."""
        return np.concatenate(self.per_sequence, 1) if self.per_sequence else np.empty((8, 0))


def _falls(sequence_T: IntArray, size_T: FloatArray, count: int) -> FloatArray:
    """For each response, how much clearer log10 |x| falls at its best cut than it rises at its best one.

    NaN: it is too short.

    At each cut the difference of the two sides' means over its standard error. Independent noise falls as it rises. In
    a response that was begun with older weights it falls where they were exchanged.
    """
    found_S = np.full(count, np.nan)
    starts = np.searchsorted(sequence_T, np.arange(count + 1))
    for number in np.flatnonzero(np.diff(starts) >= SHORTEST):
        own_T = size_T[starts[number] : starts[number + 1]]
        spread = own_T.std()
        if spread:
            before_C = np.arange(2, len(own_T) - 1)
            after_C = len(own_T) - before_C
            sum_C = np.cumsum(own_T)[before_C - 1]
            step_C = sum_C / before_C - (own_T.sum() - sum_C) / after_C
            clear_C = step_C / np.sqrt(1 / before_C + 1 / after_C) / spread
            found_S[number] = clear_C.max() + clear_C.min()
    return found_S
