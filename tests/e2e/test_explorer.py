"""The token explorer and the page of a diagnosis in a real browser: what a user does, against Python's numbers."""

import json
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bad_results import STUDY, write_small
from browser_fixture import browse, needs_browser, use
from diagnosis_fixture import HOSTILE, REMEDIES, WORDS, diagnosis_of, noisy_rows
from numpy.typing import NDArray

from tailrl.config.arm import Correction
from tailrl.diagnosis import causes, page
from tailrl.diagnosis.causes import Cause
from tailrl.diagnosis.diagnosis import Diagnosis
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.objective.corrections import correct
from tailrl.page_parts import explorer
from tailrl.reports.overview.study import write_report

pytestmark = needs_browser

USER = Path(__file__).with_name("explorer_use.js").read_text(encoding="utf-8")
LENGTHS = [40, 7, 120, 300, 3]
SIDES = ("trainer", "sampler")

SETTINGS: list[dict[str, float]] = [
    {"rho": -13, "c": 0.3, "epsilon": 0.2, "veto": -4},
    {"rho": -4, "c": 0.05, "epsilon": 0.05, "veto": -0.25},
    {"rho": -1.5, "c": 0.005, "epsilon": 0.01, "veto": 0},
    {"rho": -30, "c": 2, "epsilon": 1, "veto": -8},
]
"""Of the sliders: ln ρ, log10 C, ε, and log10 of the veto's limit."""


def diagnosis(noise: float = 0.3, lengths: list[int] = LENGTHS, **others: Any) -> Diagnosis:
    rows = [replace(row, **others) for row in noisy_rows(len(lengths), lengths, noise)]
    return diagnosis_of(pack(rows), remedies=REMEDIES)


def data_of(html: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(html.split('type="application/json">')[1].split("</script>")[0])
    return found


def dropped(response: dict[str, Any], set: dict[str, float]) -> dict[str, NDArray[np.bool_]]:
    """bool [T] for each remedy: its weight is 0. Weights are tailrl.objective's; DVP and DPPO are written out here."""
    trainer, sampler = (torch.tensor(response[side], dtype=torch.float64) for side in SIDES)
    count = len(trainer)
    where, none = torch.zeros(count + 1, dtype=torch.int64), torch.zeros(count + 1, dtype=torch.bool)

    def gone(left_out: float = 0.0, **correction: Any) -> NDArray[np.bool_]:
        """`left_out`: Δ that stands for the response's tokens that the page does not show."""
        delta = torch.cat([trainer - sampler, torch.tensor([left_out], dtype=torch.float64)])
        weights = correct(delta, none, where, 1, Correction(**correction))
        weight_T: NDArray[np.float64] = weights.weight_T[:count].numpy()
        return weight_T == 0

    p, q, advantage = trainer.exp().numpy(), sampler.exp().numpy(), np.array(response["advantage"])
    top_p, top_q = (np.exp(response.get(f"{side}_top", np.zeros(count))) for side in SIDES)
    rho, c, limit = math.exp(set["rho"]), 10 ** set["c"], 10 ** set["veto"]
    # A limit of 1 is none that an arm may have.
    below = response["least"] < 0 or bool((trainer < sampler).any())
    veto = gone(response["least"], veto=limit) if limit < 1 else np.full(count, below)
    return {
        "dvp": (p < rho * top_p) | (q < rho * top_q),
        "icepop": gone(token="mask", token_threshold=c),
        "dppo": np.where(advantage > 0, p - q > set["epsilon"], p - q < -set["epsilon"]),
        "mis": gone(response["rest"], sequence="mis", sequence_threshold=c),
        "veto": veto,
        "tis": gone(token="tis", token_threshold=c),
    }


@pytest.mark.parametrize(("tops", "most"), [(True, 2000), (False, 2000), (True, 30)])
def test_sliders_drop_what_the_objective_drops(
    tops: bool, most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(explorer, "TOKENS_OF_A_RESPONSE", most)
    html = page.html_page(diagnosis() if tops else diagnosis(trainer_top_T=None, sampler_top_T=None))
    seen, console = use(html, f"{USER} sliders({json.dumps(SETTINGS)})", tmp_path)
    assert console == []
    data, counts = data_of(html), []
    shown = sum(min(most, length) for length in LENGTHS)
    for settings, found in zip(SETTINGS, seen, strict=True):
        assert found["note"] == tops, "without largest probabilities the page says that they count as 1"
        each = [dropped(response, settings) for response in data]
        for name in each[0]:
            here, every = int(each[0][name].sum()), sum(int(one[name].sum()) for one in each)
            assert found["counts"][name] == [
                f"{here} of {len(data[0]['token'])}",
                f"{every} of {shown}",
            ], name
            assert found["struck"][name] == here, name
            counts.append((name, every))
        logp, top = ([np.array(data[0].get(f"{side}{end}", 0.0)) for side in SIDES] for end in ("", "_top"))
        outside, apart = (logp[side] < top[side] + settings["rho"] for side in (0, 1))
        assert found["set"] == [[4, 8, 0, 9][a + 2 * b] for a, b in zip(outside, apart, strict=True)]
    for name in {name for name, _ in counts} - {"tis"}:
        assert len({count for other, count in counts if other == name}) > 1, f"{name}: the settings must differ"


def test_a_ratio_at_its_limit_and_the_tokens_that_are_not_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With C = 10^0.3 and the veto at 1e-4; of 40 tokens 30 are shown, and the first ten decide."""
    monkeypatch.setattr(explorer, "TOKENS_OF_A_RESPONSE", 30)

    def row(hidden: float, shown: float) -> LoggedRow:
        delta_T = np.r_[np.full(10, hidden), np.zeros(29), shown]
        return LoggedRow("", np.full(40, -30.0), -30.0 + delta_T, token_T=np.arange(40))

    limit = 0.3 * math.log(10)
    rows = [row(0.0, limit + 0.001), row(0.0, limit - 0.001), row(0.1, 0.2), row(-0.1, limit + 0.5)]
    rows += [row(-9.3, 9.5), row(-9.1, 9.5)]
    html = page.html_page(diagnosis_of(pack(rows)))
    gone = {name: [] for name in ("mis", "veto")}
    seen, console = use(html, f"{USER} each()", tmp_path)
    assert console == []
    for one in data_of(html):
        total, least = one["rest"] + sum(np.subtract(one["trainer"], one["sampler"])), min(0.0, one["least"])
        gone["mis"].append(30 if total > limit else 0)
        gone["veto"].append(30 if least < math.log(1e-4) else 0)
    assert sorted(gone["mis"]) == [0, 0, 0, 0, 30, 30] and sorted(gone["veto"]) == [0, 0, 0, 0, 0, 30]
    assert {name: [int(counts[name][0].split()[0]) for counts in seen] for name in gone} == gone


def test_colours_follow_the_numbers(tmp_path: Path) -> None:
    odd = LoggedRow("", np.array([-1.0, -0.5, -1.0]), np.array([np.nan, -0.5, -9.0]), token_T=np.array([1, 2, 3]))
    seen, console = use(page.html_page(diagnosis_of(pack([odd]))), f"{USER} colours()", tmp_path)
    assert console == []
    assert seen["delta"] == [10, 4, 0], "no log-probs, equal, and 8 nats more in the sampler"
    assert seen["probability"] == [10, 5, 8]
    assert seen["weight"] == [10, 4, 0] and "weight 0" in seen["key"]


def test_pointer_touch_and_keys_move_between_tokens(tmp_path: Path) -> None:
    html = page.html_page(diagnosis())
    data = data_of(html)
    seen, console = use(html, f"{USER} moves()", tmp_path)
    assert console == []
    assert seen["scrolled"] == 0, "the page opens at its answer"
    first, last = data[0], len(data[0]["token"]) - 1
    assert f"token 5, id {first['token'][5]}" in seen["hover"] and seen["stays"] == 0 and "token 0" in seen["left"]
    assert f"{first['rank'][5]:g}" in seen["hover"] and "trainer's top p" in seen["hover"]
    for side in ("trainer", "sampler"):
        assert f"{side}'s safe set {first[f'{side}_set'][5]:g} tokens" in " ".join(seen["hover"].split())
    assert seen["touched"][0] == 7 and f"{first['trainer'][7]:.3g}" in seen["touched"][1]
    assert seen["keys"][:6] == [8, 7, last, last, 0, min(50, last)] and seen["keys"][6] < min(50, last)
    assert seen["down"] > 10 and seen["outline"] == ["solid", "solid"] and seen["active"]
    size_T = np.abs(np.array(first["trainer"]) - np.array(first["sampler"]))
    assert seen["worst"] == np.argsort(-size_T)[:2].tolist()
    assert seen["next"] == [1, len(data[1]["token"])] and seen["before"] == len(data) - 1
    assert seen["third"] == len(data[2]["token"]) and seen["labels"]


def test_two_thousand_tokens_are_smooth(tmp_path: Path) -> None:
    html = page.html_page(diagnosis(0.5, [2000, 2000, 2000]))
    seen, console = use(html, f"{USER} smooth()", tmp_path)
    assert console == []
    assert seen["count"] == 2000 and seen["other"] > 100
    assert seen["reads"] == [], "a slider reads no layout"
    assert seen["frames"] == 1, "twenty movements in a frame are one update"
    assert seen["kinds"] == ["attributes class"] and seen["queued"] == 0, "classes alone change, in a frame"
    assert seen["first"] == seen["other"], "each token that changes is written once, however often the slider moved"
    assert seen["idle"] == 0, "what changes nothing writes nothing"


def test_hostile_text_executes_nothing(tmp_path: Path) -> None:
    one = replace(diagnosis().responses[0], text=HOSTILE, name=HOSTILE)
    one = replace(one, texts=tuple(HOSTILE if n % 2 else "a\nb\u202e" for n in range(len(one.token_T))))
    html = page.html_page(replace(diagnosis(), responses=(one,)), HOSTILE)
    html = html.replace("<head>", "<head><script>window.alert = () => { window.alerted = 1; }</script>", 1)
    seen, console = use(html, f"{USER} hostile()", tmp_path)
    assert console == [] and seen["alerted"] is None
    assert not {"IMG", "IFRAME"} & {*seen["tags"]} and seen["first"] == "a↵\nb\u202e"
    assert seen["whole"] == HOSTILE and seen["title"] == HOSTILE and HOSTILE in seen["option"]


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [1440, 390])
def test_the_page_fits_and_is_legible(width: int, dark: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "cause_words", lambda: WORDS)
    found = replace(
        diagnosis(), causes=(Cause("precision", 0.9, ("k3 is small.",)), Cause("temperature", 0.1, ("no",)))
    )
    seen, console = use(page.html_page(found), f"{USER} fits()", tmp_path, width, dark=dark)
    assert console == [] and seen["wide"] <= width and seen["small"] == []
    assert seen["type"] >= 12 and seen["first"] < 320, "the answer is on the first screen"
    assert seen["mark"] == {False: "rgb(2, 76, 171)", True: "rgb(87, 121, 243)"}[dark]
    shot = Path(os.environ.get("PAGES", tmp_path)) / f"diagnosis{width}{'dark' if dark else ''}.png"
    shot.parent.mkdir(parents=True, exist_ok=True)
    scheme = ["--blink-settings=preferredColorScheme=0"] if dark else []
    browse(tmp_path / "frame.html", width, tmp_path / "profile", f"--screenshot={shot}", *scheme)
    assert shot.stat().st_size > 20_000


@pytest.mark.parametrize("width", [1440, 390])
def test_a_study_s_page_has_the_explorer(width: int, tmp_path: Path) -> None:
    write_small(tmp_path)
    write_report(STUDY, tmp_path, tmp_path)
    html = (tmp_path / "summary.html").read_text(encoding="utf-8")
    seen, console = use(html, f"{USER} inside()", tmp_path, width)
    assert console == [] and seen["wide"] <= width
    assert [seen["folded"], seen["tokens"], seen["responses"]] == [True, 1, 6]
    assert seen["counts"]["icepop"][1].endswith("of 6") and seen["counts"]["dvp"][1].endswith("of 6")
