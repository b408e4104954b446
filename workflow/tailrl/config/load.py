"""Reads a study: the only reader of its YAML, and of the JSON that rules hand to jobs."""

import copy
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from tailrl.config import merging
from tailrl.config.base import NAME_RULE, Settings
from tailrl.config.messages import near, sentences
from tailrl.config.study import Study
from tailrl.config.training import differing
from tailrl.runtime.errors import ConfigurationError, StorageError, few, one_line, reason
from tailrl.runtime.limits import regular

SettingsT = TypeVar("SettingsT", bound=Settings)


def parse_study(config: Mapping[str, Any], source: str = "the study") -> Study:
    """A validated study from plain data; raises StudyError, which names `source` and key."""
    if "/" in str(config.get("name", "")):
        # A part's name, which the workflow makes: here it would be a part of another study.
        raise ConfigurationError(f"{source}: name: needs {NAME_RULE} (given: {one_line(repr(config['name']))})")
    return validated(Study, copy.deepcopy(merged(config)), source)


def validated(model: type[SettingsT], values: Mapping[str, Any], source: str) -> SettingsT:
    """A block of settings from plain data; raises StudyError, which names `source` and key."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigurationError(f"{source}: {sentences(error, model)}") from None


LARGEST_FILE, MOST_VALUES = 200_000, 10_000
"""Characters of a study's file, and keys and values in it, where each use of an anchor counts anew."""


class _Loader(yaml.SafeLoader):
    """YAML of plain data; a key that is given twice is an error, since YAML would drop its first value."""

    def construct_document(self, node: yaml.Node) -> Any:
        self._count(node, {})
        return super().construct_document(node)

    def _count(self, node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
        """The keys and values of a node; raises ConstructorError where anchors make too many of them."""
        if node not in counted:
            counted[node] = 0  # of a node within itself
            children = node.value if isinstance(node, yaml.CollectionNode) else []
            parts = itertools.chain.from_iterable(part if isinstance(part, tuple) else (part,) for part in children)
            counted[node] = 1 + sum(self._count(part, counted) for part in parts)
            if counted[node] > MOST_VALUES:
                words = f"more than {MOST_VALUES} keys and values, with those that anchors repeat"
                raise yaml.constructor.ConstructorError(None, None, words, node.start_mark)
        return counted[node]

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        """A whole number in decimal digits. YAML 1.1 reads 010 as 8 and 1:30 as 90, later YAML as 10 and as text."""
        if not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", str(node.value)):
            raise self._ambiguous(node)
        return int(super().construct_yaml_int(node))

    def construct_yaml_float(self, node: yaml.ScalarNode) -> float:
        if re.search(r"[:_]", str(node.value)):
            raise self._ambiguous(node)
        return float(super().construct_yaml_float(node))

    def _ambiguous(self, node: yaml.Node) -> yaml.YAMLError:
        words = f"{node.value} is another number, or text, to other readers of YAML: write decimal digits, or quotes"
        return yaml.constructor.ConstructorError(None, None, words, node.start_mark)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        given = Counter(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<")
        if twice := sorted(key for key, times in given.items() if times > 1):
            last = [key for key, _ in node.value if key.value == twice[0]][-1]
            raise yaml.constructor.ConstructorError(None, None, f"{twice[0]} is given twice", last.start_mark)
        return super().construct_mapping(node, deep)


# PyYAML keeps the functions of its own loader.
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.construct_yaml_float)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; raises StudyError if it holds none, or a key twice in one block."""
    try:
        with open(path, encoding="utf-8", opener=regular) as file:
            text = file.read(LARGEST_FILE + 1)
        if len(text) > LARGEST_FILE:
            raise ValueError(f"more than {LARGEST_FILE} characters")
        config = yaml.load(text, _Loader)  # a safe loader
    # A value that does not fit its tag, such as !!timestamp x, raises what its conversion happens to raise.
    except (OSError, ValueError, LookupError, TypeError, AttributeError, yaml.YAMLError, RecursionError) as error:
        words = reason(error).replace(' in "<unicode string>"', "")
        hint = near(Path(path).name, _neighbours(path)) if isinstance(error, FileNotFoundError) else ""
        raise ConfigurationError(f"{one_line(path)}: cannot be read as YAML: {words}{hint}") from None
    if config is None:
        raise ConfigurationError(f"{one_line(path)}: is empty, not a mapping of settings")
    if not isinstance(config, dict):
        raise ConfigurationError(f"{one_line(path)}: holds {type(config).__name__}, not a mapping of settings")
    return config


def _neighbours(path: str | Path) -> list[str]:
    return sorted(file.name for file in Path(path).parent.glob("*.yaml"))


def merged(*configs: Mapping[str, Any]) -> dict[str, Any]:
    """One study of several mappings; later ones override earlier ones, as Snakemake merges files and `--config`.

    A block of another kind, such as a task or a sampler, replaces the earlier one, which has other keys. `Study` says
    where blocks of kinds stand.
    """
    return merging.merged(map(_parts_by_text, configs), Study)


def _parts_by_text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """With the names of parts as text: YAML takes 1 for a number, and "1" would be another part."""
    parts = config.get("parts")
    if not isinstance(parts, Mapping):
        return config
    return {**config, "parts": {str(name): settings for name, settings in parts.items()}}


def read_config(path: str | Path) -> dict[str, Any]:
    """A study file's settings, merged over those of the file that it extends, and so on.

    Raises:
        StudyError: one of the files cannot be read, holds no mapping or a key twice, or extends itself.
    """
    config: dict[str, Any] = {}
    try:
        for below in _files(path):
            config = merged(below, config)
    except RecursionError:
        raise ConfigurationError(f"{one_line(path)}: holds a mapping that holds itself") from None
    return config


def _files(path: str | Path) -> Iterator[dict[str, Any]]:
    """The settings of a study's file and of those below it, without `extends`."""
    config, file, read = read_yaml(path), Path(path), [Path(path).resolve()]
    while True:
        base = config.pop("extends", None)
        yield config
        if base is None:
            return
        if not isinstance(base, str):
            raise ConfigurationError(
                f"{one_line(file)}: extends: needs the path of a file (given: {one_line(repr(base))})"
            )
        above, file = file, file.parent / base
        try:
            config = read_yaml(file)
        except ConfigurationError as error:
            raise ConfigurationError(f"{one_line(above)}: extends: {error}") from None
        if file.resolve() in read:
            raise ConfigurationError(f"{one_line(path)}: extends: {one_line(base)} leads back to itself")
        read.append(file.resolve())


def read_study(path: str | Path) -> Study:
    """A validated study from a YAML file; raises StudyError if it cannot be read or is not valid."""
    return parse_study(read_config(path), str(path))


def named_alike(path: str | Path, name: str) -> Path | None:
    """Another file beside a study's that gives its study the same name; of those in studies/, config.yaml too."""
    folder = Path(path).parent
    beside = sorted(folder.glob("*.yaml")) + [Path("config.yaml")] * (folder.resolve() == Path("studies").resolve())
    for other in beside:
        with suppress(ConfigurationError):
            if other.resolve() != Path(path).resolve() and read_config(other).get("name") == name:
                return other
    return None


def parse_settings(model: type[SettingsT], text: str) -> SettingsT:
    """One block of settings from JSON text or from a JSON file; raises StudyError."""
    inline = text.lstrip().startswith("{")
    try:
        if inline:
            return model.model_validate_json(text)
        with open(text, encoding="utf-8", opener=regular) as file:
            return model.model_validate_json(file.read())
    except ValidationError as error:
        where = "" if inline else f"{one_line(text)}: "
        raise ConfigurationError(f"{where}{model.__name__} settings: {sentences(error, model)}") from None
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, or an impossible file name
        name = one_line(text) if text.isprintable() and text else repr(text)
        raise StorageError(f"{model.__name__} settings: {name}: cannot be read: {reason(error)}") from None


NOTE = "study_file"
"""In a study's folder of results: the path of the file that said what they are."""


def own_results(results: Path, file: Path, study: Study) -> str:
    """The file's path for the note in a folder of results: relative if possible, so that a checkout can be moved.

    Raises:
        StudyError: another file made these results, and still gives its study the same name but other settings.
    """
    path = str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)
    noted = (results / NOTE).read_text(encoding="utf-8").strip() if (results / NOTE).is_file() else path
    if noted == path or not Path(noted).is_file():
        return path
    try:
        theirs = read_study(noted)
    except ConfigurationError:
        return path
    if theirs.name != study.name:
        return path
    own, other = (found.model_dump(mode="json", exclude={"description"}) for found in (study, theirs))
    if keys := list(differing(other, own)):
        raise ConfigurationError(
            f"{path} and {noted} both name their study {study.name!r}, but differ in {few(keys)}: {results} holds the "
            f"results of {noted}; give {path} another name"
        )
    return noted
