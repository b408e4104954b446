"""The tables, the page and the figure of compared distributions, from files written by hand."""

import csv
import dataclasses
import gzip
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from artifacts_fixture import RAN, vouch_again
from csv_fixture import rows
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from tailrl.artifacts.manifest import MANIFEST, files_in, write_manifest
from tailrl.artifacts.probes import DistributionsRecord
from tailrl.artifacts.records import write_record
from tailrl.config.distributions import ComparedEngine, Distributions
from tailrl.reports.distributions.numbers import (
    Compared,
    ProbabilityBin,
    distance,
    histograms,
    probability_bins,
    read_compared,
    set_overlaps,
    signature,
)
from tailrl.reports.distributions.page import distribution_figure, write_distribution_report
from tailrl.runtime.errors import StudyError
from tailrl.stats.intervals import cluster_interval, ratio_interval

P, B, H = 60, 3, 5
ENGINES: dict[str, dict[str, Any]] = {
    "coarse": {"sampler": {"dtype": "float16"}, "disturbance": {"noise": 0.25}},
    "floor": {"rescored": 1},
    "same": {"sampler": {"engine": "exact", "dtype": "float32"}},
}


def arrays(size: float) -> dict[str, Any]:
    """P positions of 30 responses to 20 problems, whose distances are `size` times fixed random numbers."""
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
        "position_P": np.zeros(P, int),
        "token_P": np.zeros(P, int),
        "logp_train_P": np.full(P, -1.0),
        "logp_infer_P": -1.0 + apart * rng.choice([-1, 1], P),
        **{f"{name}_P": apart for name in ("tv", "kl_train_infer", "kl_infer_train", "delta_max", "half_range")},
        "entropy_train_P": np.full(P, 0.5),
        "entropy_infer_P": np.full(P, 0.5),
        "flip_P": np.arange(P) < 6 * (size > 0),
        "kept_train_PS": sizes_PS,
        "kept_infer_PS": sizes_PS - lacks_PS // 2,
        "kept_both_PS": sizes_PS - lacks_PS,
        "log_kept_train_PS": np.tile(np.log([1.0, 0.9]), (P, 1)),
        "log_kept_infer_PS": np.zeros((P, 2)),
        "outside_PS": np.column_stack([np.zeros(P), apart]),
        "k3_PS": np.column_stack([apart, apart / 2]),
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
        dtype="float32",
    )
    (folder / engine).mkdir()
    record = {"settings": job.model_dump(mode="json"), "edges": [0.0, 1.0, 5.0], "head_below": 1.0, "tail_from": 5.0}
    record |= {"tokens": 2 * P, "vocabulary": 50, "sampler_self_test": 0.0, **changes}
    write_record(folder / engine, DistributionsRecord.model_validate(RAN | record))
    write_arrays(folder / engine, arrays(size))


def write_arrays(folder: Path, given: dict[str, Any]) -> None:
    np.savez_compressed(folder / "positions.npz", **given)
    write_manifest(folder / MANIFEST, files_in(folder))


@pytest.fixture
def results(tmp_path: Path) -> Path:
    for engine, size in (("coarse", 0.1), ("floor", 1e-8), ("same", 0.0)):
        write(tmp_path, engine, size)
    return tmp_path


def drawn(*compared: Compared) -> Figure:
    tables = (set_overlaps, probability_bins, histograms, signature)
    return distribution_figure(
        [distance(one) for one in compared], *([row for one in compared for row in table(one)] for table in tables)
    )


def marks(ax: Axes, shape: str = "o") -> list[float]:
    """Where the panel has marks of this shape, along x."""
    return [line.get_xdata()[0] for line in ax.get_lines() if line.get_marker() == shape]


def test_distances_are_means_percentiles_and_counts(results: Path) -> None:
    given, found = arrays(0.1), distance(read_compared(results / "coarse", "coarse"))
    assert (found.responses, found.positions, found.equal, found.flips) == (30, P, 0, 6)
    assert found.tv == cluster_interval(given["tv_P"], given["problem_P"])
    assert found.tv.n == 20, "the responses to one problem are one unit"
    assert (found.tv_p99, found.delta_p99) == pytest.approx((np.quantile(given["tv_P"], 0.99),) * 2)
    assert found.tv_p01 == pytest.approx(np.quantile(given["tv_P"], 0.01))
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
    assert (second.overlap_p01, second.overlap_p99) == (0.5, 1)
    assert second.lost_train == pytest.approx(0.1)
    assert first.outside.mean == 0 and second.outside.mean == pytest.approx(arrays(0.1)["tv_P"].mean())
    given = arrays(0.1)
    assert [first.k3, second.k3] == [cluster_interval(given["k3_PS"][:, s], given["problem_P"]) for s in (0, 1)]


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
    names = [field.name for field in dataclasses.fields(ProbabilityBin)]
    for part, one in zip(signature(compared), probability_bins(compared), strict=True):  # here every part is one bin
        assert [getattr(part, name) for name in names] == [getattr(one, name) for name in names]
    assert [part.part for part in signature(compared)] == ["head", "between", "tail"]
    one_bin_less = {**compared.record, "edges": [0.0, 0.5, 5.0]}
    head, middle, tail = signature(Compared("coarse", one_bin_less, compared.arrays))
    assert (head.mass, middle.mass, tail.mass) == (P, 0, 0)
    assert head.second.mean == pytest.approx(0.1**2 * (0.75 * -0.1 + 0.25 * 0.5))
    assert head.paper.mean == pytest.approx(0.01) and (head.nats_from, head.nats_to) == (0, 1)


def test_predicted_and_measured_in_units_of_each_places_eps_max(results: Path) -> None:
    """Over positions that have one."""
    compared = read_compared(results / "coarse", "coarse")
    compared.arrays["half_range_P"][5:9] = 0.0
    given, apart_P = compared.arrays, compared.arrays["half_range_P"] > 0
    head, middle, tail = signature(compared)
    assert (head.signed_eps_max.mean, middle.signed_eps_max.mean) == pytest.approx((-0.5, 1))
    above_P = given["paper_PB"][apart_P, 0] / given["half_range_P"][apart_P]
    assert head.paper_eps_max == ratio_interval(above_P, given["mass_PB"][apart_P, 0], given["problem_P"][apart_P])
    assert head.paper_eps_max.low < head.paper_eps_max.mean < head.paper_eps_max.high
    assert math.isnan(tail.paper_eps_max.mean)
    same = signature(read_compared(results / "same", "same"))
    assert all(math.isnan(part.signed_eps_max.mean) and math.isnan(part.paper_eps_max.mean) for part in same)


def test_histograms_are_shares_of_their_part(results: Path) -> None:
    found = histograms(read_compared(results / "coarse", "coarse"))
    assert [one.part for one in found] == ["head"] * H + ["tail"] * H
    assert [one.share for one in found[:H]] == [0, 0, 1, 0, 0]
    assert [one.share for one in found[H:]] == pytest.approx([0, 2 / 3, 0, 1 / 3, 0])
    assert [one.density for one in found] == pytest.approx([one.share / 0.8 for one in found])
    assert (found[0].eps_max_from, found[H - 1].eps_max_to) == (-2, 2)
    assert histograms(read_compared(results / "same", "same")) == []


def test_what_is_written(results: Path) -> None:
    out = results / "out"
    write_distribution_report(results, list(ENGINES), out)
    assert [row["engine"] for row in rows(out / "distributions.csv")] == list(ENGINES)
    assert [(row["engine"], row["rho"]) for row in rows(out / "safe_sets.csv")] == [
        (engine, rho) for engine in ENGINES for rho in ("e-13", "1e-2")
    ]
    assert len(rows(out / "probability.csv")) == 3 * B
    assert [(row["engine"], row["part"]) for row in rows(out / "signature.csv")] == [
        (engine, part) for engine in ENGINES for part in ("head", "between", "tail")
    ]
    assert [row["engine"] for row in rows(out / "histograms.csv")] == ["coarse"] * 2 * H + ["floor"] * 2 * H
    page = (out / "distributions.md").read_text(encoding="utf-8")
    assert "at one position in 2 of 30 responses (at most 9 tokens, temperature 0.7, seed 3)" in page
    assert "| same | exact in float32 | 60 | 60 | 0 | 0 | 0 | 0 | 0 | 0 | 0 | 0 (0 %) [0, 6] |" in page
    assert "| same | e-13 | 50 | 50 | 0 | 0 | 0 | 1 | 1 | 1 | 0 of 60 | 0 |" in page
    outside, k3 = r"0.05\d* \[.*\]", r"0.02\d* \[.*\]"
    assert re.search(
        rf"\| coarse \| 1e-2 \| 4 \| 3.95 \| 0.1 \| {outside} \| {k3} \| 0.975 \| 0.5 \| 0.5 \| 3 of 60 \| 2 \|", page
    )
    assert "| same | 0 to 1 | 75 % | 0 | 0 | 0 | 0 |" in page
    assert "| coarse | from 5 | 0 % |" in page
    verdicts = rows(out / "claims.csv")
    assert verdicts and all(f"| **{row['verdict']}** | {row['arms']} |" in page for row in verdicts)
    assert (out / "distributions.html").read_text(encoding="utf-8").count("<svg") == 1
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    write_distribution_report(results, list(ENGINES), out)
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_flips_are_written_where_an_engine_says_its_experts(results: Path) -> None:
    out = results / "out"
    flips = "flips_by_layer.csv", "flips_by_margin.csv", "flips_by_problem.csv.gz"
    write_distribution_report(results, list(ENGINES), out)
    assert not any((out / name).exists() for name in flips)
    assert "## Experts" not in (out / "distributions.md").read_text(encoding="utf-8")
    path = results / "coarse/run.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    record["settings"]["engine"]["sampler"]["routes"] = True
    path.write_text(json.dumps(record), encoding="utf-8")
    vouch_again(path)
    experts = {"expert_flip_PL": np.arange(2 * P).reshape(P, 2) < 6, "margin_PL": np.full((P, 2), 0.02, np.float32)}
    write_arrays(results / "coarse", arrays(0.1) | experts)
    write_distribution_report(results, list(ENGINES), out)
    layers, margins = (rows(out / name) for name in flips[:2])
    with gzip.open(out / flips[2], "rt", encoding="utf-8") as file:
        assert sum(int(row["flips"]) for row in csv.DictReader(file)) == 6
    assert [(row["engine"], row["layer"], row["flips"]) for row in layers] == [
        ("coarse", layer, count) for layer, count in (("1", "3"), ("2", "3"), ("mean", "6"), ("any", "3"))
    ]
    assert {row["positions"] for row in margins if row["margin_from"] == "0.01"} == {"60", "120"}
    page = (out / "distributions.md").read_text(encoding="utf-8")
    assert re.search(r"\| coarse \| mean \| 120 \| 6 \| 0\.05 \[.*\] \|  \| 0\.02 \| 1 \|", page)
    assert "flips_by_margin.csv" in (out / "distributions.html").read_text(encoding="utf-8")


def test_an_exact_zero_is_said_in_words(results: Path) -> None:
    compared = [read_compared(results / engine, engine) for engine in ENGINES]
    tv, overlap, *_ = drawn(*compared).axes
    assert [text.get_text() for text in tv.texts] == ["exactly 0 at all 60 positions"]
    assert tv.get_xscale() == "log"
    assert marks(tv) == pytest.approx([arrays(0.1)["tv_P"].mean(), arrays(1e-8)["tv_P"].mean()])
    assert [text.get_text() for text in overlap.texts] == ["0", "0", "exactly 0 at all 60 positions"]


def test_where_nothing_differs_there_is_still_a_figure(results: Path) -> None:
    figure = drawn(read_compared(results / "same", "same"))
    assert [ax.texts[-1].get_text() for ax in figure.axes[-2:]] == ["The distributions are the same."] * 2


def test_what_is_drawn_is_in_the_tables(tmp_path: Path) -> None:
    """To the 9 digits that these have, in every panel."""
    for engine, size in (("coarse", 0.1), ("floor", 1e-8), ("same", 0.0)):
        write(tmp_path, engine, size, edges=[0.0, 5.0, 6.0])
    write_distribution_report(tmp_path, list(ENGINES), tmp_path)
    tv, overlap, size_ax, balance, *parts = drawn(*(read_compared(tmp_path / e, e) for e in ENGINES)).axes

    def column(table: str, name: str, **where: str) -> Any:
        """Of the engines that have a mismatch."""
        chosen = [row for row in rows(tmp_path / f"{table}.csv") if where.items() <= row.items()]
        values = [float(row[name] or "nan") for row in chosen if row["engine"] != "same"]
        return pytest.approx(values, rel=1e-8, nan_ok=True)

    def spans(ax: Axes) -> list[Any]:
        return [line.get_xdata() for line in ax.get_lines() if line.get_marker() == "None"]

    assert marks(tv) == column("distributions", "tv_mean")
    assert [low for low, _ in spans(tv)] == column("distributions", "tv_p01")
    assert [high for _, high in spans(tv)] == column("distributions", "tv_p99")
    assert [1 - x for x in marks(overlap, "D")] == column("safe_sets", "overlap_mean", rho="1e-2")
    assert [1 - high for _, high in spans(overlap)] == column("safe_sets", "overlap_p01", rho="1e-2")
    for ax, name in ((size_ax, "size_mean"), (balance, "balance_mean")):
        first, second, *_ = ([*line.get_ydata(), math.nan] for line in ax.get_lines())  # of the last bin there is none
        assert first + second == column("probability", name)
    for ax, part in zip(parts, ("head", "tail"), strict=True):
        steps = [patch.get_data() for patch in ax.patches if isinstance(patch, StepPatch)]
        assert [x for values, *_ in steps for x in values] == column("histograms", "density", part=part)
        assert [x for _, edges, *_ in steps for x in edges[:-1]] == column("histograms", "eps_max_from", part=part)
        _, *lines = spans(ax)  # the first is at 0
        assert marks(ax) == column("signature", "signed_eps_max_mean", part=part)
        assert [x for x, _ in lines[1::2]] == column("signature", "signed_eps_max_low", part=part)
        assert [x for x, _ in lines[::2]] == column("signature", "paper_eps_max_mean", part=part)
        bands = [band.get_paths()[0].get_extents() for band in ax.collections]
        assert [band.x0 for band in bands] == column("signature", "paper_eps_max_low", part=part)
        assert [band.x1 for band in bands] == column("signature", "paper_eps_max_high", part=part)


# --- what cannot be used -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("run.json", None, "is missing"),
        ("run.json", b"{", "not valid JSON"),
        ("run.json", b"{}", "settings is missing"),
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
        vouch_again(path)
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
    write_arrays(results / "coarse", given)
    with pytest.raises(StudyError, match="has no tv_P" if change == "missing" else "its arrays hold"):
        read_compared(results / "coarse", "coarse")
