"""The command line: what it prints, and how it ends where the user can mend what is wrong."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from tailrl.cli import jobs, main
from tailrl.cli.command_line import app
from tailrl.cli.commands import HELP_GROUPS
from tailrl.cli.values import seed_and_folder
from tailrl.config.jobs import Problems
from tailrl.config.load import parse_study, read_study
from tailrl.config.tasks.arithmetic import ArithmeticTask
from tailrl.reports.metrics.page import metrics_page
from tailrl.tasks.problem import Problem, write_problems

ROOT = Path(__file__).parents[2]
STUDY = parse_study({"name": "s", "arms": {"naive": {}}})
RUN = STUDY.run("naive").model_dump_json()


def call(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> None:
    monkeypatch.setattr(sys, "argv", ["tailrl", *map(str, arguments)])
    main()


def refusal(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> str:
    """The sentence that the process ends with; sys.exit prints a text to stderr and exits with 1."""
    with pytest.raises(SystemExit) as caught:
        call(monkeypatch, *arguments)
    sentence = caught.value.code
    assert isinstance(sentence, str) and sentence.startswith("tailrl: ") and "\n" not in sentence
    return sentence.removeprefix("tailrl: ")


def test_schema_and_metrics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    call(monkeypatch, "schema")
    assert capsys.readouterr().out == (ROOT / "workflow/schemas/study.schema.json").read_text(encoding="utf-8")
    call(monkeypatch, "metrics")
    assert capsys.readouterr().out == metrics_page()


def test_check(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    study = read_study(ROOT / "config.yaml")
    arms = study.all_arms()
    call(monkeypatch, "check", ROOT / "config.yaml")
    said = f"default, {len(arms)} arms (with ablations), {sum(len(study.arm_seeds()[arm]) for arm in arms)} runs\n"
    assert f"config.yaml: {said}" in capsys.readouterr().out
    assert refusal(monkeypatch, "check", "nowhere.yaml").startswith("nowhere.yaml: cannot be read as YAML")


def test_claims_of_no_results_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert refusal(monkeypatch, "claims", tmp_path / "nowhere").endswith(
        "nowhere: holds no study with a claims.csv, in <study>/ or <study>/tables/"
    )


def test_check_sees_a_copy_that_kept_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("mine.yaml", "other.yaml"):
        (tmp_path / name).write_text("name: s\narms: {a: {}}\n", encoding="utf-8")
    sentence = refusal(monkeypatch, "check", tmp_path / "mine.yaml")
    assert sentence.endswith(f"name: {tmp_path}/other.yaml has the name 's' too, and so the same folder of results")


def test_problems(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    settings = Problems(train=ArithmeticTask(problems=5), evaluation=ArithmeticTask(problems=3, seed=9), warm_start=())
    call(monkeypatch, "job", "problems", "--settings", settings.model_dump_json(), "--out", tmp_path)
    names = {"train.jsonl", "evaluation.jsonl", "warm_start.jsonl", "problems.json", "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == names


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("{", "Run settings: Invalid JSON"),
        ("{}", "study is missing; arm is missing; "),
        (RUN.replace('"steps"', '"step"'), "Run settings: training.step is not a known key (did you mean 'steps'?)"),
        ("nowhere.json", "nowhere.json: cannot be read: No such file or directory"),
    ],
)
def test_bad_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: str, words: str) -> None:
    arguments = [x for name in ("policy", "problems", "out", "wandb") for x in (f"--{name}", tmp_path / name)]
    assert words in refusal(monkeypatch, "job", "train", "--settings", settings, "--seed", "0", *arguments)


def test_a_missing_policy_and_a_missing_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy_folder: Path
) -> None:
    rest = ("--settings", RUN, "--seed", "0", "--out", tmp_path / "out", "--wandb", tmp_path)
    nowhere = tmp_path / "nowhere"
    sentence = refusal(monkeypatch, "job", "train", *rest, "--policy", nowhere, "--problems", nowhere)
    assert f"{nowhere}: no tokenizer could be read from it" in sentence
    sentence = refusal(monkeypatch, "job", "train", *rest, "--policy", policy_folder, "--problems", nowhere)
    assert sentence.startswith(f"{nowhere}: cannot be read: ") and "No such file" in sentence
    write_problems([Problem("long", "1+" * 100, "1")], tmp_path / "problems.jsonl")
    sentence = refusal(
        monkeypatch, "job", "train", *rest, "--policy", policy_folder, "--problems", tmp_path / "problems.jsonl"
    )
    assert sentence.startswith("problem 'long': ") and "exceed the 64 that the policy supports" in sentence


@pytest.mark.parametrize("policy", ["folder", "x=folder", "=folder", "1.5=folder", "²=folder"])
def test_a_policy_without_its_seed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy: str) -> None:
    settings = STUDY.evaluation.model_dump_json()
    paths = [x for name in ("problems", "out", "samples") for x in (f"--{name}", tmp_path / name)]
    sentence = refusal(monkeypatch, "job", "evaluate", "--arm", "a", "--settings", settings, "--policy", policy, *paths)
    assert sentence == f"--policy {policy}: write it as SEED=FOLDER"


def test_probe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page on standard output, progress on the other; and the log, which `diagnose` reads."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "1+2="}\n', encoding="utf-8")
    options = ("--engine", "exact", "--samples", "2", "--max-new-tokens", "5", "--prompts", tmp_path / "prompts.jsonl")
    call(monkeypatch, "probe", policy_folder, *options, "--log", tmp_path / "log.jsonl")
    page, progress = capsys.readouterr()
    assert "tailrl: 2 of 2 responses sampled and scored\n" in progress
    call(monkeypatch, "diagnose", tmp_path / "log.jsonl", "--out", tmp_path / "page.html")
    read, _ = capsys.readouterr()
    answers = [text.split("\n\n")[1] for text in (read, page)]
    assert answers[0] == answers[1] == "**Not bad: sampler and trainer agree to the last bit.**"
    assert "<h1>Diagnosis of a log</h1>" in (tmp_path / "page.html").read_text(encoding="utf-8")
    with pytest.raises(SystemExit, match="1"):
        call(monkeypatch, "probe", policy_folder, *options, "--max", "k3=1e-3", "--min", "ess=2", "--json", "-")
    data = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in data["gate"]] == ["within", "beyond"], "equal columns of a probe are no copy"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            ("--engine", "vlm"),
            "probe: sampler.engine: must be one of exact, transformers, vllm (given: 'vlm')",
        ),
        (("--temperature", "3"), "probe: temperature: 3 is above 2, the largest that vllm takes"),
        (("--temperature", "0"), "probe: temperature: Input should be greater than or equal to 0.01"),
        (("--top-p", "0"), "probe: top_p: Input should be greater than 0"),
        (("--engine", "exact", "--dtype", "float16"), "probe: sampler: engine: exact computes as the trainer does"),
        (("--engine", "exact", "--trainer-dtype", "bfloat16"), "in float32 alone: leave out trainer_dtype"),
        (("--trainer-dtype", "float16"), "probe: trainer_dtype: must be one of auto, float32, bfloat16"),
        (("--engine", "exact", "--kv-cache-dtype", "fp8_e4m3"), "quantises the trainer likewise: there is nothing to"),
        (
            ("--engine", "transformers", "--kv-cache-dtype", "fp8_e4m3"),
            "engine: transformers does not use kv_cache_dtype",
        ),
        (("--quantization", "int2"), "probe: sampler.quantization: must be one of int8, int4, fp8 (given: 'int2')"),
        (("--group-size", "32"), "group_size is of int4 weights"),
        (("--samples", "0"), "not a whole number from 1 to 1000000"),
        (("--log", "log.csv"), "log.csv: a log's name must end in .jsonl or .parquet"),
        (("--out", "nowhere/page.md"), "nowhere/page.md: there is no folder nowhere"),
        (("--out", "docs"), "docs: is a folder, and a file is to be written"),
        (("--out=",), ".: is a folder, and a file is to be written"),
        (("--prompts", "nowhere.txt"), "nowhere.txt: is missing"),
        (("--engine", "exact"), "tests: no tokenizer could be read from it: it holds no config.json"),
    ],
)
def test_a_probe_that_cannot_be(monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], words: str) -> None:
    monkeypatch.chdir(ROOT)
    assert words in refusal(monkeypatch, "probe", "tests", *options)


def test_gradients(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The whole probe of two arms, from settings to table and figure; a second time with the same bytes."""
    sizes = {"models": 2, "vocabulary_size": 4, "length": 2, "prompts": 2, "group_size": 3, "draws": 5}
    doses = {"noise": [0.5], "floor": [0.1], "bias": []}
    arms = {"naive": {}, "dvp": {"vocabulary": {"rule": "min_p", "rho": "e-5"}, "correction": {"sequence": "is"}}}
    study = parse_study({"name": "s", "arms": arms, "gradient_quality": {**sizes, "doses": doses}})
    for out in (tmp_path / "a", tmp_path / "b"):
        call(monkeypatch, "job", "measure-gradients", "--settings", study.gradients().model_dump_json(), "--out", out)
        call(monkeypatch, "job", "gradient-page", "--results", out, "--out", out)
    files = ("gradient_quality.csv", "gradient_quality.md", "gradient_quality.svg", "models.csv", "quality.jsonl")
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    with (tmp_path / "a" / "gradient_quality.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(r["mismatch"], r["arm"], r["models"]) for r in rows] == [
        (kind, arm, "2") for kind in ("none", "noise", "floor") for arm in arms
    ]
    assert float(rows[0]["bias_high"]) < 1e-10 < float(rows[2]["bias_low"])
    nowhere = tmp_path / "nowhere"
    sentence = refusal(monkeypatch, "job", "gradient-page", "--results", nowhere, "--out", tmp_path)
    assert sentence == f"{nowhere / 'quality.jsonl'}: is missing"


@pytest.mark.slow  # `test_gradients`
def test_distributions(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, policy_folder: Path, problems: list[Problem]
) -> None:
    """Two engines, one of them exact, from settings to tables and figure; a second time with the same bytes."""
    write_problems(problems[:6], tmp_path / "problems.jsonl")
    exact = {"sampler": {"engine": "exact", "dtype": "float32"}}
    engines = {"exact": exact, "noisy": {**exact, "disturbance": {"noise": 0.1}}}
    block = {"engines": engines, "responses": 12, "every": 2}
    study = parse_study({"name": "s", "arms": {"naive": {}}, "distributions": block, "training": {"max_new_tokens": 9}})
    tables = ("distributions", "safe_sets", "probability", "histograms", "signature")
    files = (*(f"{table}.csv" for table in tables), "distributions.md", "distributions.svg")
    given = ("--policy", policy_folder, "--problems", tmp_path / "problems.jsonl")
    for out in (tmp_path / "a", tmp_path / "b"):
        for name in engines:
            job = study.compared(name).model_dump_json()
            call(monkeypatch, "job", "compare", "--settings", job, *given, "--out", out / name)
        call(
            monkeypatch,
            "job",
            "distribution-page",
            "--results",
            out,
            "--engine=noisy",
            "--engine=exact",
            "--out",
            out,
        )
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    with (tmp_path / "a" / "distributions.csv").open(encoding="utf-8") as file:
        noisy, same = csv.DictReader(file)
    assert noisy["what"] == "exact in float32; disturbed sampler: noise of 0.1 nats"
    assert 0.01 < float(noisy["tv_mean"]) < 0.1 and noisy["equal"] == "0"
    assert (same["tv_mean"], same["kl_train_infer_mean"], same["flips"]) == ("0", "0", "0")
    assert same["equal"] == same["positions"] and same["engine"] == "exact"
    rest = ("--results", tmp_path / "a", "--engine", "other", "--out", tmp_path)
    sentence = refusal(monkeypatch, "job", "distribution-page", *rest)
    assert sentence == f"{tmp_path / 'a' / 'other' / 'run.json'}: is missing"
    bad = study.compared("exact").model_dump_json().replace('"every"', '"evry"')
    sentence = refusal(monkeypatch, "job", "compare", "--settings", bad, *given, "--out", tmp_path)
    assert "Distributions settings: every is missing; evry is not a known key (did you mean 'every'?)" in sentence


def test_an_engine_that_failed_has_a_code_of_its_own() -> None:
    """By which the rule knows that another process may succeed; the stack says where."""
    script = """if True:
        import sys
        from tailrl import cli
        from tailrl.cli import jobs
        from tailrl.runtime.timeouts import guarded

        def fail(*_):
            with guarded(9.0, "the engine's start"):
                raise RuntimeError("no memory left")

        jobs.parse_settings = fail
        sys.argv = ["tailrl", "job", "problems", "--settings", "{}", "--out", "x"]
        cli.main()
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == os.EX_SOFTWARE
    assert "RuntimeError: no memory left" in ended.stderr and "Traceback" in ended.stderr
    assert ended.stderr.endswith("tailrl: the engine's start failed: RuntimeError: no memory left\n")


@pytest.mark.parametrize("words", [["--out", "x"], ["--out=x"]])
def test_a_full_disk_names_what_was_written(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tailrl.cli.jobs.parse_settings", fail)
    sentence = refusal(monkeypatch, "job", "problems", "--settings", "{}", *words)
    assert sentence == "x: a file could not be written: No space left on device"


@pytest.mark.parametrize(
    ("job", "words", "goes_on"),
    [
        ("job problems", ["--out=x"], "starts anew"),
        ("job measure-gradients", ["--out", "x"], "starts anew"),
        (
            "job train",
            ["--ranks=1", "--seed=0", "--policy=p", "--problems=p", "--out=x", "--wandb=w"],
            "goes on from the last checkpoint",
        ),
    ],
)
def test_what_is_interrupted_is_called_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], job: str, words: list[str], goes_on: str
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrl.cli.jobs.parse_settings", interrupt)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, *job.split(), "--settings", "{}", *words)
    assert capfd.readouterr().err == f"tailrl: {job}: interrupted; the same command {goes_on}\n"


def test_a_process_that_does_not_end_is_ended() -> None:
    """Where a library hangs in its exit, registered before the command line's."""
    script = """if True:
        import atexit, sys, time
        atexit.register(time.sleep, 60)
        from tailrl import cli
        from tailrl.runtime import timeouts
        timeouts.ENDING = 0.2
        sys.argv = ["tailrl", "schema"]
        cli.main()
    """
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=50, check=False)
    assert ended.returncode == -signal.SIGALRM


def test_seed_and_folder() -> None:
    assert seed_and_folder("3=results/a=b") == (3, Path("results/a=b"))


def shown_help(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *command: str) -> str:
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit) as ended:
        call(monkeypatch, *command, "--help")
    assert ended.value.code == 0
    return capsys.readouterr().out


COMMANDS = get_command(app)
GROUPS = {(): COMMANDS, ("job",): get_command(jobs.app)}


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group or "all")
def test_every_command_says_what_it_does(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], group: tuple[str, ...]
) -> None:
    listed = shown_help(monkeypatch, capsys, *group)
    for name, command in GROUPS[group].commands.items():  # type: ignore[attr-defined]
        assert re.search(rf"^│ {name} +[A-Z].*[a-z]", listed, re.MULTILINE), name
        help_ = shown_help(monkeypatch, capsys, *group, name)
        assert f"Usage: tailrl {' '.join([*group, name])} " in help_
        assert " ".join(help_.split()).count(" ".join((command.help or "?").split())) == 1, name


def test_the_help_fits_a_screen(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown_help(monkeypatch, capsys).splitlines()
    assert len(lines) <= 28 and max(map(len, lines)) <= 100
    assert [line.split()[1] for line in lines if line.startswith("╭")] == list(HELP_GROUPS)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("chekc",), "No such command 'chekc'. Did you mean 'check'? (see tailrl --help)"),
        (("job", "trian"), "No such command 'trian'. Did you mean 'train'? (see tailrl job --help)"),
        (("check",), "Missing argument 'STUDY...' (see tailrl check --help)"),
        (
            ("plan", "x", "--response", "9" * 5000),
            f"Invalid value for '--response': not a whole number from 1 to 100000000: '{'9' * 40}...' "
            "(see tailrl plan --help)",
        ),
        (("plan", "x", "--gpu", "2"), "No such option: --gpu (Possible options: --gpus) (see tailrl plan --help)"),
        (("job",), "Missing command (see tailrl job --help)"),
    ],
)
def test_a_wrong_command_line(monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], sentence: str) -> None:
    assert refusal(monkeypatch, *words) == sentence


def test_ctrl_c_ends_a_command_as_it_ends_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the signal, which the job's shell looks for; not by an exit code of the parser's."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tailrl.config.load.read_study", interrupt)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(KeyboardInterrupt):
        call(monkeypatch, "check", "x.yaml")


TRAIN = "--settings={} --seed=0 --policy=p --problems=p --out=x --wandb=w"


@pytest.mark.parametrize(
    ("command", "words", "goes_on"),
    [("check", "x", "starts anew"), ("job train", TRAIN, "goes on from the last che")],
)
def test_ctrl_c_is_one_sentence(command: str, words: str, goes_on: str) -> None:
    stop = "def stop(*_): raise KeyboardInterrupt\n"
    script = (
        f"from tailrl.cli import jobs, main\nfrom tailrl.config import load\n{stop}"
        "load.read_study = jobs.parse_settings = stop\nmain()"
    )
    given = [*command.split(), *words.split()]
    ended = subprocess.run([sys.executable, "-c", script, *given], capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr.startswith(f"tailrl: {command}: interrupted; the same command {goes_on}")
    assert ended.stderr.count("\n") == 1


def test_the_process_exits_with_one_and_one_line(tmp_path: Path) -> None:
    study = tmp_path / "study.yaml"
    study.write_text(json.dumps({"name": "s", "arms": {"a": {"estimatr": "rloo"}}}), encoding="utf-8")
    script = "from tailrl.cli import main; main()"
    ended = subprocess.run([sys.executable, "-c", script, "check", study], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"tailrl: {study}: arms.a.estimatr is not a known key (did you mean 'estimator'?)\n"
