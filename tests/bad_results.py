"""Results folders that cannot be used: the files in them, and what the sentence about them must name."""

import io
import json

import numpy as np

from tailrl.study import parse_study

STUDY = parse_study({"name": "s", "seeds": [0], "arms": {"a": {}}})
RUN = json.dumps({"study": "s", "arm": "a", "seed": 0, "settings": STUDY.run("a").model_dump(mode="json")})
STEP = '{"train/step": 0}\n'
MIRROR = ("mirror", "{folder}")
REPORT = ("report", "--study", STUDY.model_dump_json(), "--results={folder}", "--out={folder}")
HOME = "train/a/seed0"


def tokens(**arrays: object) -> bytes:
    """The bytes of an npz file; arrays of objects are pickles in it."""
    file = io.BytesIO()
    np.savez(file, **{name: np.array(values) for name, values in arrays.items()})  # type: ignore[arg-type]
    return file.getvalue()


TOKENS = tokens(step=[0], logp_train=[-1.0], logp_infer=[-1.0])
RESULTS: dict[str, tuple[tuple[str, ...], dict[str, str | bytes], tuple[str, ...]]] = {
    "no run": (MIRROR, {}, ("{folder}", "run.json")),
    "a record cut short": (MIRROR, {f"{HOME}/run.json": RUN[:50]}, (f"{HOME}/run.json",)),
    "a record that is a list": (MIRROR, {f"{HOME}/run.json": "[]"}, (f"{HOME}/run.json",)),
    "a record without settings": (
        MIRROR,
        {f"{HOME}/run.json": '{"study": "s", "arm": "a", "seed": 0}'},
        (f"{HOME}/run.json", "settings is missing"),
    ),
    "a run without a file of steps": (MIRROR, {f"{HOME}/run.json": RUN}, (f"{HOME}/metrics.jsonl", "No such file")),
    "a run without steps": (
        MIRROR,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": ""},
        (f"{HOME}/metrics.jsonl", "holds no step"),
    ),
    "a step cut short": (
        MIRROR,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": STEP + STEP[:5]},
        (f"{HOME}/metrics.jsonl, line 2",),
    ),
    "a step that is missing": (
        MIRROR,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": STEP + STEP.replace("0", "2")},
        (f"{HOME}/metrics.jsonl, line 2", "train/step is 2"),
    ),
    "steps that are lists": (
        REPORT,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": "[]\n"},
        (f"{HOME}/metrics.jsonl, line 1",),
    ),
    "steps in brackets without end": (
        REPORT,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": "[" * 10**5},
        (f"{HOME}/metrics.jsonl, line 1",),
    ),
    "tokens that are a pickle": (
        REPORT,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": STEP, f"{HOME}/tokens.npz": b"\x80\x04N."},
        (f"{HOME}/tokens.npz",),
    ),
    "tokens that hold a pickle": (
        REPORT,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": STEP, f"{HOME}/tokens.npz": tokens(step=[{}])},
        (f"{HOME}/tokens.npz",),
    ),
    "tokens cut short": (
        REPORT,
        {f"{HOME}/run.json": RUN, f"{HOME}/metrics.jsonl": STEP, f"{HOME}/tokens.npz": TOKENS[:300]},
        (f"{HOME}/tokens.npz",),
    ),
    "a record in brackets without end": (REPORT, {f"{HOME}/run.json": "[" * 10**5}, (f"{HOME}/run.json",)),
    "a run without settings": (REPORT, {f"{HOME}/run.json": "{}"}, (f"{HOME}/run.json", "settings")),
    "an evaluation cut short": (
        REPORT,
        {
            f"{HOME}/run.json": RUN,
            f"{HOME}/metrics.jsonl": STEP,
            f"{HOME}/tokens.npz": TOKENS,
            "eval/base.json": '{"policies": [',
        },
        ("eval/base.json",),
    ),
}
