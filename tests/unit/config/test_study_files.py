"""Study files: those of the project, what a file extends, and the schema that describes them all."""

import difflib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from pydantic import ValidationError

from tailrl.config.jobs import Run
from tailrl.config.load import merged, named_alike, parse_study, read_study, read_yaml
from tailrl.config.probe import ProbeSettings
from tailrl.config.study import Study
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[3]
SHIPPED = [ROOT / "config.yaml", *sorted((ROOT / "studies").glob("*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_studies_are_valid(path: Path) -> None:
    study = read_study(path)
    for arm in study.all_arms():
        assert study.run(arm).study == study.name


@pytest.fixture(scope="module")
def editor() -> jsonschema.protocols.Validator:
    """What an editor has of the schema, which is checked itself."""
    schema = json.loads((ROOT / "workflow/schemas/study.schema.json").read_text(encoding="utf-8"))
    kind = jsonschema.validators.validator_for(schema)
    kind.check_schema(schema)
    return kind(schema)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_editors_take_shipped_studies_for_whole(path: Path, editor: jsonschema.protocols.Validator) -> None:
    editor.validate(read_yaml(path))


def test_editors_miss_arms(editor: jsonschema.protocols.Validator) -> None:
    with pytest.raises(jsonschema.ValidationError, match="'arms' is a required property"):
        editor.validate({"name": "s"})


# --- reading -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"name: [", "cannot be read as YAML"),
        (b"- name", "holds list, not a mapping of settings"),
        (b"", "is empty, not a mapping of settings"),
        (b"name: s\nname: t\n", "name is given twice, line 2, column 1: name: t ^"),
        (b"name: s\nextends: stady.yaml\n", "study.yaml: extends: "),
        (
            b"name: s\nextends: stady.yaml\n",
            "stady.yaml: cannot be read as YAML: No such file or directory (did you mean 'study.yaml'?)",
        ),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b"name: s\narms: {a: {}}\nseed: [1]\n", "seed is not a known key (did you mean 'seeds'?)"),
    ],
)
def test_a_file_that_is_no_study(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "study.yaml").write_bytes(content)
    with pytest.raises(StudyError) as caught:
        read_study(tmp_path / "study.yaml")
    assert str(tmp_path / "study.yaml") in str(caught.value) and words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_extends_others(tmp_path: Path) -> None:
    """What a file says itself counts most; mappings are merged, lists are not; paths are those from the file."""
    texts = {
        "below.yaml": "seeds: [1, 2]\ntraining: {steps: 5, prompts: 4}\narms: {naive: {}}\n",
        "shared/middle.yaml": "extends: ../below.yaml\nseeds: [3]\ntraining: {steps: 6, group_size: 4}\n",
        "study.yaml": "extends: shared/middle.yaml\nname: s\ntraining: {steps: 7}\narms: {grpo: {estimator: grpo}}\n",
    }
    (tmp_path / "shared").mkdir()
    for name, text in texts.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    study = read_study(tmp_path / "study.yaml")
    training = {"steps": 7, "prompts": 4, "group_size": 4}
    written = {"name": "s", "seeds": [3], "training": training, "arms": {"naive": {}, "grpo": {"estimator": "grpo"}}}
    assert study == parse_study(written)
    assert "extends" not in study.model_dump()


def test_another_kind_of_task_or_policy_replaces_the_one_below() -> None:
    below = {"task": {"name": "arithmetic", "terms": [2, 3]}, "policy": {"layers": 2}}
    assert merged(below, {"task": {"problems": 5}})["task"] == {"name": "arithmetic", "terms": [2, 3], "problems": 5}
    above = {"task": {"name": "words"}, "policy": {"source": "pretrained", "path": "p"}}
    assert merged(below, above) == above
    assert merged(below, above, above) == above


def test_a_block_that_says_its_default_kind_is_merged() -> None:
    below = {"policy": {"layers": 2}, "evaluation": {"task": {"terms": [2, 3]}}}
    above = {"policy": {"source": "scratch", "heads": 2}, "evaluation": {"task": {"name": "words"}}}
    policy = {"layers": 2, "source": "scratch", "heads": 2}
    assert merged(below, above) == {"policy": policy, "evaluation": {"task": {"name": "words"}}}


KINDS_BELOW = {
    "sampler": {"engine": "vllm", "tensor_parallel": 2},
    "vocabulary": {"rule": "min_p", "rho": "e-13"},
    "clip": {"ratio": "bypass", "low": 0.1},
}
KINDS_ABOVE = {
    "sampler": {"engine": "mine:Engine", "options": {"most": 8}},
    "vocabulary": {"rule": "top_k", "k": 5},
    "clip": {"ratio": "bypass", "loss": "sapo"},
}


@pytest.mark.parametrize("block", KINDS_BELOW)
def test_a_block_of_another_kind_replaces_the_one_below(block: str) -> None:
    """Wherever it stands; of the same kind it is merged."""
    below, above = ({"arms": {"a": {block: blocks[block]}}} for blocks in (KINDS_BELOW, KINDS_ABOVE))
    assert merged(below, above) == above
    assert parse_study({"name": "s", **merged(below, above)})
    same = {"arms": {"a": {block: {"dtype": "float32"}}}}
    assert merged(below, same)["arms"]["a"][block] == {**KINDS_BELOW[block], "dtype": "float32"}
    engines = {"distributions": {"engines": {"e": {"sampler": KINDS_BELOW["sampler"]}}}}
    other = {"distributions": {"engines": {"e": {"sampler": KINDS_ABOVE["sampler"]}}}}
    assert merged(engines, other) == other


def test_settings_of_before_the_kinds_are_read_as_they_are_now() -> None:
    """Earlier versions recorded the fields of all kinds. What another kind alone has is left out at its default."""
    run = parse_study({"name": "s", "arms": {"a": {"clip": {"loss": "free", "ratio": "bypass"}}}}).run("a")
    whole = run.model_dump(mode="json")
    nothing: dict[str, Any] = dict.fromkeys(("rho", "k", "p", "budget", "rho_easy"))
    whole["vocabulary"] |= nothing | {"adapt": "none"}
    whole["clip"] |= {"low": 0.2, "high": 0.2, "dual": None}
    assert Run.model_validate_json(json.dumps(whole)) == run
    for block, key, value in (("vocabulary", "k", 5), ("clip", "low", 0.1), ("sampler", "options", {"a": 1})):
        changed = {**whole, block: {**whole[block], key: value}}
        with pytest.raises(ValidationError, match=f"does not use {key}"):
            Run.model_validate(changed)


@pytest.mark.parametrize("block", ["arms", "ablations", "distributions.engines"])
@pytest.mark.parametrize("key", ["name", "source", "policy", "task", "evaluation"])
def test_any_key_may_name_what_a_file_adds(tmp_path: Path, block: str, key: str) -> None:
    """An arm that is called as a key of a study is called is one arm more: none of those below is dropped."""
    added = {
        "arms": {"estimator": "grpo"},
        "ablations": {"field": "training.steps", "values": [1, 2], "base": "naive"},
        "distributions.engines": {"sampler": {"engine": "transformers"}},
    }[block]
    levels = block.split(".")
    below, above = ({"name": "s", "arms": {"naive": {}}}, {"extends": "below.yaml"})
    for config, names in ((below, ["first", "second"]), (above, [key])):
        inner: dict[str, Any] = config
        for level in levels:
            inner = inner.setdefault(level, {})
        inner.update(dict.fromkeys(names, added))
    (tmp_path / "below.yaml").write_text(json.dumps(below), encoding="utf-8")
    (tmp_path / "above.yaml").write_text(json.dumps(above), encoding="utf-8")
    study: Any = read_study(tmp_path / "above.yaml")
    for level in levels:
        study = getattr(study, level)
    assert {"first", "second", key} <= study.keys()


def test_a_missing_file() -> None:
    with pytest.raises(StudyError, match=r"nowhere\.yaml: cannot be read as YAML: .*No such file"):
        read_study("nowhere.yaml")


def test_a_name_that_a_file_beside_has_too_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "studies").mkdir()
    monkeypatch.chdir(tmp_path)
    texts = {"config.yaml": "default", "studies/a.yaml": "a", "studies/b.yaml": "a", "studies/c.yaml": "default"}
    for file, name in texts.items():
        Path(file).write_text(f"name: {name}\n", encoding="utf-8")
    Path("studies/broken.yaml").write_text("[", encoding="utf-8")
    alike = {file: named_alike(file, name) for file, name in texts.items()}
    expected = {"studies/a.yaml": "studies/b.yaml", "studies/b.yaml": "studies/a.yaml", "studies/c.yaml": "config.yaml"}
    assert alike == {"config.yaml": None, **{file: Path(other) for file, other in expected.items()}}


# --- the schema --------------------------------------------------------------------------------------


def test_the_schema_is_the_typed_study() -> None:
    file = ROOT / "workflow/schemas/study.schema.json"
    expected = json.dumps(Study.model_json_schema(), indent=2, ensure_ascii=False) + "\n"
    found = file.read_text(encoding="utf-8")
    diff = "\n".join(
        difflib.unified_diff(found.splitlines(), expected.splitlines(), "file", "typed study", lineterm="")
    )
    assert not diff, f"run `tailrl schema > workflow/schemas/study.schema.json`\n{diff}"


def numbers_without_a_limit(node: Any, where: str = "") -> list[str]:
    """Where a schema takes numbers of any size, by the path of its keys."""
    if isinstance(node, list):
        return [path for part in node for path in numbers_without_a_limit(part, where)]
    if not isinstance(node, dict):
        return []
    is_number = node.get("type") in ("integer", "number") and not {"enum", "const"} & node.keys()
    limited = {"maximum", "exclusiveMaximum"} & node.keys()
    here = [where] if is_number and not limited else []
    return here + [path for key, part in node.items() for path in numbers_without_a_limit(part, f"{where}.{key}")]


def test_every_number_has_a_largest_value() -> None:
    assert numbers_without_a_limit({"a": {"type": "integer"}, "b": [{"type": "number", "maximum": 1}]}) == [".a"]
    assert numbers_without_a_limit(Study.model_json_schema()) == []
    assert numbers_without_a_limit(ProbeSettings.model_json_schema()) == []


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("training: {steps: 1:30}", "line 3, column 19"),
        ("training: {steps: 010}", "line 3, column 19"),
        ("training: {prompts: 1_0}", "line 3, column 21"),
        ("training: {steps: 0b11}", "line 3, column 19"),
        ("training: {learning_rate: 1:30.5}", "line 3, column 27"),
        ("arms: {a: {vocabulary: {rule: min_p, rho: 0x1}}}", "line 3, column 43"),
        ("seeds: [1, -0_1]", "line 3, column 12"),
        ("arms: {007: {}}", "line 3, column 8"),
    ],
)
def test_a_number_that_yaml_s_versions_read_apart_is_refused_where_it_stands(
    tmp_path: Path, line: str, place: str
) -> None:
    """Octal, binary, in sixties, with underscores: PyYAML reads another number than an editor of today."""
    (tmp_path / "study.yaml").write_text(f"name: s\n\n{line}\n", encoding="utf-8")
    with pytest.raises(StudyError, match="write decimal digits, or quotes") as caught:
        read_study(tmp_path / "study.yaml")
    assert place in str(caught.value) and "\n" not in str(caught.value)


def test_numbers_that_all_read_alike_are_accepted(tmp_path: Path) -> None:
    arms = "arms: {'010': {training: {learning_rate: 1e-3}}}"
    text = f"name: '0x1'\nseeds: [0, 10]\nbaselines: [0.5, 1., +1.5e-1]\n{arms}\n"
    (tmp_path / "study.yaml").write_text(text, encoding="utf-8")
    study = read_study(tmp_path / "study.yaml")
    assert (study.name, study.seeds, study.baselines) == ("0x1", (0, 10), (0.5, 1.0, 0.15))
    assert study.run("010").training.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training": {"prompts": 10**15}}, "training.prompts"),
        ({"training": {"learning_rate": 1e308}}, "training.learning_rate"),
        ({"arms": {"a": {"training": {"max_new_tokens": 10**12}}}}, "arms.a.training: max_new_tokens"),
        ({"training": {"prompts": 10**5, "group_size": 10**5}}, "more than 1000000 responses"),
        ({"training": {"prompts": 1000, "group_size": 1000, "max_new_tokens": 10**6}}, "more than 10000000000 tokens"),
        ({"evaluation": {"samples": 10**6}}, "evaluation: 200 problems with 1000000 responses each are more than"),
        ({"seeds": list(range(2000))}, "seeds"),
        ({"policy": {"hidden_size": 65536, "heads": 512, "layers": 1000}}, "weights are more than 1e+11"),
        ({"ablations": {"x": {"base": "a", "field": "training.steps", "values": [1, 10**18]}}}, "training: steps"),
    ],
)
def test_sizes_without_sense_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    data = {"name": "s", "arms": {"a": {}}, "task": {"problems": 10_000_000}, **changes}
    (tmp_path / "study.yaml").write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(StudyError, match=re.escape(words)) as caught:
        read_study(tmp_path / "study.yaml")
    assert "\n" not in str(caught.value)


def test_every_setting_is_described() -> None:
    schema = Study.model_json_schema()
    blocks = {"Study": schema, **schema["$defs"]}
    for name, block in blocks.items():
        assert block.get("description"), name
        for key, field in block["properties"].items():
            refers = "$ref" in json.dumps(field) or "const" in field  # described where it leads to
            assert refers or field.get("description"), f"{name}.{key}"


def test_the_default_study_is_what_its_file_says() -> None:
    """Nothing in the file is lost on the way in: every value it gives can be read back."""
    data = yaml.safe_load((ROOT / "config.yaml").read_text(encoding="utf-8"))
    study = read_study(ROOT / "config.yaml").model_dump(mode="json")

    def check(given: object, got: object, path: str) -> None:
        if isinstance(given, dict):
            for key, value in given.items():
                assert isinstance(got, dict)
                check(value, got[key], f"{path}.{key}")
        elif isinstance(given, list) and given and isinstance(given[0], dict):
            assert isinstance(got, list)
            for place, (one, read) in enumerate(zip(given, got, strict=True)):
                check(one, read, f"{path}.{place}")
        elif path.endswith(".rho") or ".values" in path:
            assert str(given) == str(got) or got == given
        else:
            assert given == got or list(given) == got, path  # type: ignore[call-overload]

    check(data, study, "")


def test_another_import_path_is_another_kind() -> None:
    below = {
        "sampler": {"engine": "mine:B", "options": {"d": 1}},
        "clip": {"loss": "b:g", "ratio": "bypass", "high": 0.3},
    }
    above = {"sampler": {"engine": "mine:A", "options": {"a": 1}}, "clip": {"loss": "a:f", "ratio": "bypass"}}
    found = merged({"arms": {"x": below}}, {"arms": {"x": above}})
    assert found == {"arms": {"x": above}}


@pytest.mark.parametrize(
    ("sampler", "words"),
    [
        ({"engine": "m:E", "options": {"a": float("nan")}}, "options: needs plain data"),
        ({"engine": "m:E", "options": {"a": {1, 2}}}, "options: needs plain data"),
        ({"engine": "m:E", "options": {"a": "\ud800"}}, "options: needs plain data"),
        ({"engine": "transformers", "tensor_parallel": True}, "engine: transformers does not use tensor_parallel"),
    ],
)
def test_an_engines_settings_that_cannot_be(sampler: dict[str, Any], words: str) -> None:
    with pytest.raises(StudyError, match=re.escape(words)):
        parse_study({"name": "s", "arms": {"a": {"sampler": sampler}}})
