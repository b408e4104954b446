"""The first screen: its numbers at their places, cards in order, and a page that is whole, safe and asks nobody."""

import math
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from claims_fixture import around, line_of, made, results_of

from tailrl.artifacts.claims import Verdict
from tailrl.claims.finding import ASIDE, CHANGES, CONTRADICTED, MEASURED, REPRODUCED, UNDECIDED, UNTESTABLE
from tailrl.config.study import Study
from tailrl.reports.axes import arm_styles
from tailrl.reports.curves import Curve
from tailrl.reports.curves import curve as curve_of
from tailrl.reports.overview import charts
from tailrl.reports.overview.cards import DECIDED_GROUP, GROUPS, MEASURED_GROUP, OPEN_GROUP, SILENT_GROUP, cards, tally
from tailrl.reports.overview.screen import first_screen
from tailrl.reports.overview.study import write_report
from tailrl.reports.overview.verdicts import judge
from tailrl.reports.page import page
from tailrl.reports.scores.numbers import GreedyScore, gains_over_base, policy_scores
from tailrl.stats.intervals import Interval, problem_interval
from tailrl.stats.tests import Difference
from tailrl.tracking.metrics import K3_UNMASKED, REWARD

ARMS = ("naive", "dvp", "mine")
KEYS = charts.keys_of(arm_styles(ARMS), {})
VOID = {"meta", "link", "input", "br", "hr", "wbr", "img"}


def curve(arm: str, values: list[float], width: float = 0.1) -> Curve:
    mean_N = np.array(values)
    return Curve(arm, "m", np.arange(len(values)), mean_N, mean_N - width, mean_N + width, 1)


class Drawn:
    """The places in a chart of curves: of the ticks by their labels, and of the points of each arm's line."""

    def __init__(self, panel: charts.Panel) -> None:
        across = re.findall(r'text-anchor: middle; [^>]*x="([\d.]+)"[^>]*>([-\d.e]+)</text>', panel.svg)
        self.x = {float(label): float(place) for place, label in across}
        up = re.findall(
            r'd="M [\d.]+ ([\d.]+) \nL [^>]*var\(--line\)[^>]*>\s*</g>\s*<g>\s*<text[^>]*>([^<]*)<', panel.svg
        )
        self.y = {float(label): float(place) for place, label in up}
        self.lines, self.values = {}, {}
        for head, body in re.findall(
            r'<g class="series[^"]*" data-name=(.*?)><title>.*?<path d="([^"]*)"', panel.svg, re.DOTALL
        ):
            values = dict(re.findall(r'data-(\w+)="([^"]*)"', f"data-name={head}"))
            self.values[values["name"]] = values
            self.lines[values["name"]] = [(float(x), float(y)) for x, y in re.findall(r"[ML] ([\d.]+) ([\d.]+)", body)]


def test_a_curve_lies_where_the_ticks_say() -> None:
    drawn = Drawn(charts.curve_chart("c", "t", [curve("dvp", [0.0, 0.5, 1.0], width=0.0)], KEYS))
    line, values = drawn.lines["dvp"], drawn.values["dvp"]
    assert [x for x, _ in line] == [drawn.x[0], drawn.x[1], drawn.x[2]]
    assert (line[0][1], line[2][1]) == (drawn.y[0], drawn.y[1]) and drawn.y[1] < drawn.y[0], "up is more"
    assert line[1][1] == pytest.approx((drawn.y[0] + drawn.y[1]) / 2, abs=0.02)
    assert (values["steps"], values["values"]) == ("0 1 2", "0 0.5 1")
    assert [float(x) for x in values["x"].split()] == pytest.approx([x for x, _ in line], abs=0.06)


@pytest.mark.parametrize("values", [[1e-5, 1e-3, 1.0], [0.0, 1e-4, 1e-2], [-1e-3, 0.0, 1e-2]])
def test_magnitudes_lie_where_the_ticks_say(values: list[float]) -> None:
    drawn = Drawn(charts.curve_chart("c", "t", [curve("dvp", values, width=0.0)], KEYS, magnitude=True))
    y = drawn.y
    assert len(y) >= 3 and (0.0 in y) == (0.0 in values)
    for value, (_, place) in zip(values, drawn.lines["dvp"], strict=True):
        assert place == pytest.approx(y[value], abs=0.11) if value in y else True
    assert sorted(y.values(), reverse=True) == [y[label] for label in sorted(y)]
    assert set(values) & set(y)


def test_gaps_infinity_and_no_values() -> None:
    nan, inf = math.nan, math.inf
    panel = charts.curve_chart("c", "t", [curve("dvp", [1, nan, 3, inf, 5]), curve("naive", [nan] * 5)], KEYS)
    drawn = Drawn(panel)
    assert list(drawn.lines) == ["dvp"] and drawn.values["dvp"]["values"] == "1 3 5"
    assert "nan" not in panel.svg and "inf" not in panel.svg
    assert "not recorded" in charts.curve_chart("c", "t", [curve("dvp", [nan, inf])], KEYS).svg
    assert "<use" in charts.curve_chart("c", "t", [curve("dvp", [0.3])], KEYS, magnitude=True).svg


def test_a_long_curve_keeps_its_extremes() -> None:
    values = np.zeros(5000)
    values[1234] = 1.0
    panel = charts.curve_chart("c", "t", [curve("dvp", values.tolist(), width=0.0)], KEYS)
    drawn = Drawn(panel)
    assert len(drawn.values["dvp"]["steps"].split()) <= charts.MOST_POINTS
    (band,) = re.findall(r'<g class="series arm-1">.*?<path id="[^"]*" d="([^"]*)"', panel.svg, re.DOTALL)
    highest = min(float(y) for y in re.findall(r"[ML] [\d.]+ (-[\d.]+)", band))
    assert 260 + highest == pytest.approx(drawn.y[1], abs=0.1), "the band reaches the one step at 1"


def test_a_score_lies_where_the_ticks_say() -> None:
    """The mean's mark of an arm with one seed, between the ticks beside it."""
    results = results_of(naive=made({}, reward=around(0.5, 0.1)))
    gains, policies = gains_over_base(results), policy_scores(results)
    base = problem_interval(results.base.scores[0].correct_PK)
    keys = charts.keys_of(arm_styles(results.arms), {})
    svg = charts.score_chart(gains, policies, base, keys, 2).svg
    ticks = {float(label): float(x) for x, label in re.findall(r'middle; [^>]*x="([\d.]+)"[^>]*>([\d.]+) %<', svg)}
    per_percent = (max(ticks.values()) - min(ticks.values())) / (max(ticks) - min(ticks))
    (mean,) = re.findall(r'<use [^>]*x="([\d.]+)"[^>]*stroke: var\(--page\)', svg)
    expected = min(ticks.values()) + per_percent * (100 * gains[0].avg.mean - min(ticks))
    assert float(mean) == pytest.approx(expected, abs=0.05)
    assert re.search(r'class="series row arm-0" data-tip="naive: [^"]*; seeds: [\d., ]+"', svg)


def test_a_greedy_score_is_an_open_diamond_in_its_arms_row_where_the_ticks_say() -> None:
    """The arm has 50 % at temperature 1 and 60 % greedily, the untrained policy 55 %."""
    results = results_of(naive=made({}, score=around(0.5, 0.1)))
    base = problem_interval(results.base.scores[0].correct_PK)
    keys = charts.keys_of(arm_styles(results.arms), {})
    none = Difference(0.0, 0.0, 0.0, 1.0, 3)
    greedy = [
        GreedyScore(arm, Interval(mean, mean - 0.02, mean + 0.02, 3), none, math.nan, 1.0, 0.0)
        for arm, mean in (("base", 0.55), ("naive", 0.6))
    ]
    found = gains_over_base(results), policy_scores(results), base, keys, 2
    svg, without = charts.score_chart(*found, greedy).svg, charts.score_chart(*found).svg
    ticks = {float(label): float(x) for x, label in re.findall(r'middle; [^>]*x="([\d.]+)"[^>]*>([\d.]+) %<', svg)}
    per_percent = (max(ticks.values()) - min(ticks.values())) / (max(ticks) - min(ticks))
    places = [float(x) for x in re.findall(r'<use [^>]*x="([\d.]+)"[^>]*fill: var\(--page\)', svg)]
    assert places == pytest.approx([min(ticks.values()) + per_percent * (60 - min(ticks))], abs=0.06)
    assert "greedy: 60.0 % [58.0, 62.0]" in svg and "greedy" not in without


def verdict(claim: str, outcome: str, arms: str = "dvp, naive", **cells: str) -> Verdict:
    return line_of(claim, claim=f"about {claim}", verdict=outcome, arms=arms, **cells)


MIXED = [
    verdict("a", UNTESTABLE),
    verdict("b", MEASURED),
    verdict("c", UNDECIDED),
    verdict("d", UNDECIDED),
    verdict("e", UNTESTABLE, ""),
    verdict("d", CONTRADICTED, "mine, naive"),
    verdict("f", ASIDE),
    verdict("g", REPRODUCED),
    verdict("g", UNTESTABLE),
    verdict("h", CHANGES, unit="share of samples"),
]


def test_decided_cards_come_first_and_silent_ones_last() -> None:
    found = cards(MIXED)
    assert list(found) == list(GROUPS) == [DECIDED_GROUP, OPEN_GROUP, MEASURED_GROUP, SILENT_GROUP]
    ids = {group: [card.claim.id for card in own] for group, own in found.items()}
    assert list(ids.values()) == [["h", "d", "g"], ["c"], ["b"], ["a", "e", "f"]]
    assert [line.verdict for line in found[DECIDED_GROUP][1].lines] == [CONTRADICTED, UNDECIDED]
    assert sum(len(card.lines) for own in found.values() for card in own) == len(MIXED)
    assert tally(found) == (
        "Claims: 3 decided (for at least one set of arms), 1 not decided, 1 measured, "
        "3 to which this study cannot speak."
    )


class Reader(HTMLParser):
    """Every element closed where it must be, and what the page names."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: list[str] = []
        self.folded: list[str] = []
        self.claims: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute twice: {tag} {attrs}"
        self.tags.append(tag)
        self.ids += filter(None, [given.get("id")])
        self.links += [v for k, v in attrs if v and (k in ("href", "src", "xlink:href") or k.startswith("on"))]
        if claim := given.get("data-claim"):
            self.claims.append(claim)
            self.folded += [claim] if "details" in self.open else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}, line {self.getpos()[0]}"
        self.open.pop()

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def html(whole: tuple[Study, Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    out = tmp_path_factory.mktemp("screen")
    study, folder = whole
    hostile = {"description": 'Of <script>alert(1)</script> and "><img src=http://a/b.png>'}
    write_report(study.model_copy(update=hostile), folder, out)
    for name in ("delta", "kept"):
        assert (out / "figures" / f"{name}.svg").is_file()
    return (out / "summary.html").read_text(encoding="utf-8")


def test_the_page_is_whole_and_asks_nobody(html: str) -> None:
    found = read(html)
    assert [name for name, number in Counter(found.ids).items() if number > 1] == []
    assert all(re.match(r"#|tables/\w+\.csv$|figures/\w+\.(svg|pdf)$|data:,$", link) for link in found.links), (
        found.links
    )
    for own in re.findall(r"<(?:style|script)[^>]*>.*?</(?:style|script)>", html, re.DOTALL):
        assert not re.search(r"//|@import|url\(|fetch|XMLHttp", re.sub(r"^ *// .*$", "", own, flags=re.MULTILINE)), own
    assert found.tags.count("script") == 3 and "img" not in found.tags
    targets = [link[1:] for link in found.links if link.startswith("#")]
    assert set(targets) - set(found.ids) == set()
    drawings = re.findall(r"<svg id=.*?</svg>", html, re.DOTALL)
    assert len(drawings) == 3 + html.count('type="checkbox" id="arm-')
    for svg in drawings:
        ElementTree.fromstring(svg)


def test_the_page_opens_with_what_was_found(html: str) -> None:
    order = ["<h1>", "<ul>", "Arms: switch", "chart-score", "chart-reward", "chart-k3", "Of &lt;",
             'id="claims"', "<h3>Decided", 'class="silent"', 'id="held-out-score"', 'id="what-ran"']  # fmt: skip
    body = html[html.index("<body>") :]
    assert sorted(order, key=body.index) == order
    first = body[: body.index("chart-score")]
    assert first.count("<li>") == 2, "of the arms' mismatch, and its size"
    assert "| claim |" not in html and "<th>claim</th>" not in html, "cards stand for the table of claims"


def test_each_claim_is_one_card_and_the_silent_ones_are_folded(html: str) -> None:
    found = read(html)
    assert len(found.claims) == len(set(found.claims)) > 20
    number = len(found.folded)
    assert f"<summary>This study cannot speak to {number} claims</summary>" in html
    assert found.claims[-number:] == found.folded


def test_every_arm_has_its_switch_its_row_and_its_curves(whole: tuple[Study, Path], html: str) -> None:
    for number, _ in enumerate(whole[0].arms):
        assert f'id="arm-{number}" checked' in html
        assert f".screen:has(#arm-{number}:not(:checked)) .arm-{number} {{ display: none; }}" in html
        assert len(re.findall(rf'class="series row arm-{number}"', html)) >= 4, "its name, its score, seeds, the mean"
        assert len(re.findall(rf'class="series arm-{number}"', html)) == 2 * 2, "two bands, two lines"


def test_a_name_of_an_arm_is_text() -> None:
    """Studies allow no such names; the page does not rely on it."""
    name = '"><script>alert(1)</script>'
    results = results_of(**{name: made({}, reward=around(0.5, 0.1), unmasked=around(0.01, 0.001))})
    curves = [curve_of(results.runs[name], key) for key in (REWARD, K3_UNMASKED)]
    shown = first_screen(results, gains_over_base(results), policy_scores(results), curves, judge(results))
    html = page("# t\n\n- a\n\nb\n\n## Claims\n\nc\n", [], shown)
    assert html.count("<script>") == 1 and html.count("&lt;script&gt;") > 5
    assert read(html).tags.count("b") == 0
