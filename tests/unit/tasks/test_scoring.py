"""The score beside math-verify and lm-eval's own task, both executed; docs/how-to/answers.md says where it differs."""

import importlib.util
import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.config.tasks.chain import ChainTask
from tailrl.tasks import scoring
from tailrl.tasks.answers import integer
from tailrl.tasks.problem import COMPARED
from tailrl.tasks.registry import load_task
from tailrl.tasks.scoring import SAME, _close, score
from tailrl.tasks.verifier import MAX_LENGTH, MathVerifier

ROOT = Path(__file__).parents[3]
Verdicts = tuple[int, int, int]
"""Ours, math-verify's, lm-eval's."""


# --- two references ------------------------------------------------------------------------------------


@cache
def lm_eval_aime() -> ModuleType:
    """The module that lm-eval's `aime25` scores with, without the seconds that importing all of lm-eval takes."""
    package = importlib.util.find_spec("lm_eval")
    assert package and package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0]) / "tasks" / "aime"
    assert "process_results: !function utils.process_results" in (folder / "aime25.yaml").read_text(encoding="utf-8")
    spec = importlib.util.spec_from_file_location("lm_eval_aime", folder / "utils.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def lm_eval_verdict(response: str, gold: str) -> int:
    return int(lm_eval_aime().process_results({"answer": gold}, [response])["exact_match"])


def math_verify_verdict(response: str, gold: str) -> int:
    """math-verify as its README calls it, without its alarms: every pair here is harmless."""
    from math_verify import parse, verify

    parsed = [parse(text, parsing_timeout=None) for text in (f"${gold}$", response)]
    return int(verify(parsed[0], parsed[1], timeout_seconds=None))


def verdicts(gold: str, response: str) -> Verdicts:
    return int(score(response, gold)), math_verify_verdict(response, gold), lm_eval_verdict(response, gold)


def read_pairs() -> dict[str, list[tuple[str, str]]]:
    """Pairs of a gold answer and a response, by the kind of difference; `agreed` has those without one."""
    pairs: dict[str, list[tuple[str, str]]] = {}
    with (ROOT / "tests/fixtures/answer_pairs.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            group = json.loads(line)
            boxed = [f"so \\boxed{{{box}}}." for box in group.get("boxes", ())]
            responses = [*boxed, *group.get("responses", ())]
            pairs.setdefault(group["rule"], []).extend((group["gold"], response) for response in responses)
    return pairs


def read_page() -> dict[str, tuple[str, str, Verdicts]]:
    """By kind of difference: the page's example, an answer and a response, and its verdicts."""
    page = (ROOT / "docs/how-to/answers.md").read_text(encoding="utf-8")
    row = r"^\| ([\w ]+) \| `(.+?)` \| `(.+?)` \| ([01]) \| ([01]) \| ([01]) \| \w.{20,} \|$"
    return {
        kind: (gold, response, (int(ours), int(math_verify), int(lm_eval)))
        for kind, gold, response, ours, math_verify, lm_eval in re.findall(row, page, re.MULTILINE)
    }


PAIRS, PAGE = read_pairs(), read_page()
EVERY = pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.slow)])
"""One pair in so many, of the two kinds that have hundreds."""


@pytest.fixture(autouse=True, scope="module")
def patient() -> Iterator[None]:
    """A worker that a busy machine does not make late."""
    with closing(MathVerifier(timeout=60.0)) as verifier, pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "_verifier", lambda: verifier)
        yield
        assert (verifier.timeouts, verifier.crashes) == (0, 0)


@EVERY
def test_the_score_is_that_of_math_verify_and_of_lm_eval(every: int) -> None:
    found = {pair: verdicts(*pair) for pair in PAIRS["agreed"][::every]}
    assert {pair: verdict for pair, verdict in found.items() if len(set(verdict)) > 1} == {}
    rights = sum(verdict[0] for verdict in found.values())
    assert min(rights, len(found) - rights) > 100 / every, "both verdicts are tried"


@EVERY
@pytest.mark.parametrize("kind", sorted(PAIRS.keys() - {"agreed"}))
def test_where_the_score_differs_the_page_says_so(kind: str, every: int) -> None:
    """Each pair of a kind: who is followed is the same as in the page's example, and somebody differs."""
    gold, response, published = PAGE[kind]
    assert (gold, response) in PAIRS[kind] or (gold, f"so {response}.") in PAIRS[kind]
    assert verdicts(gold, response) == published
    followed = [one == published[0] for one in published[1:]]
    for pair in PAIRS[kind][:: every if kind == "spelling" else 1]:
        ours, math_verify, lm_eval = verdicts(*pair)
        assert not ours == math_verify == lm_eval, pair
        for reference, agrees in zip((math_verify, lm_eval), followed, strict=True):
            assert not agrees or reference == ours, pair


def test_every_kind_of_the_page_has_pairs() -> None:
    assert PAGE.keys() == PAIRS.keys() - {"agreed"}
    assert len({pair for pairs in PAIRS.values() for pair in pairs}) == sum(map(len, PAIRS.values())) == 594


FORTY_TWO = ["42.0", r"\text{42}", "x=42", r"42^\circ", "42°", r"42\%", r"\frac{84}{2}", "{42}", "(42)", "042", "42"]


@pytest.mark.parametrize("box", FORTY_TWO)
@pytest.mark.parametrize("gold", ["42", r"42^\circ", r"\frac{84}{2}"])
def test_one_rule_whatever_the_spelling(gold: str, box: str) -> None:
    assert score(f"It is $\\boxed{{{box}}}$.", gold) == 1.0
    assert score(f"It is $\\boxed{{{box.replace('4', '5')}}}$.", gold) == 0.0


# --- integers ------------------------------------------------------------------------------------------

PLAIN = [sign + digits for sign in ("", "-", "+", "−") for digits in ("7", "0", "07", "0070", "1000", "9" * 20)]
GROUPED = [sign + digits for sign in ("", "-") for digits in ("1,000", "1,234,567", "1{,}234", r"1,\!234")]


@pytest.mark.parametrize("around", ["{}", " {}\n", "${}$", "$ {} $"])
@pytest.mark.parametrize("written", PLAIN + GROUPED)
def test_comparing_integers_here_gives_math_verifys_verdict(
    monkeypatch: pytest.MonkeyPatch, written: str, around: str
) -> None:
    """The pairs that `same_math` compares itself: math-verify, asked about the same two, says the same."""
    monkeypatch.setattr(scoring, "_verifier", None)
    answer, value = around.format(written), integer(written)
    assert value is not None
    for gold, same in ((written, True), (str(value), True), (str(value + 1), False), (str(-value - 1), False)):
        assert scoring.same_math(answer, gold) is same
        assert math_verify_verdict(f"\\boxed{{{answer}}}", gold) == same


WRITTEN = st.tuples(st.sampled_from(["", "-", "- ", "+", "−"]), st.integers(0, 10**9), st.sampled_from(["{}", "{:,}"]))


@given(WRITTEN, st.sampled_from([r"\,{}\;", "~{}~", r"\ {}\quad", r"$\!{}\:$"]))
def test_spaces_do_not_change_an_integer(written: tuple[str, int, str], around: str) -> None:
    sign, value, style = written
    box = around.format(sign + style.format(value))
    assert score(f"\\boxed {{{box}}}", str(-value if sign in ("-", "- ", "−") else value)) == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"It is \boxed{070}.", "70", 1.0),
        (r"It is \boxed{70}.", " 070 ", 1.0),
        (r"\boxed{71}", "70", 0.0),
        (r"\boxed{70} \boxed{71}", "70", 0.0),
        ("70", "70", 0.0),
        ("", "0", 0.0),
        (r"\boxed{-3}", "-3", 1.0),
        ("one half", r"\frac12", 0.0),
    ],
)
def test_integers_and_missing_boxes_need_no_worker(
    monkeypatch: pytest.MonkeyPatch, response: str, answer: str, reward: float
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    monkeypatch.setattr(scoring, "_verifier", None)
    assert score(response, answer) == reward


@pytest.mark.parametrize("task", [ArithmeticTask(problems=50), ChainTask(name="chain", problems=50)])
def test_a_copied_sum_is_no_answer_to_it(monkeypatch: pytest.MonkeyPatch, task: ArithmeticTask | ChainTask) -> None:
    """To math-verify it would be; nor does a reward of these tasks ever wait for its worker."""
    monkeypatch.setattr(scoring, "_verifier", None)
    for problem in load_task(task).problems:
        copied = problem.prompt.strip().removesuffix("=").rpartition(":")[2]
        assert score(f"\\boxed{{{copied}}}", problem.answer, problem.compared) == 0.0
        assert score(f"\\boxed{{{problem.answer}.0}}", problem.answer, problem.compared) == 0.0
        assert score(f"\\boxed{{ {problem.answer}}}", problem.answer, problem.compared) == 1.0
    assert math_verify_verdict(r"\boxed{17+15-12}", "20") == 1


def test_every_way_to_compare_has_its_function() -> None:
    assert tuple(SAME) == COMPARED


# --- the worker ----------------------------------------------------------------------------------------


def test_other_answers_are_scored_by_one_lasting_worker() -> None:
    def worker() -> int:
        running = scoring._verifier()._worker
        assert running is not None
        return running.pid

    assert score(r"so \boxed{0.5}", r"\frac12") == 1.0
    first = worker()
    assert score(r"so \boxed{0.4}", r"\frac12") == 0.0
    assert worker() == first


def test_limits_make_an_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tower of powers, which math-verify would not finish, and a text that is too long for it."""
    with closing(MathVerifier(timeout=1.0)) as verifier:
        monkeypatch.setattr(scoring, "_verifier", lambda: verifier)
        assert score(r"\boxed{9^{9^{9^{9}}}}", "42") == 0.0
        assert score(f"\\boxed{{{'0' * MAX_LENGTH}42.0}}", "42") == 0.0
        assert (verifier.timeouts, verifier.unparsed) == (1, 1)
    assert score(f"\\boxed{{{'0' * MAX_LENGTH}42}}", "42") == 1.0


def test_answers_without_a_verdict_are_said_at_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    running = MathVerifier()
    _close(running)
    assert capsys.readouterr().err == ""
    running.timeouts, running.crashes = 2, 1
    _close(running)
    assert capsys.readouterr().err == (
        "tailrl: math-verify came to no verdict on 3 answers, which count as wrong: "
        "2 took too long, 1 ended its process\n"
    )
