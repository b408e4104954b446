"""A probe on the exact engine, on a plain one, and on one that forgets the temperature."""

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from definitions import safe_tokens, softmax
from sampler_fixture import PlainSampler
from transformers import AutoModelForCausalLM, MistralConfig, PreTrainedTokenizerFast

from tailrl import cli
from tailrl.config.probe import ProbeSettings
from tailrl.diagnosis.log import pack
from tailrl.diagnosis.log_files import write_log
from tailrl.diagnosis.measure import Measured
from tailrl.diagnosis.metrics import quantity
from tailrl.diagnosis.readers import read_log
from tailrl.diagnosis.responses import Worst
from tailrl.model.policy import encode_prompt, load_tokenizer, save_policy
from tailrl.page_parts.explorer import Response
from tailrl.probes.distributions import measure
from tailrl.probes.model import probe
from tailrl.probes.model.page import diagnose_probe, probe_page
from tailrl.probes.model.probe import Probed, probe_model
from tailrl.probes.model.prompts import read_prompts
from tailrl.reports.distributions.numbers import distance
from tailrl.rollout import Decoding
from tailrl.rollout.types import Request, Rollout
from tailrl.runtime.errors import StudyError

PROMPTS = ("1+2=", "Say hello.", "12-7+5=")
TEMPERATURE = 0.7


class Forgetful(PlainSampler):
    """An engine that samples at a temperature of 1, whatever it is told."""

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        return super().generate(requests, replace(decoding, temperature=1.0))


@pytest.fixture
def prompts_file(tmp_path: Path) -> Path:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    return tmp_path / "prompts.txt"


def probed(folder: Path, prompts_file: Path, **settings: Any) -> Probed:
    given = {"samples": 7, "max_new_tokens": 8, "temperature": TEMPERATURE, **settings}
    return probe_model(str(folder), ProbeSettings.model_validate(given), prompts_file)


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: type[PlainSampler]) -> None:
    monkeypatch.setattr(measure, "make_sampler", lambda _, folder, *__: engine(folder))


def oracle(folder: Path, tokenizer: PreTrainedTokenizerFast, found: Probed) -> list[list[list[float]]]:
    """The policy's logits at each token of each response, float64: each response alone, by the library's own model."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    prompts = [encode_prompt(tokenizer, text) for text in PROMPTS]
    logits = []
    for index, row in enumerate(found.rows):
        assert row.token_T is not None
        prompt, response = prompts[index % len(prompts)], row.token_T.tolist()
        with torch.no_grad():
            whole_TV = model(input_ids=torch.tensor([[*prompt, *response[:-1]]])).logits[0]
        logits.append(whole_TV[len(prompt) - 1 :].tolist())
    return logits


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_every_column_is_that_of_a_loop_over_the_vocabulary(
    top_p: float,
    policy_folder: Path,
    tokenizer: PreTrainedTokenizerFast,
    prompts_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine forgets the temperature, so that its columns are other numbers than the trainer's."""
    with_engine(monkeypatch, Forgetful)
    found = probed(policy_folder, prompts_file, top_p=top_p)
    assert len(found.rows) == 7
    divergences, differing = [], 0
    for row, logits_TV in zip(found.rows, oracle(policy_folder, tokenizer, found), strict=True):
        assert row.token_T is not None and row.rank_T is not None
        for t, logits_V in enumerate(logits_TV):
            token = int(row.token_T[t])
            train, infer = softmax([z / TEMPERATURE for z in logits_V]), softmax(logits_V)
            kept = math.fsum(q for q, safe in zip(infer, safe_tokens(infer, "top_p", top_p), strict=True) if safe)
            expected = {
                "trainer": math.log(train[token]),
                "trainer_top": math.log(max(train)),
                "sampler": math.log(infer[token] / kept),
                "sampler_top": math.log(max(infer) / kept),
                "again": math.log(train[token]),
            }
            seen = {name: float(getattr(row, f"{name}_T")[t]) for name in expected}
            assert seen == pytest.approx(expected, abs=1e-4)
            least, most = (sum(p > train[token] * (1 + slack) for p in train) for slack in (1e-4, -1e-4))
            assert least <= row.rank_T[t] <= most
            differing += abs(expected["trainer"] - expected["sampler"]) > 0.01
            divergences.append(math.fsum(q * math.log(q / p) for p, q in zip(train, infer, strict=True)))
        assert row.text == tokenizer.decode(row.token_T.tolist())
    assert differing > len(divergences) / 2
    whole = distance(found.engine)
    assert whole.positions == len(divergences)
    assert whole.kl_infer_train.mean == pytest.approx(np.mean(divergences), rel=1e-3)
    assert distance(found.floor).kl_infer_train.mean < 1e-10


def test_a_trainer_in_bfloat16(policy_folder: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in float32 differs from it; the page says in what the trainer computes."""
    with_engine(monkeypatch, PlainSampler)
    found = {dtype: probed(policy_folder, prompts_file, trainer_dtype=dtype) for dtype in ("auto", "bfloat16")}
    k3 = {dtype: distance(one.engine).kl_infer_train.mean for dtype, one in found.items()}
    assert 0 <= k3["auto"] < 1e-9 < k3["bfloat16"] < 1e-2
    assert found["bfloat16"].engine.words.endswith("; the trainer in bfloat16")
    assert found["bfloat16"].floor.words.startswith("the trainer in bfloat16 itself, ")
    for dtype, words in (("auto", "which computes in float32, "), ("bfloat16", "which computes in bfloat16, ")):
        assert words in probe_page(found[dtype], diagnose_probe(found[dtype]))


def test_with_the_exact_engine_nothing_differs(
    policy_folder: Path, prompts_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = probed(policy_folder, prompts_file, sampler={"engine": "exact", "dtype": "float32"}, samples=12)
    log = pack(found.rows)
    assert (log.sampler_T == log.trainer_T).all() and (log.again_T == log.trainer_T).all()
    assert (log.sampler_top_T == log.trainer_top_T).all()
    for compared in (found.engine, found.floor):
        row = distance(compared)
        assert row.equal == row.positions == len(log.token_T)
    assert found.self_test == 0
    assert f"tailrl: {policy_folder}: the first prompt is '1+2='\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("window", "engine"), [(15, {"engine": "exact", "dtype": "float32"}), (15, {"engine": "transformers"}), (14, {})]
)
def test_a_window_of_attention_matters_where_it_hides_a_token(
    window: int, engine: dict[str, str], tokenizer: PreTrainedTokenizerFast, prompts_file: Path, tmp_path: Path
) -> None:
    """The longest prompt, of 7 tokens, and 8 more fit a window of 15 tokens, and not one of 14."""
    assert max(len(tokenizer.encode(text)) for text in PROMPTS) == 7
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = MistralConfig(**sizes, vocab_size=600, num_key_value_heads=1, head_dim=16, sliding_window=window)
    save_policy(AutoModelForCausalLM.from_config(config), tokenizer, tmp_path / "windowed")
    if window == 15:
        found = probed(tmp_path / "windowed", prompts_file, sampler=engine, max_new_tokens=8, samples=3)
        assert distance(found.floor).positions and found.self_test < 0.1
    else:
        with pytest.raises(
            StudyError, match=r"7 tokens of prompt and 8 of response \(--max-new-tokens\) exceed .* 14$"
        ):
            probed(tmp_path / "windowed", prompts_file, sampler=engine, max_new_tokens=8, samples=3)


def test_an_engine_of_the_librarys_own_is_within_rounding(policy_folder: Path, prompts_file: Path) -> None:
    found = probed(policy_folder, prompts_file, sampler={"engine": "transformers", "dtype": "bfloat16"})
    log = pack(found.rows)
    assert 1e-5 < np.abs(log.sampler_T - log.trainer_T).mean() < 0.05
    assert np.abs(log.again_T - log.trainer_T).max() < 1e-5


@pytest.mark.parametrize("name", ["log.jsonl", "log.parquet"])
def test_the_log_says_what_the_page_says(name: str, policy_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    found = probed(policy_folder, prompts_file, sampler={"engine": "transformers", "dtype": "bfloat16"}, samples=4)
    write_log(found.rows, tmp_path / name)
    ((title, log),) = read_log([tmp_path / name])
    own = pack(found.rows)
    for column in ("sampler", "trainer", "again", "trainer_top", "sampler_top", "rank", "token"):
        np.testing.assert_array_equal(getattr(log, f"{column}_T"), getattr(own, f"{column}_T"), err_msg=column)
    assert log.text_S == own.text_S
    measured = Measured()
    measured.add(title, log)
    assert quantity(measured, "k3") == quantity(diagnose_probe(found).measured, "k3")


def test_the_page(policy_folder: Path, prompts_file: Path) -> None:
    found = probed(policy_folder, prompts_file, sampler={"engine": "exact", "dtype": "float32"}, samples=1)
    page = probe_page(found, diagnose_probe(found))
    assert f"<h1>Probe of {found.model}</h1>" in page and "tailrl probe: 1 response." in page
    whole = page.partition("<h2>Whole distributions</h2>")[2].partition("<h2")[0]
    assert "<td>noise floor</td>\n<td>0</td>\n<td>0</td>\n<td>0</td>" in whole and "<td>0.34/V</td>" in whole
    assert "nan" not in whole


def test_each_response_has_the_texts_of_its_tokens(
    policy_folder: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = probed(policy_folder, prompts_file, sampler={"engine": "exact", "dtype": "float32"}, samples=2)
    log = pack(found.rows[:1])
    columns = {name: getattr(log, name) for name in Response.__slots__ if name.endswith("_T")}
    worst = Response(**columns, step=math.nan, reward=math.nan, text=log.text_S[0])
    monkeypatch.setattr(Worst, "responses", lambda _: (worst,))
    (shown,) = diagnose_probe(found).responses
    assert "".join(shown.texts) == found.rows[0].text


def test_a_share_of_many_positions_is_compared_whole(
    policy_folder: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch, Forgetful)
    all_of_them = probed(policy_folder, prompts_file)
    monkeypatch.setattr(probe, "WHOLE_LOGITS", 7 * 8 * 600 // 3)
    monkeypatch.setattr(measure, "HELD_LOGITS", 2 * 8 * 600)
    third = probed(policy_folder, prompts_file)
    assert [row.token_T.tolist() for row in third.rows] == [row.token_T.tolist() for row in all_of_them.rows]
    for name in ("logp_train_P", "kl_infer_train_P", "response_P", "problem_P"):
        np.testing.assert_allclose(
            third.engine.arrays[name], all_of_them.engine.arrays[name][::3], rtol=1e-4, atol=1e-7
        )
    assert (third.engine.arrays["problem_P"] == third.engine.arrays["response_P"] % 3).all()
    monkeypatch.setattr(probe, "WHOLE_LOGITS", 1)
    assert len(probed(policy_folder, prompts_file).engine.arrays["logp_train_P"]) == 1, "never none"


def test_the_same_seed_gives_the_same_responses(policy_folder: Path, prompts_file: Path) -> None:
    exact = {"engine": "exact", "dtype": "float32"}
    first, again, other = (probed(policy_folder, prompts_file, sampler=exact, seed=seed) for seed in (1, 1, 2))
    assert [row.text for row in first.rows] == [row.text for row in again.rows] != [row.text for row in other.rows]


def test_a_prompt_that_is_too_long_ends_before_the_engine_starts(policy_folder: Path, prompts_file: Path) -> None:
    with pytest.raises(
        StudyError, match=r"line 2: \d+ tokens of prompt and 60 of response \(--max-new-tokens\) exceed the model's 64$"
    ):
        probed(policy_folder, prompts_file, max_new_tokens=60)
    assert len(read_prompts(prompts_file)) == 3


class Truncating(PlainSampler):
    """An engine that samples from the ten most probable tokens, and says so to nobody."""

    def generate(self, requests: Sequence[Request], decoding: Decoding) -> list[Rollout]:
        ten = [replace(request, threshold=10.0) for request in requests]
        return super().generate(ten, replace(decoding, rule="top_k"))


@pytest.mark.slow
def test_a_mismatch_above_rounding_is_recomputed(
    policy_folder: Path, prompts_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """By the command: an engine in bfloat16 gives no such section; one that truncates is found."""
    words = [str(policy_folder), "--prompts", str(prompts_file), "--samples", "12", "--max-new-tokens", "20"]
    page, data, log = tmp_path / "page.html", tmp_path / "data.json", tmp_path / "log.jsonl"
    words += ["--out", str(page), "--json", str(data), "--log", str(log), "--engine", "transformers"]
    assert commanded(monkeypatch, words, data)["experiment"] is None
    assert "The cause by experiment" not in page.read_text(encoding="utf-8")
    with_engine(monkeypatch, Truncating)
    found = commanded(monkeypatch, words, data)["experiment"]
    [cause] = found["sides"]["sampler"]["cause"]
    assert (cause["name"], cause["value"]) == ("top_k", pytest.approx(10, abs=1)) and found["code"] == 1
    assert "with top-k 10, renormalised" in page.read_text(encoding="utf-8").partition("The cause by experiment")[2]
    tokenizer = load_tokenizer(policy_folder)
    prompts = [tokenizer.decode(ids_T[: int(place_T[0])]) for ids_T, place_T in written_prompts(log)]
    assert prompts == [PROMPTS[number % 3] for number in range(12)], "tailrl explain reads the log as it is"
    assert commanded(monkeypatch, [*words, "--no-experiment"], data)["experiment"] is None


def written_prompts(file: Path) -> list[tuple[Any, Any]]:
    ((_, log),) = read_log([file])
    return list(zip(log.whole_S, log.place_S, strict=True))


def commanded(monkeypatch: pytest.MonkeyPatch, words: list[str], data: Path) -> dict[str, Any]:
    monkeypatch.setattr(sys, "argv", ["tailrl", "probe", *words])
    cli.main()
    read: dict[str, Any] = json.loads(data.read_text(encoding="utf-8"))
    return read


@pytest.mark.vllm
@pytest.mark.slow
def test_the_command_with_the_real_vllm(policy_folder: Path, prompts_file: Path, tmp_path: Path) -> None:
    """bfloat16 is no more than rounding from the trainer; with top-p its log-probs lie above the trainer's."""
    words = [sys.executable, "-P", "-c", "from tailrl.cli import main; main()", "probe", str(policy_folder)]
    words += ["--prompts", str(prompts_file), "--samples", "30", "--max-new-tokens", "16"]
    means = {}
    for top_p in ("1", "0.5"):
        log = tmp_path / f"{top_p}.parquet"
        out = ["--top-p", top_p, "--log", str(log), "--out", str(tmp_path / "page.html")]
        ended = subprocess.run([*words, *out], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr[-3000:]
        assert "tailrl: 30 of 30 responses sampled and scored" in ended.stderr
        ((_, read),) = read_log([log])
        delta_T = read.trainer_T - read.sampler_T
        means[top_p] = delta_T.mean()
        assert np.abs(read.again_T - read.trainer_T).max() < 1e-4
    assert abs(means["1"]) < 0.05
    assert means["0.5"] == pytest.approx(math.log(0.5), abs=0.1)
    assert "Whole distributions</h2>" in (tmp_path / "page.html").read_text(encoding="utf-8")
