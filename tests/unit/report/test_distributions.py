"""The tables, the page and the figure of compared distributions, from files written by hand."""

import csv
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tailrl.distribution_settings import ComparedEngine, Distributions
from tailrl.errors import StudyError
from tailrl.report import write_distribution_report
from tailrl.report.distribution_tables import (
    Compared,
    distance,
    probability_bins,
    read_compared,
    set_overlaps,
    signature,
)
from tailrl.report.distributions import distribution_figure
from tailrl.report.statistics import cluster_interval

P, B, H = 60, 3, 5
ENGINES: dict[str, dict[str, Any]] = {
    "coarse": {"sampler": {"dtype": "float16"}, "disturbance": {"noise": 0.25}},
    "floor": {"rescored": 1},
    "same": {"sampler": {"engine": "exact", "dtype": "float32"}},
}


def arrays(size: float) -> dict[str, Any]:
    """P places of 30 responses to 20 problems, whose distances are `size` times fixed random numbers."""
    rng = np.random.default_rng(0)
    where = np.arange(P) // 2
    apart = rng.random(P) * size
    sizes_PS = np.column_stack([np.full(P, 50), np.full(P, 4)])
    lacks_PS = np.zeros((P, 2), int)
    lacks_PS[:3, 1] = 2 if size else 0
    mass_PB = np.column_stack([np.full(P, 0.75), np.full(P, 0.25), np.zeros(P)])
    return {
        "response_P": where,
        "problem_P": where % 20,
        "place_P": np.zeros(P, int),
        "token_P": np.zeros(P, int),
        "logp_train_P": np.full(P, -1.0),
        "logp_infer_P": -1.0 + apart * rng.choice([-1, 1], P),
        **{f"{name}_P": apart for name in ("tv", "kl_train_infer", "kl_infer_train", "delta_max", "half_range")},
        "entropy_train_P": np.full(P, 0.5),
        "flip_P": np.arange(P) < 6 * (size > 0),
        "kept_train_PS": sizes_PS,
        "kept_infer_PS": sizes_PS - lacks_PS // 2,
        "kept_both_PS": sizes_PS - lacks_PS,
        "log_kept_train_PS": np.tile(np.log([1.0, 0.9]), (P, 1)),
        "outside_PS": np.column_stack([np.zeros(P), apart]),
        "mass_PB": mass_PB,
        "size_PB": mass_PB * apart[:, None],
        "signed_PB": mass_PB * apart[:, None] * [-0.5, 1, 0],
        "paper_PB": mass_PB * size**2,
        "second_PB": mass_PB * size**2 * [-0.1, 0.5, 0],
        "head_PH": np.tile([0, 0, 0.75, 0, 0], (P, 1)) * (size > 0),
        "tail_PH": np.tile([0, 0.1, 0, 0.05, 0], (P, 1)) * (size > 0),
    }


def write(folder: Path, engine: str, size: float, **changes: Any) -> None:
    job = Distributions(
        name=engine,
        engine=ComparedEngine.model_validate(ENGINES[engine]),
        responses=30,
        every=2,
        rho=("e-13", "1e-2"),
        seed=3,
        temperature=0.7,
        max_new_tokens=9,
        token_budget=64,
        rollout_timeout=60.0,
    )
    (folder / engine).mkdir()
    record = {"settings": job.model_dump(mode="json"), "edges": [0.0, 1.0, 5.0], "head_below": 1.0, "tail_from": 5.0}
    record |= {"tokens": 2 * P, "vocabulary": 50, **changes}
    (folder / engine / "run.json").write_text(json.dumps(record), encoding="utf-8")
    np.savez_compressed(folder / engine / "positions.npz", **arrays(size))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for engine, size in (("coarse", 0.1), ("floor", 1e-8), ("same", 0.0)):
        write(tmp_path, engine, size)
    return tmp_path


def rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8") as opened:
        return list(csv.DictReader(opened))


def test_distances_are_means_percentiles_and_counts(results: Path) -> None:
    given, found = arrays(0.1), distance(read_compared(results / "coarse", "coarse"))
    assert (found.responses, found.places, found.equal, found.flips) == (30, P, 0, 6)
    assert found.tv == cluster_interval(given["tv_P"], given["problem_P"])
    assert found.tv.n == 20, "the responses to one problem are one unit"
    assert (found.tv_p99, found.delta_p99) == pytest.approx((np.quantile(given["tv_P"], 0.99),) * 2)
    assert found.delta.mean == pytest.approx(given["tv_P"].mean())
    assert found.flip_share.mean == 0.1 and 0.04 < found.flip_share.low < 0.1 < found.flip_share.high < 0.21
    assert found.what == "vllm in float16; disturbed sampler: noise of 0.25 nats"


def test_words_of_the_noise_floor(results: Path) -> None:
    floor = distance(read_compared(results / "floor", "floor"))
    assert floor.what == "the trainer itself, responses packed alone; sampled by vllm in bfloat16"


def test_overlaps_by_threshold(results: Path) -> None:
    first, second = set_overlaps(read_compared(results / "coarse", "coarse"))
    assert (first.rho, first.overlap.mean, first.different, first.lost_train) == ("e-13", 1, 0, 0)
    assert (second.rho, second.kept_train, second.kept_infer) == ("1e-2", 4, 4 - 3 / P)
    assert second.overlap.mean == pytest.approx(1 - 0.5 * 3 / P)
    assert (second.overlap_least, second.different, second.responses_different) == (0.5, 3, 2)
    assert second.overlap_p01 == 0.5
    assert second.lost_train == pytest.approx(0.1)
    assert first.outside.mean == 0 and second.outside.mean == pytest.approx(arrays(0.1)["tv_P"].mean())


def test_a_set_that_only_grew_is_a_different_one(results: Path) -> None:
    compared = read_compared(results / "same", "same")
    compared.arrays["kept_infer_PS"][7, 0] += 1
    first, _ = set_overlaps(compared)
    assert (first.overlap.mean, first.different) == (1, 1)


def test_bins_are_means_over_the_engines_mass(results: Path) -> None:
    head, middle, tail = probability_bins(read_compared(results / "coarse", "coarse"))
    mean = arrays(0.1)["tv_P"].mean()
    assert (head.mass, middle.mass, tail.mass) == (0.75 * P, 0.25 * P, 0)
    assert (head.size.mean, middle.size.mean) == pytest.approx((mean, mean))
    assert (head.signed.mean, middle.signed.mean) == pytest.approx((-mean / 2, mean))
    assert (head.balance.mean, middle.balance.mean) == pytest.approx((-0.5, 1))
    assert np.isnan(tail.size.mean) and tail.nats_to == np.inf


def test_the_signature_joins_the_bins_of_head_and_tail(results: Path) -> None:
    compared = read_compared(results / "coarse", "coarse")
    assert signature(compared) == probability_bins(compared), "here every group is one bin"
    one_bin_less = {**compared.record, "edges": [0.0, 0.5, 5.0]}
    head, middle, tail = signature(Compared("coarse", one_bin_less, compared.arrays))
    assert (head.mass, middle.mass, tail.mass) == (P, 0, 0)
    assert head.second.mean == pytest.approx(0.1**2 * (0.75 * -0.1 + 0.25 * 0.5))
    assert head.paper.mean == pytest.approx(0.01) and (head.nats_from, head.nats_to) == (0, 1)


def test_what_is_written(results: Path) -> None:
    out = results / "out"
    write_distribution_report(results, list(ENGINES), out)
    assert [row["engine"] for row in rows(out / "distributions.csv")] == list(ENGINES)
    assert [(row["engine"], row["rho"]) for row in rows(out / "safe_sets.csv")] == [
        (engine, rho) for engine in ENGINES for rho in ("e-13", "1e-2")
    ]
    assert len(rows(out / "probability.csv")) == 3 * B
    page = (out / "distributions.md").read_text(encoding="utf-8")
    assert "At one place in 2 of 30 responses (at most 9 tokens, temperature 0.7, seed 3)" in page
    assert "| same | exact in float32 | 60 | 60 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 (0 %) [0, 6] |" in page
    assert "| same | e-13 | 50 | 50 | 0 | 0 | 1 | 1 | 1 | 0 of 60 | 0 |" in page
    assert re.search(
        r"\| coarse \| 1e-2 \| 4 \| 3.95 \| 0.1 \| 0.05\d* \[.*\] \| 0.975 \| 0.5 \| 0.5 \| 3 of 60 \| 2 \|", page
    )
    assert "| same | 0 to 1 | 75 % | 0 | 0 | 0 | 0 |" in page
    assert "| coarse | from 5 | 0 % |" in page
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    write_distribution_report(results, list(ENGINES), out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_an_exact_zero_is_said_in_words(results: Path) -> None:
    compared = [read_compared(results / engine, engine) for engine in ENGINES]
    figure = distribution_figure(compared, [row for one in compared for row in probability_bins(one)])
    tv, overlap, *_ = figure.axes
    assert [text.get_text() for text in tv.texts] == ["exactly 0 at all 60 places"]
    assert tv.get_xscale() == "log"
    marks = [line.get_xdata()[0] for line in tv.get_lines() if line.get_marker() == "o"]
    assert marks == pytest.approx([arrays(0.1)["tv_P"].mean(), arrays(1e-8)["tv_P"].mean()])
    assert [text.get_text() for text in overlap.texts] == ["0", "0", "exactly 0 at all 60 places"]


def test_where_nothing_differs_there_is_still_a_figure(results: Path) -> None:
    compared = [read_compared(results / "same", "same")]
    figure = distribution_figure(compared, probability_bins(compared[0]))
    assert [ax.texts[-1].get_text() for ax in figure.axes[-2:]] == ["The distributions are the same."] * 2


# --- what cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("run.json", None, "is missing"),
        ("run.json", b"{", "cannot be read"),
        ("run.json", b"{}", "has no settings"),
        ("positions.npz", None, "is missing"),
        ("positions.npz", b"no zip", "cannot be read"),
        ("positions.npz", b"", "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_used_is_named(results: Path, file: str, content: bytes | None, words: str) -> None:
    path = results / "floor" / file
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(StudyError, match=words) as caught:
        write_distribution_report(results, list(ENGINES), results / "out")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["missing", "short", "empty"])
def test_arrays_that_do_not_fit_are_named(results: Path, change: str) -> None:
    given = arrays(0.1)
    if change == "missing":
        del given["tv_P"]
    elif change == "short":
        given["tv_P"] = given["tv_P"][:-1]
    else:
        given = {name: values[:0] for name, values in given.items()}
    path = results / "coarse" / "positions.npz"
    np.savez_compressed(path, **given)
    with pytest.raises(StudyError, match="has no tv_P" if change == "missing" else "its arrays hold"):
        read_compared(results / "coarse", "coarse")
