"""The responses with the largest mismatch that each arm's runs kept, for the token explorer of a study's page."""

from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import numpy as np

from tailrl.artifacts.results import Results, TrainedRun
from tailrl.artifacts.tokens import read_token_arrays
from tailrl.page_parts.explorer import Response, mean_mismatch, read_tokenizer, with_texts

MOST_OF_AN_ARM = 3
"""Responses of an arm, over all its seeds and kept steps."""

READ = ("step", "sequence", "token", "logp_train", "logp_infer", "advantage", "reward")


def worst_responses(results: Results, folder: Path) -> tuple[Response, ...]:
    """The worst response of each arm, then the second, and so on; unmasked log-probs.

    Args:
        results: the study's runs.
        folder: its results folder. The base policy's tokenizer, if it is there, gives the tokens' texts.

    Raises:
        StudyError: a run's tokens.npz or the tokenizer cannot be read.
    """
    arms = [_worst_of_an_arm(results.runs[arm], folder) for arm in results.arms]
    found = tuple(one for one in chain.from_iterable(zip_longest(*arms)) if one is not None)
    path = folder / "base" / "tokenizer.json"
    return with_texts(found, read_tokenizer(path)) if path.is_file() else found


def _worst_of_an_arm(runs: tuple[TrainedRun, ...], folder: Path) -> list[Response]:
    ranked: list[tuple[float, Response]] = []
    for run in runs:
        job = folder / "train" / run.arm / f"seed{run.seed}"
        arrays = read_token_arrays(job, READ)
        keys_T = (arrays["step"].astype(np.int64) << 32) + arrays["sequence"].astype(np.int64)
        _, first_S, sequence_T = np.unique(keys_T, return_index=True, return_inverse=True)
        sampler_T, trainer_T = (arrays[name].astype(np.float64) for name in ("logp_infer", "logp_train"))
        mean_S = mean_mismatch(sampler_T, trainer_T, sequence_T, len(first_S))
        for place in np.argsort(-mean_S, kind="stable")[:MOST_OF_AN_ARM].tolist():
            own = {name: values_T[sequence_T == place] for name, values_T in arrays.items()}
            ranked.append((float(mean_S[place]), _response(own, f"{run.arm}, seed {run.seed}")))
    ranked.sort(key=lambda pair: -pair[0])
    return [response for _, response in ranked[:MOST_OF_AN_ARM]]


def _response(own: dict[str, Any], name: str) -> Response:
    unknown_T = np.full(len(own["token"]), np.nan)
    return Response(
        sampler_T=own["logp_infer"].astype(np.float64),
        trainer_T=own["logp_train"].astype(np.float64),
        token_T=own["token"].astype(np.int64),
        advantage_T=own["advantage"].astype(np.float64),
        trainer_top_T=unknown_T,
        sampler_top_T=unknown_T,
        rank_T=unknown_T,
        trainer_set_T=unknown_T,
        sampler_set_T=unknown_T,
        step=float(own["step"][0]),
        reward=float(own["reward"][0]),
        text=None,
        name=name,
    )
