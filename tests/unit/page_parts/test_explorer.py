"""The token explorer: its data, its bounds, its colours, and that hostile text stays text."""

import json
import math
import re

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.log import LOGPROB_ROUNDING
from tailrl.page_parts import TEMPLATES, explorer
from tailrl.page_parts.explorer import Response, delta, explorer_data, token_texts


def response(trainer: FloatArray | list[float], sampler: FloatArray | list[float], **others: object) -> Response:
    trainer_T, sampler_T = np.array(trainer, np.float64), np.array(sampler, np.float64)
    unknown_T = np.full(len(trainer_T), np.nan)
    columns = {f"{name}_T": unknown_T for name in ("advantage", "trainer_top", "sampler_top", "rank")}
    columns |= {f"{side}_set_T": unknown_T for side in ("trainer", "sampler")}
    given = {"token_T": np.arange(len(trainer_T)), "step": math.nan, "reward": math.nan, "text": None}
    return Response(**{"sampler_T": sampler_T, "trainer_T": trainer_T, **columns, **given, **others})  # type: ignore[arg-type]


def test_delta_needs_two_log_probs() -> None:
    nan, inf = math.nan, math.inf
    trainer = np.array([-1.0, nan, -inf, 0.1, -1.0, 5e-6])
    sampler = np.array([-1.5, -1.0, -1.0, -1.0, nan, -1.0])
    assert delta(sampler, trainer).tolist() == pytest.approx([0.5, nan, nan, nan, nan, 1.0], nan_ok=True)
    assert explorer.ABOVE_ZERO == LOGPROB_ROUNDING, "the page and the explorer leave out the same tokens"


def test_only_logged_columns_travel() -> None:
    (data,) = explorer_data([response([-1, math.nan], [-math.inf, -2], rank_T=np.array([0.0, 3.0]), step=4.0)])
    assert (data["trainer"], data["sampler"], data["rank"]) == ([-1.0, "NaN"], ["-Infinity", -2.0], [0.0, 3.0])
    assert not data.keys() & {"advantage", "trainer_top", "sampler_top"}
    assert data["title"] == "1. 2 tokens, no log-probs, step 4"
    json.dumps(data, allow_nan=False)


def test_a_long_response_is_cut_around_its_largest_mismatch() -> None:
    size_T = np.zeros(7000)
    size_T[[10, 4000]] = -0.5, 3.0
    (data,) = explorer_data([response(size_T - 5, np.full(7000, -5.0))])
    assert (data["begin"], data["length"], len(data["token"])) == (3000, 7000, explorer.TOKENS_OF_A_RESPONSE)
    assert (data["rest"], data["least"]) == (-0.5, -0.5), "what is left out counts for weights of the whole response"
    (late,) = explorer_data([response(np.append(np.full(6999, -5.0), np.nan), np.full(7000, -5.0))])
    assert late["begin"] == 5000, "a token without log-probs is shown first"


def test_a_page_is_bounded() -> None:
    one = response(np.full(1900, -1.0), np.full(1900, -1.1), texts=("x" * 5000,) * 1900, text="y" * 10**6)
    data = explorer_data([one] * 50)
    assert sum(len(shown["token"]) for shown in data) <= explorer.TOKENS_OF_A_PAGE and len(data) == 10
    assert len(json.dumps(data)) < 10_000_000
    assert explorer_data([response([], [])]) == []


def test_texts_join_to_the_whole() -> None:
    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate([*sorted(letters), "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokens = [vocabulary["a"], vocabulary["Ġthe"], vocabulary["Ġ"], vocabulary["b"]]
    assert token_texts(tokenizer, tokens) == ("a", " the", " ", "b")
    assert "�" in "".join(token_texts(tokenizer, tokenizer.encode("é").ids)), "a part of a letter is marked"


# --- colours ---------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(first: str, second: str) -> float:
    dark, light = sorted([luminance(first), luminance(second)])
    return (light + 0.05) / (dark + 0.05)


def test_tokens_are_legible_on_each_colour_and_in_both_schemes() -> None:
    page, css = ((TEMPLATES / name).read_text(encoding="utf-8") for name in ("page.css", "explorer.css"))
    for scheme in (0, 1):
        ink, soft, paper = (re.findall(rf"--{name}: (#\w+)", page)[scheme] for name in ("ink", "soft", "page"))
        ink, paper = (
            colour if len(colour) == 7 else "#" + "".join(c * 2 for c in colour[1:]) for colour in (ink, paper)
        )
        tints = {
            name: re.findall(rf"--{name}: (#\w+)", css)[scheme]
            for name in ["b1", "b2", "b3", "b4", "o1", "o2", "o3", "o4", "out", "out-ink"]
        }
        for name in ["b1", "b2", "b3", "b4", "o1", "o2", "o3", "o4"]:
            assert contrast(ink, tints[name]) >= 4.5, (scheme, name)
        assert contrast(tints["out"], tints["out-ink"]) >= 4.5 and contrast(soft, paper) >= 4.5
        for side in "bo":
            ramp = [contrast(paper, tints[f"{side}{n}"]) for n in (1, 2, 3, 4)]
            assert ramp == sorted(ramp), "a larger number is further from the page"
