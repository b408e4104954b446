"""The page of a diagnosis: the answer first, every part, nothing that runs or loads; and the text for a terminal."""

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from diagnosis_fixture import HOSTILE, REMEDIES, WORDS, diagnosis_of, noisy, noisy_rows
from log_fixture import plain_rows, write_lines
from tokenizers import Tokenizer, models

from tailrl.cli.commands import diagnose
from tailrl.diagnosis import causes, headline, page
from tailrl.diagnosis.advice import framework_of
from tailrl.diagnosis.causes import Cause
from tailrl.diagnosis.diagnosis import Diagnosis, diagnose_parts
from tailrl.diagnosis.log import LoggedRow, pack
from tailrl.diagnosis.metrics import frameworks, quantity
from tailrl.diagnosis.replay import configuration


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causes, "cause_words", lambda: WORDS)


def with_causes(*causes: Cause) -> Diagnosis:
    return replace(noisy(noise=0.3), causes=causes)


class Reader(HTMLParser):
    """Tags with attributes, and the text outside scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.inside = tag

    def handle_endtag(self, _: str) -> None:
        self.inside = ""

    def handle_data(self, data: str) -> None:
        if self.inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def first_line(diagnosis: Diagnosis) -> str:
    return page.terminal_page(diagnosis).splitlines()[2].strip("*")


def why(*causes: Cause) -> str:
    return headline.cause_sentence(causes)


@pytest.mark.usefixtures("words")
def test_the_answer_comes_first_bad_or_not_then_why_then_what_to_do() -> None:
    sure = with_causes(Cause("precision", 0.95, ("k3 is small.",)), Cause("temperature", 0.1, ("It fits.",)))
    answer = headline.headline(sure)
    k3 = sure.measured.token_mean("k3")
    assert answer.verdict.startswith(f"Bad, unless weights or caches have few bits: k3 is {k3.mean:.2g} nats a token")
    assert answer.verdict.endswith("(0.002 to 0.03).")
    read = Reader(page.html_page(sure))
    parts = [answer.verdict, "Cause, 95% sure: title of precision.", "Do:", "mean |Δ|, nats a token", "k3 is small."]
    places = [read.text.index(part) for part in parts]
    assert places == sorted(places)
    text = page.terminal_page(sure)
    assert first_line(sure) == answer.verdict
    assert text.index("Cause, 95% sure") < text.index("- Do: Have the engine's weights") < text.index("| number |")
    many = page.html_page(with_causes(*[Cause("precision", 0.2, ("`a` <b>",))] * 5))
    assert "2 less probable causes" in many and many.count("<code>a</code> &lt;b&gt;") == 5


@pytest.mark.usefixtures("words")
def test_a_cause_is_never_a_fact_where_another_is_close() -> None:
    precision, temperature = "title of precision", "title of temperature"
    assert why(Cause("precision", 0.95, ())) == f"Cause, 95% sure: {precision}."
    assert why(Cause("precision", 0.6, ()), Cause("temperature", 0.2, ())) == f"Probable cause, 60% sure: {precision}."
    both = f"Two causes fit: {precision} (54%) or {temperature} (31%)."
    assert why(Cause("precision", 0.54, ()), Cause("temperature", 0.31, ())) == both
    unsure = f"No cause is sure; the most probable one: {temperature} (30%)."
    assert why(Cause("temperature", 0.3, ()), Cause("precision", 0.11, ())) == unsure
    assert why(Cause("unknown", 0.8, ())) == "No known cause fits (80% sure)."
    assert headline.cause_sentence((), 7) == "No cause can be told from 7 tokens."


@pytest.mark.usefixtures("words")
def test_what_can_be_mended_comes_before_noise() -> None:
    second = with_causes(Cause("precision", 0.9, ()), Cause("temperature", 0.8, ()))
    assert second.advice.kind == "fix" and second.advice.words == "Do what temperature needs."


@pytest.mark.usefixtures("words")
def test_until_it_is_fixed_the_lines_to_paste_are_in_the_terminal_too() -> None:
    names = (("reject_k3", 0.1), ("token_mask", 2.0))
    dropping = [replace(REMEDIES[0], name=name, threshold=c, ess=0.9, kept_k3=0.0) for name, c in names]
    fix = replace(with_causes(Cause("temperature", 0.9, ())), remedies=tuple(dropping))
    text = page.terminal_page(fix)
    assert "- Do: Do what temperature needs." in text
    assert "- Until then: rejection by the mean of k3, C = 0.1." in text
    assert "algorithm.rollout_correction.rollout_" in text
    framework = replace(fix, chosen_framework="TRL")
    lines = page.terminal_page(framework)
    assert "GRPOConfig(" in lines and "verl 0.9.1:" not in lines, "the reader's framework alone"
    whole = Reader(page.html_page(framework)).text
    assert whole.index("TRL 1.16.0") < whole.index("verl 0.9.1")


def test_the_advised_remedy_has_its_lines_in_each_framework() -> None:
    old = [replace(row, recomputed_T=row.sampler_T) for row in noisy_rows(6, 40, noise=0.3)]
    diagnosis = diagnosis_of(pack(old), remedies=(replace(REMEDIES[0], ess=0.9),))
    diagnosis = replace(diagnosis, causes=(Cause("stale", 0.9, ()),))
    text = Reader(page.html_page(diagnosis)).text
    assert diagnosis.advice.name == "token_tis"
    for one in configuration("token_tis", 2.0):
        assert " ".join(one.text.split()) in text and one.source in text
    assert "correction: {preset: verl/decoupled_token_is}" in text
    exact = diagnosis_of(pack([LoggedRow("", np.array([-1.0]), np.array([-1.0]))]))
    assert "in each framework" not in Reader(page.html_page(exact)).text


def test_the_verdict_without_a_cause() -> None:
    exact = diagnosis_of(pack([LoggedRow("", np.array([-1.0]), np.array([-1.0]))]))
    assert first_line(exact) == "Not bad: sampler and trainer agree to the last bit."
    assert headline.why(exact) == ("No mismatch that needs a cause.",)
    assert first_line(noisy()).startswith("Not bad: k3 is 0.0")
    nothing = diagnosis_of(pack([LoggedRow("", np.array([np.nan]), np.array([-1.0]))]))
    assert first_line(nothing) == "Nothing can be said: no token of this log has log-probs of both sides."
    text = Reader(page.html_page(nothing)).text
    assert "1 token left out: the sampler's NaN." in text


@pytest.mark.parametrize(
    ("floor", "size", "says"), [(2.0, 0.3, True), (0.3, 0.3, True), (0.3, 1e-5, True), (0.02, 0.3, False)]
)
def test_a_trainer_that_disagrees_with_itself_is_said_first(floor: float, size: float, says: bool) -> None:
    """Whatever else there may be: equal columns of an engine mean nothing where the trainer's own differ."""
    random = np.random.default_rng(0)
    trainer = [-random.exponential(1.0, 40) for _ in range(20)]
    moved = [np.minimum(logp_T + size * random.choice([-1.0, 1.0], 40), 0.0) for logp_T in trainer]
    again = [np.minimum(logp_T + floor * random.choice([-1.0, 1.0], 40), 0.0) for logp_T in trainer]
    rows = [LoggedRow("", one, two, again_T=three) for one, two, three in zip(moved, trainer, again, strict=True)]
    diagnosis = diagnosis_of(pack(rows))
    begins = "Nothing can be said of the sampler: the trainer disagrees with itself. Its log-probs of the same tokens, "
    assert first_line(diagnosis).startswith(begins) is says
    if says and size > 0.1:
        assert diagnosis.advice.kind == "fix" and "changes the trainer's numbers" in page.terminal_page(diagnosis)


def test_what_is_not_replayed_is_said_with_its_reason() -> None:
    text = Reader(page.html_page(noisy())).text
    assert "Not replayed: score centering and sampling-mask replay need the sampler's whole rows; a KL to" in text


def test_the_framework_of_a_log_is_its_formats_or_what_its_rows_say() -> None:
    measured = noisy().measured
    assert framework_of(measured) == ""
    for title, name in (("NeMo-RL, train_data_step*.jsonl", "NeMo-RL"), ("slime and miles, --save", "slime")):
        assert framework_of(replace(measured, titles=Counter({title: 3}))) == name
    assert framework_of(replace(measured, frameworks=Counter({"VERL 0.9": 3}))) == "verl"


def test_every_framework_has_its_numbers_rules_and_sources() -> None:
    text = Reader(page.html_page(noisy())).text
    for framework, metrics in frameworks().items():
        assert framework in text
        for name, known in metrics.items():
            assert name in text
            assert all(rule.source in text and rule.words in text for rule in known.rules)
    floor = page._floor(noisy().measured, "abs_logp")
    assert f"noise floor {floor}" in text


def test_remedies_charts_and_what_is_lacking() -> None:
    diagnosis = replace(noisy(), remedies=REMEDIES)
    read = Reader(page.html_page(diagnosis))
    assert [a.get("class") for tag, a in read.tags if tag == "tr"].count("rest") == 0, "one threshold each"
    assert "91.00%" in read.text and "0.9995" in read.text
    ids = [attributes["id"] for tag, attributes in read.tags if tag == "figure"]
    assert ids == [f"chart-{name}" for name in ("size", "sign", "joint", "position", "length", "response")]
    assert "versions of the sampler's weights. It would tell: stale weights." in read.text
    assert "ranks of the sampled tokens. It would" not in read.text, "the log has them"


def test_the_page_loads_nothing_and_hostile_text_stays_text() -> None:
    response = replace(noisy().responses[0], text=HOSTILE, texts=(HOSTILE,) * 40, name=HOSTILE)
    text = page.html_page(replace(noisy(), responses=(response,)), HOSTILE, f"## More\n\n{HOSTILE}\n")
    read = Reader(text)
    assert [a for tag, a in read.tags if tag == "script"] == [{"type": "application/json"}, {}]
    assert not {tag for tag, _ in read.tags} & {"img", "iframe", "object", "embed", "b1"}
    for tag, attributes in read.tags:
        assert not [name for name in attributes if name.startswith("on")], tag
        links = {name: value for name, value in attributes.items() if name in ("src", "href", "action")}
        assert all((value or "").startswith(("#", "data:,")) for value in links.values()), (tag, links)
    assert "@import" not in text and "url(" not in text.replace("url(#", "")
    (data,) = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert data["texts"][0] == HOSTILE[:200] and data["text"] == HOSTILE


@pytest.mark.usefixtures("words")
def test_the_terminal_is_short_and_says_where_the_page_is() -> None:
    text = page.terminal_page(with_causes(Cause("precision", 0.9, ("k3 is small.",))))
    assert len(text.splitlines()) < 30 and "--out page.html" in text
    assert "The whole page: a.html" in page.terminal_page(noisy(), "a.html")  # type: ignore[arg-type]
    assert not re.search(r"\n\n\n", text)


def test_the_command_prints_the_answer_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = write_lines(tmp_path / "log.jsonl", plain_rows())
    words = {f"word{number}": number for number in range(100)}
    Tokenizer(models.WordLevel(words, unk_token="word0")).save(str(tmp_path / "tokenizer.json"))
    diagnose([log], tmp_path / "page.html", tmp_path)
    assert f"The whole page: {tmp_path / 'page.html'}" in capsys.readouterr().out
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    first = json.loads(text.split('type="application/json">')[1].split("</script>")[0])[0]
    assert [word.strip() for word in first["texts"]] == [f"word{token}" for token in first["token"]]
    diagnose([log])
    assert "`--out page.html` writes them" in capsys.readouterr().out


@pytest.mark.parametrize("odd", [-np.inf, np.nan, 0.5])
def test_a_few_odd_log_probs_are_told_beside_the_cause_and_need_no_weights(odd: float) -> None:
    rows = noisy_rows(40, 40, 0.02)
    rows[3].sampler_T[4] = odd
    found = diagnose_parts([("", pack([replace(row, again_T=None) for row in rows]))])
    precision = Cause("precision", 0.96, ())
    nan = next(one for one in found.causes if one.name == "nan")
    found = replace(found, causes=(nan, precision))
    [reason] = headline.headline(found).why
    assert reason.startswith("Cause, 96% sure: rounding") and " or NaN" not in reason
    assert "The log also has NaN, infinite or positive log-probs (" in reason
    text = page.terminal_page(found)
    assert text.startswith("# Diagnosis of a log\n\n**Not bad")
    assert "Do: Find where they arise" in text and "Until then" not in text and "algorithm." not in text


def test_faults_alone_are_told_one_after_the_other() -> None:
    words = why(Cause("nan", 0.95, ()), Cause("shift", 0.99, ()))
    assert words.startswith("Cause, 95% sure: NaN") and words.endswith("The log also has tokens shifted (99%).")


def test_no_lines_to_paste_where_nothing_can_be_said() -> None:
    """Of negative log-likelihoods and of a constant, no number means anything, so no weight does."""
    for change in (lambda row_T: -row_T, lambda row_T: np.full(len(row_T), -1.0)):
        rows = [replace(row, sampler_T=change(row.sampler_T), again_T=None) for row in noisy_rows(40, 40, 0.5)]
        found = diagnose_parts([("", pack(rows))])
        assert headline.headline(found).verdict.startswith("Nothing can be said")
        assert found.advice.name is None and found.advice.kind == "fix"
        assert "in each framework" not in Reader(page.html_page(found)).text


def test_a_close_cause_that_can_be_mended_decides_where_the_size_does_harm() -> None:
    close = (Cause("precision", 0.51, ()), Cause("prompt", 0.43, ()))
    large = with_causes(*close)
    assert large.advice.words.startswith("Compare the token ids of one prompt")
    assert first_line(large).startswith("Bad, unless weights or caches have few bits"), "rounding fits too"
    assert replace(noisy(noise=0.02), causes=close).advice.kind == "none"
    assert with_causes(Cause("precision", 0.7, ()), Cause("prompt", 0.2, ())).advice.kind == "ask", "it is not close"


def test_few_bits_excuse_nothing_where_another_cause_is_named() -> None:
    assert first_line(with_causes(Cause("truncation", 0.99, ()))).startswith("Bad: k3 is ")


def test_rounding_of_another_size_than_number_formats_is_not_left_alone() -> None:
    found = replace(noisy(noise=1.0), causes=(Cause("precision", 0.9, ()),))
    assert found.advice.kind == "fix" and found.advice.words.startswith("Find the cause first.")


def test_what_grows_is_not_called_rounding() -> None:
    rows = [
        replace(row, step=float(step), again_T=None)
        for step, noise in enumerate((0.02, 0.1, 0.6))
        for row in noisy_rows(20, 40, noise, seed=step)
    ]
    found = replace(diagnose_parts([("", pack(rows))]), places=(), causes=(Cause("precision", 0.9, ()),))
    [reason] = headline.headline(found).why
    assert reason.startswith("Token by token it looks like rounding, but rounding does not grow with the steps.")
    assert "90%" not in reason and first_line(found).startswith("Bad: k3")
    assert found.advice.words.startswith("Rounding does not grow like this.")


def test_an_interval_of_k3_ends_at_zero_and_one_token_is_not_cured_by_more_responses() -> None:
    rows = [replace(row, again_T=None) for row in noisy_rows(60, 40, 0.02)]
    rows[0].sampler_T[1] = rows[0].trainer_T[1] - 6.5
    found = diagnose_parts([("", pack(rows))])
    assert quantity(found.measured, "k3").low == 0 and quantity(found.measured, "k1").low < 0
    assert [place.grouping for place in found.places] == ["tokens"]
    assert " [0, " in first_line(found) and "more responses would tell" not in first_line(found)
