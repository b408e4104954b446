"""Models and data come from others, and credentials lie in the environment: what no line of the project may do."""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tailrl.cli import main
from tailrl.config.jobs import Evaluation
from tailrl.config.load import parse_study
from tailrl.runtime.errors import reason
from tailrl.runtime.timeouts import last_lines

ROOT = Path(__file__).parents[2]
FOLDERS = ("workflow", "benchmarks", "exams", "tests/gpu", "envs")
SOURCES = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
RULES = sorted((ROOT / "workflow" / "rules").glob("*.smk"))

# --- the source ----------------------------------------------------------------------------------------

BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "yaml.unsafe_load", "yaml.full_load"}
BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# What a call must be given by name, and what must never be said in any call.
REQUIRED: dict[str, dict[str, object]] = {
    "torch.load": {"weights_only": True},
    "np.load": {"allow_pickle": False},
    "AutoModelForCausalLM.from_pretrained": {"trust_remote_code": False, "use_safetensors": True},
    "AutoTokenizer.from_pretrained": {"trust_remote_code": False},
    "AutoConfig.from_pretrained": {"trust_remote_code": False},
    "LLM": {"trust_remote_code": False},
}
NEVER: dict[str, object] = {
    "shell": True,
    "trust_remote_code": True,
    "weights_only": False,
    "allow_pickle": True,
    "confirm_run_unsafe_code": True,
}
# A model that the project itself made into a benchmark's input, from a file of one name.
EXEMPT = {("smollm2.py", "AutoModelForCausalLM.from_pretrained"), ("smollm2.py", "AutoTokenizer.from_pretrained")}
# Functions of a framework, from a checkout that the caller names.
EXEMPT |= {(file, call) for file in ("framework_calls.py",) for call in ("compile", "exec")}


def faults(source: str, name: str = "") -> Iterator[str]:
    """What is banned in a piece of source, as sentences."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from (f"imports {m}" for m in modules if m.split(".")[0] in BANNED_MODULES)
        if not isinstance(node, ast.Call):
            continue
        called = ast.unparse(node.func)
        given = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
        if called in BANNED_CALLS and (name, called) not in EXEMPT:
            yield f"calls {called}"
        if called == "yaml.load" and ast.unparse(node.args[-1]) != "_Loader":
            yield "yaml.load with another loader"
        required = {} if (name, called) in EXEMPT else REQUIRED.get(called, {})
        yield from (f"{called} without {k}={v}" for k, v in required.items() if given.get(k) is not v)
        yield from (f"{called} with {k}={v}" for k, v in NEVER.items() if given.get(k) is v)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_nothing_of_others_is_run(file: Path) -> None:
    assert list(faults(file.read_text(encoding="utf-8"), file.name)) == []


@pytest.mark.parametrize(
    "line",
    [
        "eval(answer)",
        "import pickle",
        "from dill import loads",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path)",
        "subprocess.run(command, shell=True)",
        "AutoModelForCausalLM.from_pretrained(path, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(path, trust_remote_code=True)",
        "LLM(model=path)",
        "yaml.load(text, yaml.Loader)",
        "os.system(command)",
    ],
)
def test_the_scan_sees_what_it_looks_for(line: str) -> None:
    assert list(faults(line))


def test_the_loader_of_yaml_is_a_safe_one() -> None:
    import yaml

    from tailrl.config.load import _Loader

    assert issubclass(_Loader, yaml.SafeLoader)


# --- the rules -----------------------------------------------------------------------------------------


def shell_commands(text: str) -> list[str]:
    """The shell commands of a file of rules: the strings after each `shell:`, put together; `once_more` repeats one."""
    blocks = re.findall(r"""^ *shell:\n(?: +once_more\(\n)?((?: +["'].*["']\n)+)""", text, re.MULTILINE)
    assert len(blocks) == len(re.findall(r"\bshell\b", text)), "every command is a literal, on lines of its own"
    return [ast.literal_eval(f"({block})") for block in blocks]


def unquoted(command: str) -> list[str]:
    """The fields of a command that are not quoted as they are put in."""
    return [field for field in re.findall(r"(?<!\{)\{([^{}]*)\}(?!\})", command) if not field.endswith(":q")]


def test_what_repeats_a_command_quotes_what_it_adds() -> None:
    common = next(file for file in RULES if file.name == "common.smk").read_text(encoding="utf-8")
    (source,) = re.findall(r"^def once_more.*?(?=^\S)", common + "\nend\n", re.MULTILINE | re.DOTALL)
    found: dict[str, Any] = {}
    exec(source, found)
    command = found["once_more"]("tailrl job train --seed {wildcards.seed:q}")
    assert unquoted(command) == [] and command.count("{wildcards.seed:q}") == 1


@pytest.mark.parametrize("file", RULES, ids=lambda file: file.name)
def test_whatever_a_command_is_given_is_quoted(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    for command in shell_commands(text):
        assert "{" in command and unquoted(command) == []
    assert not re.search(r"^ *run:|^ *script:", text, re.MULTILINE)


def test_there_are_commands() -> None:
    assert sum(len(shell_commands(file.read_text(encoding="utf-8"))) for file in RULES) >= 10


# --- secrets -------------------------------------------------------------------------------------------

SECRETS = {"WANDB_API_KEY": "0123456789" * 4, "HF_TOKEN": "hf_planted", "MY_PASSWORD": "sesame-planted"}


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("planted")
def test_no_sentence_quotes_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, secret in SECRETS.items():
        assert reason(ValueError(f"401 for {secret}\nin vain")) == f"401 for ${name} in vain"
    monkeypatch.setenv("SHORT_KEY", "401")
    assert reason(ValueError("401 for nobody")) == "401 for nobody"


# A variable, its value, what another library says, and how a sentence has it.
PLANTED = "planted/Secret+1"
QUOTED = [
    *(
        (name, PLANTED, f"401 for {PLANTED}", f"401 for ${name}")
        for name in (
            "hf_token",
            "API_KEY_2",
            "API_KEYS",
            "DB_PASSWD",
            "DB_PASS",
            "MYSQL_PWD",
            "SSH_PASSPHRASE",
            "AWS_ACCESS_KEY_ID",
            "SECRET_KEY_BASE",
            "GOOGLE_CREDENTIALS",
            "npm_config__auth",
        )
    ),
    ("HF_TOKEN", PLANTED, "GET /?t=planted%2FSecret%2B1", "GET /?t=$HF_TOKEN"),
    ("HF_TOKEN", PLANTED, "GET /?t=planted%2fSecret%2b1", "GET /?t=$HF_TOKEN"),
    ("HF_TOKEN", "planted%2FSecret", "401 for planted/secret", "401 for $HF_TOKEN"),
    ("HTTPS_PROXY", "http://u:planted-1@proxy:1", "407: u:planted-1", "407: $HTTPS_PROXY"),
    ("HTTPS_PROXY", "http://u:planted-1@proxy:1", "407: planted-1", "407: $HTTPS_PROXY"),
    ("https_proxy", "http://u:p%40lanted@proxy:1", "407: p@lanted", "407: $https_proxy"),
    ("WANDB_BASE_URL", "https://planted-token@wandb.invalid", "no planted-token", "no $WANDB_BASE_URL"),
    ("HF_ENDPOINT", "https://a:planted-1@hub.invalid/x", "at https://hub.invalid/x", "at https://hub.invalid/x"),
    ("OTHER", "1", "at https://me:pw@hub.invalid/x", "at https://***@hub.invalid/x"),
    # No secrets: too short, or by a name that only looks like one.
    ("SHORT_KEY", "1", "1 of 1", "1 of 1"),
    ("USE_TOKEN", "true", "it is true", "it is true"),
    ("API_KEY", "", "nothing", "nothing"),
    ("TOKENIZERS_PARALLELISM", "disabled", "W&B is disabled", "W&B is disabled"),
    ("PWD", "/some/folder", "/some/folder: not there", "/some/folder: not there"),
    ("KEYBOARD_ROWS", "thousands", "thousands of rows", "thousands of rows"),
]


@pytest.mark.parametrize(("name", "value", "said", "shown"), QUOTED)
def test_what_is_a_secret(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str, shown: str) -> None:
    monkeypatch.setenv(name, value)
    assert reason(ValueError(said)) == shown
    assert last_lines(ValueError(said)) == f"ValueError: {shown}"


def test_the_longer_of_two_secrets_is_masked_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_TOKEN", PLANTED)
    monkeypatch.setenv("B_TOKEN", f"{PLANTED}-and-more")
    assert reason(ValueError(f"{PLANTED}-and-more, {PLANTED}")) == "$B_TOKEN, $A_TOKEN"


Call = Callable[..., None]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    def called(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["tailrl", *map(str, arguments)])
        main()

    return called


@pytest.mark.usefixtures("planted")
@pytest.mark.slow
def test_no_stage_writes_a_secret(
    tmp_path: Path,
    policy_folder: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A study of one arm and two steps, from the problems to the report, with W&B beside it."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    exact = {"engine": "exact", "dtype": "float32"}
    task = {"name": "arithmetic", "problems": 4, "terms": [2, 2]}
    study = parse_study(
        {
            "name": "s",
            "seeds": [0],
            "task": task,
            "policy": {"source": "pretrained", "path": str(policy_folder)},
            "training": {"steps": 2, "prompts": 2, "group_size": 2, "max_new_tokens": 4, "keep_tokens_every": 1},
            "arms": {"a": {"sampler": exact}},
            "evaluation": {"task": {**task, "seed": 9}, "samples": 2, "max_new_tokens": 4, "sampler": exact},
        }
    )
    results, data = tmp_path / "results", tmp_path / "results" / "data"
    run, base = results / "train/a/seed0", results / "base"
    call("job", "problems", "--settings", study.problems().model_dump_json(), "--out", data)
    policy = json.dumps({"policy": study.policy.model_dump()})
    call("job", "policy", "--settings", policy, "--problems", data / "warm_start.jsonl", "--out", base)
    train = ("--policy", base, "--problems", data / "train.jsonl", "--out", run, "--wandb", results)
    call("job", "train", "--settings", study.run("a").model_dump_json(), "--seed", "0", *train)
    for arm, folder in (("base", base), ("a", run / "policy")):
        out = ("--out", results / f"eval/{arm}.json", "--samples", results / f"eval/{arm}.samples.jsonl")
        evaluation = Evaluation.model_validate(study.evaluation).model_dump_json()
        where = ("--policy", f"0={folder}", "--problems", data / "evaluation.jsonl")
        call("job", "evaluate", "--arm", arm, "--settings", evaluation, *where, *out)
    call("job", "summarise", "--study", study.model_dump_json(), "--results", results, "--out", results)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"metrics.jsonl", "run.json", "summary.md"} <= {path.name for path in files}
    assert any(path.suffix == ".wandb" for path in files)
    shown = capfd.readouterr()
    for secret in SECRETS.values():
        assert secret not in shown.out + shown.err
        assert [path for path in files if secret.encode() in path.read_bytes()] == []
