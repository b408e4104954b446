"""Study files: those of the project, what a file extends, and the schema that describes them all."""

import difflib
import hashlib
import json
from pathlib import Path

import jsonschema
import pytest
import yaml

from tailrl.config.load import merged, named_alike, parse_study, read_study, read_yaml
from tailrl.config.study import Study
from tailrl.runtime.errors import StudyError

ROOT = Path(__file__).parents[3]
SHIPPED = [ROOT / "config.yaml", *sorted((ROOT / "studies").glob("*.yaml"))]


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_shipped_studies_are_valid(path: Path) -> None:
    study = read_study(path)
    for arm in study.all_arms():
        assert study.run(arm).study == study.name


PUBLISHED = {
    "ablate_adaptive_rho.yaml": "be822d955278d589",
    "ablate_correction.yaml": "7abadc0e3ebb96af",
    "ablate_domain_arithmetic.yaml": "8452aaf64edc861c",
    "ablate_domain_words.yaml": "6afad88484586b1e",
    "ablate_engine.yaml": "bbdfd0314aad428c",
    "ablate_estimator.yaml": "27c3adb2539a7790",
    "ablate_length_3.yaml": "97507dd28d068f00",
    "ablate_length_4.yaml": "a388168065c42d07",
    "ablate_length_6.yaml": "25d056f13d358759",
    "ablate_mask_side.yaml": "e6387e05528bc8fa",
    "ablate_mask_side_floor.yaml": "53bc3e35602548a3",
    "ablate_optimizer.yaml": "ec729076ae4e6eb2",
    "ablate_reject.yaml": "53491f8dff8a65fe",
    "ablate_rho.yaml": "d6b33e1af4815007",
    "ablate_rule.yaml": "19061c4c72fe0115",
    "ablate_temperature.yaml": "df4e46fc07ea818d",
    "causes_1.yaml": "8bf4cedc9c018b9b",
    "causes_2.yaml": "fb1bd5c221b97d28",
    "causes_3.yaml": "60971400c9a24957",
    "causes_4.yaml": "151ce1d2e219cdcd",
    "causes_5.yaml": "04aa1643d2427355",
    "collapse.yaml": "d4e774a6f5bc93a5",
    "config.yaml": "fb9d7eecc71b16e4",
    "dose_response.yaml": "e46e54162c8de6e2",
    "dvp_at_zero.yaml": "60899d53805ab82c",
    "gradient_catalogue.yaml": "f594967866619f41",
    "gradient_quality.yaml": "3c50ba093a171ce0",
    "long_030.yaml": "5ed2ab34f2f3f83d",
    "long_060.yaml": "d76e51b5de439c9f",
    "long_150.yaml": "22c89fde845e2b4b",
    "moe.yaml": "cccdae9b70e52a3b",
    "moe_dense.yaml": "a71cf24f1e1e5924",
    "remedies.yaml": "83b22831fdb5edc3",
    "search_causes.yaml": "b3ba18eb7b9f845e",
    "search_dose.yaml": "7d391ee595d84bd7",
    "search_horizon.yaml": "41054bbb8c3f76bd",
    "search_rate.yaml": "0f7353a88a80ae3a",
    "smollm2_checks.yaml": "efb5cf4c24c6ceca",
    "stale.yaml": "57a872be269d862c",
    "stress.yaml": "5da6eeee8388a496",
    "tim_isolated.yaml": "545eee3d55d3e6ad",
}
"""Digests of what the files of studies that ran say beyond the defaults, whichever file it stands in."""


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


@pytest.mark.parametrize("path", [path for path in SHIPPED if path.name in PUBLISHED], ids=lambda path: path.name)
def test_studies_that_ran_say_what_they_said(path: Path) -> None:
    settings = read_study(path).model_dump(mode="json", exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    assert digest[:16] == PUBLISHED[path.name]


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
        elif path.endswith(".rho") or ".values" in path:
            assert str(given) == str(got) or got == given
        else:
            assert given == got or list(given) == got, path  # type: ignore[call-overload]

    check(data, study, "")
