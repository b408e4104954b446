"""The catalogue of bad inputs: what is wrong, and what the one sentence about it must name.

Bad checkpoints, which end no run, have a catalogue of their own: `tests/unit/training/test_bad_checkpoints.py`.

Each table is data: a name, the input, and the words to be found in the sentence. A case is carried out by
`tests/unit/test_bad_inputs.py`, which hands the arguments to the command line.
"""

import json
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
from bad_models import MODELS, write
from bad_results import RESULTS

from tailrl.settings import ArithmeticTask, Evaluation, Problems
from tailrl.study import parse_study

ARITHMETIC = ArithmeticTask(problems=4)
EVALUATION = Evaluation(max_new_tokens=16).model_dump_json()


@dataclass(frozen=True)
class Case:
    """One bad input.

    Attributes:
        name: what is wrong with it.
        arguments: writes it into a folder, given the folder of a policy that is well, and says what to call `tailrl`
            with.
        words: what the sentence must hold.
    """

    name: str
    arguments: Callable[[Path, Path], list[str]]
    words: tuple[str, ...]


# --- study files ---------------------------------------------------------------------------------------

ARM = "name: s\narms: {a: {}}\n"
STUDIES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "an empty study": ("", ("study.yaml", "NoneType")),
    "a list for a study": ("- a\n- b\n", ("study.yaml", "list")),
    "no YAML": ("name: [s\n", ("study.yaml", "YAML")),
    "a tab for an indent": ("arms:\n\ta: {}\n", ("study.yaml", "YAML")),
    "bytes that are no text": (b"name: \xff\xfe\n", ("study.yaml", "utf-8")),
    "a NUL": (b"name: a\x00b\n", ("study.yaml", "YAML")),
    "a Python object in YAML": ("name: !!python/object/apply:os.system [ls]\n", ("study.yaml", "os.system")),
    "a billion laughs": (
        "a: &a [x, x, x, x, x, x, x, x, x]\n"
        + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)),
        ("study.yaml", "not a known key"),
    ),
    "a mapping inside itself": ("name: s\narms: &a {x: *a}\n", ("study.yaml", "arms.x")),
    "brackets a thousand deep": ("name: " + "[" * 5000, ("study.yaml", "YAML")),
    "a name twice": ("name: s\narms: {a: {}}\narms: {b: {}}\n", ("study.yaml", "arms", "twice")),
    "no arm": ("name: s\narms: {}\n", ("study.yaml", "arms")),
    "no name": ("arms: {a: {}}\n", ("study.yaml", "name is missing")),
    "a name that climbs out of results": ("name: ../s\narms: {a: {}}\n", ("study.yaml", "name", "../s")),
    "a name with a command": ("name: $(ls)\narms: {a: {}}\n", ("study.yaml", "name", "$(ls)")),
    "a name with a line break": ('name: "s\\n"\narms: {a: {}}\n', ("study.yaml", "name")),
    "an arm with a line break": ('name: s\narms: {"a\\n": {}}\n', ("study.yaml", "cannot name an arm")),
    "an arm with a command": ("name: s\narms: {a;ls: {}}\n", ("study.yaml", "a;ls", "cannot name an arm")),
    "an arm that is a number": ("name: s\narms: {1: {}}\n", ("study.yaml", "arms.1")),
    "an arm that is a list": ("name: s\narms: {a: []}\n", ("study.yaml", "arms.a")),
    "a file that extends itself": (ARM + "extends: study.yaml\n", ("study.yaml", "extends", "leads back to itself")),
    "a file that extends none that is there": (ARM + "extends: none.yaml\n", ("none.yaml", "No such file")),
    "a file that extends a NUL": (ARM + 'extends: "a\\0"\n', ("cannot be read", "null")),
    "a file that extends a list": (ARM + "extends: [a.yaml]\n", ("study.yaml", "extends", "['a.yaml']")),
    "a misspelt key": (ARM + "seedz: [1]\n", ("study.yaml", "seedz", "did you mean 'seeds'")),
    "a negative seed": (ARM + "seeds: [0, -1]\n", ("study.yaml", "seeds.1", "-1")),
    "a seed in words": (ARM + "seeds: [zero]\n", ("study.yaml", "seeds.0", "(given: 'zero')")),
    "a seed that no generator takes": (ARM + "seeds: [1.0e30]\n", ("study.yaml", "seeds.0")),
    "no seed": (ARM + "seeds: []\n", ("study.yaml", "seeds")),
    "the same seed twice": (ARM + "seeds: [1, 1]\n", ("study.yaml", "seeds", "twice")),
    "a size of zero": (ARM + "training: {prompts: 0}\n", ("study.yaml", "training.prompts", "0")),
    "a rate that is no number": (ARM + "training: {learning_rate: .nan}\n", ("study.yaml", "training.learning_rate")),
    "a rate without end": (ARM + "training: {learning_rate: .inf}\n", ("study.yaml", "training.learning_rate")),
    "a limit without end": (ARM + "training: {max_grad_norm: .inf}\n", ("study.yaml", "training.max_grad_norm")),
    "a temperature without end": (ARM + "training: {temperature: .inf}\n", ("study.yaml", "training.temperature")),
    "a rule that watches nothing": (
        ARM + "training: {stop_when: {metric: rollout_corr/k3kl, factor: 3}}\n",
        ("study.yaml", "training.stop_when.metric", "rollout_corr/k3kl", "rollout_corr/k3_kl"),
    ),
    "a rule at a run's own level": (
        ARM + "training: {stop_when: {metric: train/grad_norm, factor: 1}}\n",
        ("study.yaml", "training.stop_when.factor"),
    ),
    "decays that are too many": (ARM + "training: {betas: [0.9, 0.9, 0.9]}\n", ("study.yaml", "training.betas")),
    "a threshold with a line break": (
        'name: s\narms: {a: {vocabulary: {rule: min_p, rho: "e-13\\n"}}}\n',
        ("study.yaml", "arms.a.vocabulary.rho", "e-13"),
    ),
    "an unknown base": (ARM + "ablations: {x: {base: b, field: estimator, values: [grpo]}}\n", ("x.base", "'b'")),
    "a contrast with an arm that is no base": (
        ARM + "ablations: {x: {base: [a], field: estimator, values: [rloo, grpo], contrast: [a, b]}}\n",
        ("ablations.x", "'b' is none of the base arms"),
    ),
    "a contrast of an arm with itself": (
        ARM + "ablations: {x: {base: a, field: estimator, values: [rloo, grpo], contrast: [a, a]}}\n",
        ("ablations.x", "two different base arms and two values"),
    ),
    "an unknown field": (ARM + "ablations: {x: {base: a, field: nothing, values: [1]}}\n", ("x.field", "'nothing'")),
    "an unknown task": (ARM + "task: {name: gsm8k}\n", ("study.yaml", "task", "gsm8k")),
    "a data file that is not there": (
        ARM + "task: {name: dapo_math, path: nowhere.jsonl}\n",
        ("study.yaml", "task.path", "nowhere.jsonl"),
    ),
    "a data file of another kind": (
        ARM + f"task: {{name: dapo_math, path: {__file__}}}\n",
        ("study.yaml", "task.path", ".parquet or .jsonl"),
    ),
    "a policy that is not there": (
        ARM + "policy: {source: pretrained, path: ./nowhere}\n",
        ("study.yaml", "policy.path", "./nowhere"),
    ),
    "a policy without a path": (ARM + "policy: {source: pretrained}\n", ("study.yaml", "policy", "path is missing")),
}


def _study(content: str | bytes) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, _: Path) -> list[str]:
        return ["check", str(write(folder / "study.yaml", content))]

    return arguments


# --- data files ----------------------------------------------------------------------------------------

USER = {"role": "user", "content": "1+1="}
Content = str | bytes | list[dict[str, Any]]
DATA: dict[str, tuple[str, Content, tuple[str, ...]]] = {
    "no data": ("d.jsonl", "", ("d.jsonl", "no rows")),
    "blank lines alone": ("d.jsonl", "\n \n", ("d.jsonl", "no rows")),
    "other columns": ("d.jsonl", [{"question": "1+1", "solution": "2"}], ("d.jsonl", "problem is missing (1)")),
    "columns of another type": ("d.jsonl", [{"problem": 3, "answer": "2"}], ("d.jsonl", "problem is not text (1)")),
    "a problem of ten million characters": (
        "d.parquet",
        [{"problem": "x" * 10**7, "answer": "1"}],
        ("d.parquet", "problem has more than 100000 characters (1)"),
    ),
    "an empty answer": ("d.jsonl", [{"problem": "x", "answer": " "}], ("d.jsonl", "answer is empty")),
    "an answer that is true": ("d.jsonl", [{"problem": "x", "answer": True}], ("d.jsonl", "answer is not text")),
    "an answer of a million digits": (
        "d.jsonl",
        [{"problem": "x", "answer": "9" * 10**6}],
        ("d.jsonl", "answer has more than"),
    ),
    "an answer that is a program": (
        "d.jsonl",
        [{"problem": "x", "answer": "__import__('os').system('ls')"}],
        ("d.jsonl", "0 to 999"),
    ),
    "an answer in hostile LaTeX": (
        "d.jsonl",
        [{"problem": "x", "answer": "\\input{/etc/passwd}\\def\\x{\\x\\x}\\x"}],
        ("d.jsonl", "0 to 999"),
    ),
    "an answer in a hundred thousand brackets": (
        "d.jsonl",
        [{"problem": "x", "answer": "{" * 10**5}],
        ("d.jsonl", "0 to 999"),
    ),
    "the same problem with two answers": (
        "d.jsonl",
        [{"problem": "x", "answer": "1"}, {"problem": "x", "answer": "2"}],
        ("d.jsonl", "the same problem with different answers"),
    ),
    "half a line of JSON": ("d.jsonl", '{"problem": "x", "ans', ("d.jsonl", "not a row of named columns (1)")),
    "JSON a hundred thousand deep": ("d.jsonl", "[" * 10**5, ("d.jsonl", "not a row of named columns (1)")),
    "a number of a million digits": ("d.jsonl", '{"problem": ' + "9" * 10**6 + "}", ("d.jsonl", "not a row")),
    "half a character": ("d.jsonl", '{"problem": "\\ud800", "answer": "1"}', ("d.jsonl", "not valid Unicode")),
    "Latin-1": ("d.jsonl", '{"problem": "é", "answer": "1"}'.encode("latin-1"), ("d.jsonl", "UTF-8")),
    "UTF-16": ("d.jsonl", '{"problem": "x", "answer": "1"}'.encode("utf-16"), ("d.jsonl", "UTF-8")),
    "parquet cut short": ("d.parquet", b"PAR1\x15\x04", ("d.parquet", "parquet")),
    "no parquet": ("d.parquet", "problem,answer\nx,1\n", ("d.parquet", "parquet")),
    "an empty parquet": ("d.parquet", b"", ("d.parquet", "parquet")),
    "parquet without rows": ("d.parquet", [], ("d.parquet", "no rows")),
    "parquet with other columns": ("d.parquet", [{"question": "x"}], ("d.parquet", "problem is missing (1)")),
    "a kind of file that is not read": ("d.csv", "problem,answer\nx,1\n", ("d.csv", ".parquet or .jsonl")),
    "a pickle": ("d.pkl", b"\x80\x04N.", ("d.pkl", ".parquet or .jsonl")),
    "no prompt": ("dapo.jsonl", [{"reward_model": {"ground_truth": "1"}}], ("dapo.jsonl", "prompt is missing")),
    "a prompt of two messages": (
        "dapo.jsonl",
        [{"prompt": [USER, USER], "reward_model": {"ground_truth": "1"}}],
        ("dapo.jsonl", "prompt is not one message of the user"),
    ),
    "a prompt that the system speaks": (
        "dapo.jsonl",
        [{"prompt": [USER | {"role": "system"}], "reward_model": {"ground_truth": "1"}}],
        ("dapo.jsonl", "prompt is not one message of the user"),
    ),
    "no answer in its record": (
        "dapo.jsonl",
        [{"prompt": [USER], "reward_model": {"style": "rule"}}],
        ("dapo.jsonl", "answer is missing"),
    ),
    "no record of an answer": (
        "dapo.jsonl",
        [{"prompt": [USER], "reward_model": "1"}],
        ("dapo.jsonl", "reward_model is missing or not a record"),
    ),
}


def _data(name: str, content: Content) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, _: Path) -> list[str]:
        file = folder / name
        if isinstance(content, list) and file.suffix == ".parquet":
            table = pyarrow.Table.from_pylist(content, schema=None if content else pyarrow.schema([("x", "int8")]))
            pyarrow.parquet.write_table(table, file)
        else:
            write(file, "\n".join(map(json.dumps, content)) if isinstance(content, list) else content)
        task = "dapo_math" if file.stem == "dapo" else "aime25"
        return _problems({"name": task, "path": str(file)}, folder)

    return arguments


def _problems(task: dict[str, Any], folder: Path) -> list[str]:
    settings = Problems(train=ARITHMETIC, evaluation=ArithmeticTask(seed=9), warm_start=()).model_dump()
    return ["problems", "--settings", json.dumps(settings | {"train": task}), "--out", str(folder / "out")]


# --- files of problems ---------------------------------------------------------------------------------

PROBLEM = '{"id": "a", "prompt": "1+1=\\n", "answer": "2"}\n'
PROBLEM_FILES: dict[str, tuple[str | bytes, tuple[str, ...]]] = {
    "no problem": ("", ("p.jsonl", "holds no problem")),
    "a problem without an answer": ('{"id": "a", "prompt": "1+1="}', ("p.jsonl, line 1", "answer")),
    "a problem with a key too many": (PROBLEM + PROBLEM.replace('"id"', '"x": "", "id"'), ("p.jsonl, line 2", "'x'")),
    "a problem whose answer is a number": (PROBLEM.replace('"2"', "2"), ("p.jsonl, line 1", "text")),
    "a line cut short": (PROBLEM + PROBLEM[:20], ("p.jsonl, line 2", "not a problem")),
    "a file of zeros": (bytes(100), ("p.jsonl, line 1", "not a problem")),
    "a file that is no text": (b"\xff\xfe\xfd", ("p.jsonl", "utf-8")),
    "a line of brackets": ("[" * 10**5, ("p.jsonl, line 1", "not a problem")),
    "a prompt that is longer than the policy": (
        PROBLEM.replace("1+1", "1+" * 10**5),
        ("problem 'a'", "max_new_tokens", "64"),
    ),
    "an empty prompt": (PROBLEM.replace("1+1=\\n", ""), ("p.jsonl, line 1", "prompt")),
    "half a character": (PROBLEM.replace("1+1", "\\ud800"), ("p.jsonl, line 1", "not a problem")),
    "two problems with one id": (PROBLEM * 2, ("p.jsonl", "share the id 'a'")),
}


def _problem_file(content: str | bytes) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, policy: Path) -> list[str]:
        return _evaluate(folder, policy, write(folder / "p.jsonl", content))

    return arguments


def _evaluate(folder: Path, policy: Path, problems: Path) -> list[str]:
    out = ["--out", str(folder / "out.json"), "--samples", str(folder / "samples.jsonl")]
    return ["evaluate", "--arm", "a", "--settings", EVALUATION, f"--policy=0={policy}", f"--problems={problems}", *out]


# --- models --------------------------------------------------------------------------------------------


def _model(change: Callable[[Path], None]) -> Callable[[Path, Path], list[str]]:
    def arguments(folder: Path, policy: Path) -> list[str]:
        model = folder / "model"
        shutil.copytree(policy, model)
        change(model)
        settings = json.dumps({"policy": {"source": "pretrained", "path": str(model)}})
        return ["policy", "--settings", settings, "--problems", str(folder), "--out", str(folder / "out")]

    return arguments


# --- command lines -------------------------------------------------------------------------------------

RUN = parse_study({"name": "s", "arms": {"a": {}}}).run("a").model_dump_json()
COMMANDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "no command": ((), ("command",)),
    "an unknown command": (("trian",), ("trian",)),
    "an unknown option": (("check", "x.yaml", "--fast"), ("--fast",)),
    "an option left out": (("train", "--seed", "0"), ("--settings",)),
    "a seed in words": (("train", "--seed", "one"), ("--seed", "one")),
    "a negative seed": (("train", "--seed", "-1"), ("--seed", "-1")),
    "settings that are not there": (("gradients", "--settings", "nowhere.json", "--out=o"), ("nowhere.json",)),
    "settings that are a folder": (("gradients", "--settings", "{folder}", "--out=o"), ("{folder}", "directory")),
    "settings that are no JSON": (("gradients", "--settings", "{{", "--out=o"), ("Gradients settings", "JSON")),
    "settings that are a list": (("gradients", "--settings", "[]", "--out=o"), ("[]",)),
    "settings of no byte": (("gradients", "--settings", "", "--out=o"), ("settings",)),
    "settings with a NUL": (("gradients", "--settings", "a\x00b", "--out=o"), ("settings",)),
    "settings longer than a file's name": (("gradients", "--settings", "x" * 5000, "--out=o"), ("name too long",)),
    "settings of another command": (("problems", "--settings", RUN, "--out=o"), ("Problems settings", "arm")),
    "a study that is not there": (("check", "{folder}/nowhere.yaml"), ("{folder}/nowhere.yaml",)),
    "a study that is a folder": (("check", "{folder}"), ("{folder}", "directory")),
    "results where a file is": (
        (*_problems(ARITHMETIC.model_dump(), Path("/"))[:-1], "{folder}/file"),
        ("{folder}/file",),
    ),
    "results that are not there": (("gradient_report", "--results={folder}", "--out=o"), ("{folder}/quality.jsonl",)),
    "an ablation that is not there": (
        ("ablation", "--study", '{{"name": "s", "arms": {{"a": {{}}}}}}', "--name", "x", "--results=r", "--out=o"),
        ("'x'",),
    ),
    "runs that are not there": (
        ("report", "--study", '{{"name": "s", "arms": {{"a": {{}}}}}}', "--results={folder}", "--out=o"),
        ("{folder}/train/a/seed0/run.json",),
    ),
}


def _command(arguments: tuple[str, ...]) -> Callable[[Path, Path], list[str]]:
    def fill(folder: Path, _: Path) -> list[str]:
        write(folder / "file", "")
        return [a if a == RUN or a.startswith('{"') else a.format(folder=folder) for a in arguments]

    return fill


# --- results -------------------------------------------------------------------------------------------


def _results(arguments: tuple[str, ...], files: dict[str, str | bytes]) -> Callable[[Path, Path], list[str]]:
    def fill(folder: Path, _: Path) -> list[str]:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write(folder / name, content)
        return [argument.replace("{folder}", str(folder)) for argument in arguments]

    return fill


def catalogue() -> Iterable[Case]:
    """Every case."""
    for name, (study, words) in STUDIES.items():
        yield Case(f"study: {name}", _study(study), words)
    for name, (file, rows, words) in DATA.items():
        yield Case(f"data: {name}", _data(file, rows), words)
    for name, (problems, words) in PROBLEM_FILES.items():
        yield Case(f"problems: {name}", _problem_file(problems), words)
    for name, (change, words) in MODELS.items():
        yield Case(f"model: {name}", _model(change), words)
    for name, (arguments, words) in COMMANDS.items():
        yield Case(f"command: {name}", _command(arguments), words)
    for name, (arguments, files, words) in RESULTS.items():
        yield Case(f"results: {name}", _results(arguments, files), words)
