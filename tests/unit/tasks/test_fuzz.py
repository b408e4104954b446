r"""Answers by the thousand: the reader of integers against another one, and math-verify's worker against anything."""

import random
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from tailrl.tasks.answers import MAX_DIGITS, integer, last_boxed
from tailrl.tasks.scoring import score
from tailrl.tasks.verifier import MathVerifier

# --- integers ------------------------------------------------------------------------------------------

SPACES = (r"\,", r"\;", r"\:", r"\!", r"\ ", r"\quad", r"\qquad", "~")
PIECES = (*SPACES, *"0123456789", "000", "12", "345", ",", r",\!", "{,}", "-", "−", "+", "$", " ", "\n", "\u3000")
RARE = ("\\", "{", "}", ".", "x", r"\boxed{", r"\boxed {", "}", r"\{", r"\}", "٣", "²", "\x00", "\ud800", "1" * 700)


def after_spaces(text: str) -> str:
    """What is left when the spaces at the start, plain and LaTeX's, are taken away one by one."""
    while text:
        known = next((space for space in SPACES if text.startswith(space)), text[0] if text[0].isspace() else "")
        if not known:
            return text
        text = text[len(known) :]
    return text


def integer_by_hand(text: str) -> int | None:
    """Another reader of the same language, without regular expressions."""
    if text.count("$") == 2:
        before, inside, after = text.split("$")
        if not after_spaces(before) and not after_spaces(after):
            text = inside
    text = after_spaces(text)
    sign = -1 if text[:1] in ("-", "−") else 1
    if text[:1] in ("-", "−", "+"):
        text = after_spaces(text[1:])
    digits = run_of_digits(text)
    rest = text[len(digits) :]
    if 1 <= len(digits) <= 3 and digits[0] != "0":
        for comma in (r",\!", "{,}", ",", r"\,"):
            left, grouped = rest, digits
            while left.startswith(comma) and len(group := run_of_digits(left[len(comma) :][:3])) == 3:
                left, grouped = left[len(comma) + 3 :], grouped + group
            if len(grouped) > len(digits) and not after_spaces(left):
                digits, rest = grouped, left
                break
    if not digits or after_spaces(rest) or len(digits.lstrip("0")) > MAX_DIGITS:
        return None
    return sign * int(digits.lstrip("0") or "0")


def run_of_digits(text: str) -> str:
    return text[: next((i for i, c in enumerate(text) if c not in "0123456789"), len(text))]


def compare_readers(start: int, count: int) -> int:
    """Reads texts of at most 12 pieces in both ways; how many of them are integers."""
    rng, integers = random.Random(start), 0
    for _ in range(count):
        pieces = rng.choices(PIECES, k=rng.randrange(9))
        pieces += rng.choices(RARE, k=rng.choice((0, 0, 0, 1, 3)))
        rng.shuffle(pieces)
        text = "".join(pieces)
        value = integer(text)
        assert value == integer_by_hand(text), ascii(text)
        assert score(f"so \\boxed{{{text}", "7", "integer") in (0.0, 1.0)
        boxed = last_boxed(f"\\boxed{{{text}}}")
        assert boxed == text or not set(text).isdisjoint("\\{}"), ascii(text)
        integers += value is not None
    return integers


def test_two_readers_agree() -> None:
    integers = compare_readers(0, 20_000)
    assert 1_000 < integers < 10_000, "both kinds are tried"


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(st.integers(0, 2**64))
def test_two_readers_agree_on_a_million(start: int) -> None:
    compare_readers(start, 1000)


# --- anything else -------------------------------------------------------------------------------------

CANARY = "tailrl-canary"
SNIPPETS = r"""
\frac{1}{2} \frac \sqrt{ \sqrt[3]{ \left( \right) \{ \} { } ( ) [ ] x y n 1 2 10 0.5 1e5 % ^ ^{ _ _{ = < \le \ne \pm + -
* / \cdot \div ! , ; | \infty \pi e i \sin \log \ln \binom \text{ \mathrm{ \begin{pmatrix} \end{pmatrix} & \\ \cup \in
\mathbb{R} $ \ \int \sum_{k=1}^{n} \lim \boxed{ \% ^\circ \overline{ \emptyset ½
"""
LATEX = [*SNIPPETS.split(), " ", "\n", "\x00"]
CODE = (
    f"__import__('os').mkdir('{CANARY}')",
    f"open('{CANARY}', 'w')",
    f"exec(\"open('{CANARY}', 'w')\")",
    f"[c for c in ().__class__.__base__.__subclasses__() if c.__name__ == 'Popen'][0](['touch', '{CANARY}'])",
    f"\\text{{__import__('os').mkdir('{CANARY}')}}",
    f"\\operatorname{{eval}}(\\text{{open('{CANARY}', 'w')}})",
    f"\\input{{|touch {CANARY}}}",
    f"\\write18{{touch {CANARY}}}",
    f"$(touch {CANARY})",
)
ANSWERS = st.lists(
    st.one_of(st.sampled_from(LATEX), st.sampled_from(LATEX), st.sampled_from(CODE), st.text(max_size=4)), max_size=14
).map("".join)


def fuzz(examples: int, verifier: MathVerifier) -> None:
    """Gives the worker so many answers, as what is to be compared and as what to compare it with."""

    @seed(2512)
    @settings(max_examples=examples, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(ANSWERS, st.sampled_from((r"\frac{1}{2}", "x+1", r"\{1,2\}", "(0,1]")) | ANSWERS)
    def compare(answer: str, gold: str) -> None:
        assert verifier.equal(answer, gold) in (True, False)

    compare()


@pytest.mark.slow
@pytest.mark.parametrize("examples", [60, pytest.param(10_000, marks=pytest.mark.long)])
def test_no_answer_does_more_than_lose(examples: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was given, nothing of it ran, and the next answer gets its due."""
    monkeypatch.chdir(tmp_path)
    with closing(MathVerifier(timeout=2.0)) as verifier:
        fuzz(examples, verifier)
        print(f"{examples} answers: {verifier.timeouts} late, {verifier.crashes} deadly, {verifier.unparsed} unread")
        assert verifier.timeouts + verifier.crashes <= examples / 20
        verifier.close()  # its worker has a limit of its own
        verifier._timeout = 60.0
        assert verifier.equal(r"\frac12", "0.5")
        assert not verifier.equal(r"\frac13", "0.5")
    assert list(tmp_path.iterdir()) == []
