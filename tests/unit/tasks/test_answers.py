import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tailrl.tasks.answers import MAX_DIGITS, integer, last_boxed


def boxed_integer(text: str) -> int | None:
    """The integer in the last box of a response, as `scoring` reads it."""
    content = last_boxed(text)
    return None if content is None else integer(content)


@pytest.mark.parametrize(
    ("text", "content"),
    [
        (r"\boxed{70}", "70"),
        (r"first \boxed{1}, then \boxed{2}.", "2"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{\boxed{5}}", "5"),
        (r"\boxed {7}", "7"),
        ("\\boxed\n{7}", "7"),
        (r"\boxed{}", ""),
        (r"\boxed{\{1,2\}}", r"\{1,2\}"),
        (r"\boxed{[0,1\}}", r"[0,1\}"),
        (r"\boxed{a\\}b}", r"a\\"),
        (r"\boxed{3} and no more \boxed", "3"),
        (r"\boxed{3}}", "3"),
        # A response cut off inside its last box gives no answer, whatever stood before.
        (r"\boxed{3} so \boxed{4", None),
        (r"\boxed{4\}", None),
        (r"\boxed{4\\\}", None),
        (r"\boxed{{4}", None),
        (r"\boxed 4", None),
        (r"\boxedtext{4}", None),
        (r"boxed{4}", None),
        (r"\fbox{4}", None),
        ("", None),
    ],
)
def test_last_boxed(text: str, content: str | None) -> None:
    assert last_boxed(text) == content


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("70", 70),
        ("070", 70),
        ("0", 0),
        ("000", 0),
        ("-0", 0),
        ("+5", 5),
        ("-5", -5),
        ("−5", -5),
        ("- 5", -5),
        (" \n70\t", 70),
        (r"\,70\;", 70),
        (r"\ 70\!", 70),
        (r"~70\quad", 70),
        (r"70\qquad", 70),
        ("$70$", 70),
        (r" $\,-70$ ", -70),
        ("1,234", 1234),
        ("1{,}234{,}567", 1234567),
        (r"10,\!000", 10000),
        (r"-12\,345", -12345),
    ],
)
def test_integer_reads(text: str, value: int) -> None:
    assert integer(text) == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "-",
        "--5",
        "+-5",
        "5-",
        "70.",
        "70.0",
        "7e1",
        "1_000",
        "0x10",
        "x=70",
        "70 apples",
        r"70^\circ",
        r"70\%",
        r"\text{70}",
        r"\frac{70}{1}",
        "{70}",
        "7 0",
        "1, 234",
        "1,23",
        "1,2345",
        "1234,567",
        "0,123",
        "1,234{,}567",
        ",123",
        "$70",
        "70$",
        "$$70$$",
        "$70$ $71$",
        r"\$70",
        r"70\quadrant",
        "70\\",
        "٧٠",
        "７０",
        "²",
        "None",
        "inf",
        "\x0070",
        "\ud800",
    ],
)
def test_integer_refuses(text: str) -> None:
    assert integer(text) is None


@pytest.mark.parametrize(
    ("response", "value"),
    [
        (r"So the answer is $\boxed{070}$.", 70),
        (r"\boxed{-0}", 0),
        (r"\boxed{7}\boxed{8}", 8),
        (r"\boxed{7} \boxed{\frac12}", None),
        (r"\boxed{7} \boxed{8", None),
        ("The answer is 70", None),
    ],
)
def test_boxed_integer(response: str, value: int | None) -> None:
    assert boxed_integer(response) == value


def test_the_number_of_digits_is_limited_after_leading_zeros() -> None:
    assert integer("9" * MAX_DIGITS) == 10**MAX_DIGITS - 1
    assert integer("9" * (MAX_DIGITS + 1)) is None
    assert integer("-" + "0" * 1_000_000 + "7") == -7
    assert integer("1" + ",000" * 213) == 10**639
    assert integer("1" + ",000" * 214) is None


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{" + "{" * 100_000,
        r"\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
        r"\boxed{" * 100_000,
        r"\boxed{" * 100_000 + "1" + "}" * 100_000,
        r"\boxed" * 100_000,
        r"\boxed" + " " * 1_000_000,
        r"\boxed{" + " " * 1_000_000 + "x}",
        r"\boxed{" + r"\, " * 300_000 + "x}",
        r"\boxed{-" + "~" * 1_000_000 + "}",
        r"\boxed{" + "9" * 1_000_000 + "}",
        r"\boxed{1" + ",234" * 250_000 + "x}",
        r"\boxed{" + "$" * 1_000_000 + "}",
        r"\boxed{" + "\\" * 1_000_000 + "}",
        "}" * 1_000_000,
    ],
    ids=lambda text: f"{text[:12]}-{len(text)}",
)
def test_hostile_text_takes_no_time(text: str) -> None:
    # Quadratic time on these would be minutes; the bound is loose for a busy machine.
    start = time.process_time()
    value = boxed_integer(text)
    assert time.process_time() - start < 2
    assert value == (1 if text.startswith(r"\boxed{\boxed{") and text.endswith("1" + "}" * 100_000) else None)


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="\\boxed{}$,!~+-− 0123456789\n", max_size=60) | st.text(max_size=30))
def test_no_text_raises(text: str) -> None:
    value = boxed_integer(text)
    assert value is None or isinstance(value, int)
    assert integer(text) is None or any(character in "0123456789" for character in text)


def boxes_by_hand(text: str) -> str | None:
    """An independent reader for text without backslashes other than those of the boxes: splits and counts."""
    *_, tail = text.split("\\boxed{")
    if tail == text:
        return None
    for end in range(len(tail) + 1):
        if tail[:end].count("}") > tail[:end].count("{"):
            return tail[: end - 1]
    return None


plain = st.text(alphabet="ab {}=", max_size=8)


@settings(max_examples=200, deadline=None)
@given(st.lists(plain | plain.map(lambda inside: f"\\boxed{{{inside}}}"), max_size=5).map("".join))
def test_last_boxed_agrees_with_counting(text: str) -> None:
    assert last_boxed(text) == boxes_by_hand(text)


@settings(max_examples=200, deadline=None)
@given(
    value=st.integers(-(10**30), 10**30),
    zeros=st.integers(0, 3),
    spaces=st.lists(st.sampled_from([" ", r"\,", r"\;", "~", "\n"]), max_size=3).map("".join),
    before=st.text(alphabet="so x{}1 \\", max_size=10),
    style=st.sampled_from(["{}", "{:,}"]),
    seed=st.integers(0, 99),
)
def test_every_written_integer_is_read_back(
    value: int, zeros: int, spaces: str, before: str, style: str, seed: int
) -> None:
    digits = style.format(abs(value))
    if style == "{}":
        digits = "0" * zeros + digits
    body = f"{spaces}{'-' if value < 0 else ''}{digits}{spaces}"
    body = random.Random(seed).choice([body, f"${body}$"])
    assert boxed_integer(f"{before} \\boxed{{{body}}}") == value
