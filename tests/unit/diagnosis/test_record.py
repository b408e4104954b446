"""The answer as data: its schema, the command's `--json`, and the gate's exit codes."""

import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from log_fixture import write_lines

from tailrl.cli.command_line import run as run_command
from tailrl.diagnosis.record import VERSION, schema

ROOT = Path(__file__).parents[3]


def rows(size: float, count: int = 40) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for number in range(count):
        trainer = [-1.0 - 0.01 * ((7 * number + place) % 30) for place in range(20)]
        sampler = [value + size * (-1) ** (number + place // 2) for place, value in enumerate(trainer)]
        found.append(
            {
                "prompt": f"prompt {number}",
                "sampler_logprobs": sampler,
                "trainer_logprobs": trainer,
                "text": "a secret text",
                "token_ids": [number + place for place in range(20)],
                "framework": "TRL",
                "schema": 1,
            }
        )
    return found


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    write_lines(tmp_path / "large.jsonl", rows(0.5))
    write_lines(tmp_path / "small.jsonl", rows(0.01))
    write_lines(tmp_path / "copy.jsonl", [row | {"sampler_logprobs": row["trainer_logprobs"]} for row in rows(0.1)])
    write_lines(tmp_path / "one.jsonl", rows(0.01, 1))
    lines = [{"step": step, "rollout_corr/k3_kl": 1e-3} for step in range(30)]
    write_lines(tmp_path / "curves.jsonl", lines)
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr("sys.argv", ["tailrl", *words])
    try:
        run_command()
    except SystemExit as ended:
        return 1 if isinstance(ended.code, str) else int(ended.code or 0)
    return 0


@pytest.mark.parametrize(
    ("names", "limits", "code"),
    [
        (["small"], ["--max", "k3=1e-3"], 0),
        (["small"], ["--max", "k3=1e-3", "--min", "ess=0.9"], 0),
        (["large"], ["--max", "k3=1e-3"], 1),
        (["large"], ["--max", "rollout_corr/k3_kl=1e-3"], 1),
        (["large"], [], 0),
        (["copy"], ["--max", "k3=1e-3"], 2),  # agreement of a copy is no agreement
        (["one"], ["--max", "k3=1e-3"], 2),
        (["missing"], ["--max", "k3=1e-3"], 2),
        (["missing"], [], 1),
        (["small"], ["--max", "k9=1e-3"], 2),
        (["large", "small"], ["--max", "k3=1e-3"], 0),  # the later log is judged
        (["small", "large"], ["--max", "k3=1e-3"], 1),
        (["large", "small"], ["--max", "k3=1e-3", "--together"], 1),
        (["curves"], ["--max", "k3=2e-3"], 0),
        (["curves"], ["--max", "k3=1e-4"], 1),
        (["curves"], ["--max", "abs_logp=1e-4"], 2),
    ],
)
def test_exit_codes(
    logs: Path, monkeypatch: pytest.MonkeyPatch, names: list[str], limits: list[str], code: int
) -> None:
    assert run(monkeypatch, "diagnose", *[str(logs / f"{name}.jsonl") for name in names], *limits) == code


def test_a_fault_of_the_program_is_no_number_beyond_its_limit(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("tailrl.diagnosis.gate.judge", broken)
    assert run(monkeypatch, "diagnose", str(logs / "small.jsonl"), "--max", "k3=1") == 2


@pytest.mark.parametrize(
    ("names", "kind"), [(["small"], "log"), (["large", "small"], "change"), (["curves"], "curves"), (["copy"], "log")]
)
def test_the_data_fit_the_published_schema(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], names: list[str], kind: str
) -> None:
    paths = [str(logs / f"{name}.jsonl") for name in names]
    published = json.loads((ROOT / "workflow/schemas/diagnosis.schema.json").read_text(encoding="utf-8"))
    assert published == schema(), "`tailrl schema diagnosis` writes it"
    run(monkeypatch, "diagnose", *paths, "--max", "k3=1e-3", "--json", "-")
    data = json.loads(capsys.readouterr().out)
    jsonschema.validate(data, published)
    assert (data["kind"], data["version"]) == (kind, VERSION)
    assert len(data["gate"]) == 1
    run(monkeypatch, "diagnose", *paths, "--json", str(logs / "data.json"))
    written = json.loads((logs / "data.json").read_text(encoding="utf-8"))
    assert written == data | {"gate": [], "exit_code": 0}
    assert "nats a token" in capsys.readouterr().out or kind == "curves"


def test_a_log_says_its_framework_and_the_option_another(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    old = [row | {"recomputed_logprobs": row["sampler_logprobs"]} for row in rows(0.5)]
    write_lines(logs / "old.jsonl", old)
    monkeypatch.setattr("tailrl.diagnosis.causes.shapes", lambda *_, **__: {"stale": 1.0})  # what has lines to set
    log = str(logs / "old.jsonl")
    run(monkeypatch, "diagnose", log)
    text = capsys.readouterr().out
    assert "\nTRL 1.16.0:\n" in text and "\nverl 0.9.1:\n" not in text
    run(monkeypatch, "diagnose", log, "--framework", "VERL")
    text = capsys.readouterr().out
    assert "\nverl 0.9.1:\n" in text and "\nTRL 1.16.0:\n" not in text
    assert run(monkeypatch, "diagnose", log, "--framework", "pytorch") == 1


def test_no_text_leaves_texts_and_ids_out(logs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = logs / "page.html"
    log = str(logs / "large.jsonl")
    run(monkeypatch, "diagnose", log, "--out", str(page))
    assert "a secret text" in page.read_text(encoding="utf-8")
    run(monkeypatch, "diagnose", log, "--out", str(page), "--no-text")
    text = page.read_text(encoding="utf-8")
    assert "a secret text" not in text and "prompt 3" not in text
    [first, *_] = json.loads(text.split('type="application/json">')[1].split("</script>")[0])
    assert set(first["token"]) == {-1} and first["texts"] == []


@pytest.mark.parametrize(("version", "code"), [(1, 0), (2, 1), ("a", 0), (True, 1), (0, 1)])
def test_a_log_of_a_newer_schema_is_refused(
    logs: Path, monkeypatch: pytest.MonkeyPatch, version: object, code: int
) -> None:
    log = write_lines(logs / "log.jsonl", [row | {"schema": version} for row in rows(0.1)])
    assert run(monkeypatch, "diagnose", str(log)) == code


@pytest.mark.parametrize("logs_given", [1, 2])
def test_no_text_leaves_the_words_of_columns_out_of_every_answer(
    logs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], logs_given: int
) -> None:
    """A column of questions is a grouping: the group that holds the mismatch is told without its words."""
    random = np.random.default_rng(0)
    questions = []
    for number in range(64):
        trainer = -random.exponential(1.0, 40)
        size = 0.5 if number % 8 == 3 else 0.01
        sampler = np.minimum(trainer + size * random.standard_normal(40) * -np.expm1(trainer), 0.0)
        columns = {"sampler_logprobs": sampler.tolist(), "trainer_logprobs": trainer.tolist()}
        questions.append(columns | {"question": f"PRIVATE {number % 8}"})
    paths = [str(write_lines(logs / f"questions{copy}.jsonl", questions)) for copy in range(logs_given)]
    page, data = logs / "page.html", logs / "data.json"
    for option, is_private in (([], True), (["--no-text"], False)):
        run(monkeypatch, "diagnose", *paths, "--out", str(page), "--json", str(data), *option)
        told = [capsys.readouterr().out, page.read_text(encoding="utf-8"), data.read_text(encoding="utf-8")]
        assert ["PRIVATE" in text for text in told] == [is_private] * 3
        assert is_private or all("value 4" in text for text in told)
