"""The log that comes along: its cause is known, and the command shows it without a network."""

import re
import socket
import webbrowser
from pathlib import Path

import pytest

from tailrl.cli.command_line import run
from tailrl.diagnosis.demo import LOG, WHAT_IT_IS, opened
from tailrl.diagnosis.diagnosis import diagnose


def test_what_was_done_on_purpose_is_named_first() -> None:
    """The engine sampled with top-p 0.9, and the trainer did not know."""
    found = diagnose(str(LOG))
    assert found.causes[0].name == "truncation" and found.causes[0].sure > 0.5
    assert found.measured.sequences == 48 and "48 responses" in WHAT_IT_IS
    assert LOG.stat().st_size < 250_000


@pytest.mark.parametrize("words", [["demo", "--no-open"], ["diagnose", str(LOG)]])
def test_a_page_without_a_network(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("the network is asked for, or a browser")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(webbrowser, "open", refuse)
    page = tmp_path / "page.html"
    monkeypatch.setattr("sys.argv", ["tailrl", *words, "--out", str(page)])
    run()
    text = page.read_text(encoding="utf-8")
    assert "top-p" in text and not re.findall(r'<(?:script|img|iframe)[^>]* src=|<link[^>]*href="(?!data:)', text)


@pytest.mark.parametrize(
    ("variables", "asked"), [({}, False), ({"DISPLAY": ":0"}, True), ({"WAYLAND_DISPLAY": "w"}, True)]
)
def test_a_browser_in_a_terminal_is_not_started(
    variables: dict[str, str], asked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opening: list[str] = []
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(webbrowser, "open", lambda address: bool(opening.append(address)) or True)
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert opened(tmp_path / "a b.html") == asked
    assert opening == ([f"file://{tmp_path}/a%20b.html"] if asked else [])


def test_the_demo_names_a_folder_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["tailrl", "demo", "--out", str(tmp_path / "nowhere" / "page.html")])
    with pytest.raises(SystemExit, match="there is no folder"):
        run()
