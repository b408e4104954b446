"""Each framework's names for our columns, and a row of its log as a sequence."""

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tailrl.artifacts.files import Record
from tailrl.artifacts.metrics import FloatArray
from tailrl.diagnosis.columns import ids, is_json_list, last, numbers
from tailrl.diagnosis.left_out import RowError
from tailrl.diagnosis.log import OPTIONAL_NUMBERS, SIDES, IntArray, LoggedRow, seen_before
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError, few, one_line

PER_TOKEN = (*SIDES, "token", *OPTIONAL_NUMBERS)
PER_ROW = ("kept", "step", "version", "reward", "text", "prompt", "prompt_mask", "response", "schema")
ROLES = (*PER_TOKEN, "mask", *PER_ROW)  # our names of columns
SCHEMA = 1  # the version of the plain schema that is written, and the newest one that is read
MASKS_OF_ANY = ("attention_mask",)  # besides the formats' own names, and after them
MOST_LABELS, LONGEST_LABEL = 16, 64  # columns of one word a row, and letters of a word; a longer one is a text
STEP_IN_WORDS = r"[A-Za-z_ /=-]*(\d{1,15})"  # such as step_12
FEWEST_TO_ALIGN = 4  # tokens whose log-probs say how two columns are aligned


class Format(Record):
    """A framework's names for our columns.

    Attributes:
        title: what it is called.
        columns: our name to theirs.
        late: our names of columns whose entry at a place is that of the token after it.
        from_second: our names of columns that may begin at the second token, as what a forward pass returns.
        step_in_name: a pattern whose first group is the step in a file's name.
        source: what was read to know.
        is_other_mask: whether the mask has the name that another format gives it.
    """

    title: str
    columns: dict[str, str]
    late: tuple[str, ...] = ()
    from_second: tuple[str, ...] = ()
    step_in_name: str | None = None
    source: str | None = None
    is_other_mask: bool = False


class Dump(Record):
    """What a framework writes that holds no log-probs of both sides.

    Attributes:
        framework: as in `logging.yaml`. title: what it is called.
        columns: names that a row has, or a document.
        path: how the end of a file's path looks, where its columns do not tell.
        source: what was read to know.
    """

    framework: str
    title: str
    columns: tuple[str, ...] = ()
    path: str | None = None
    source: str


@cache
def formats() -> dict[str, Format]:
    """The known formats by name, in the order in which they are tried."""
    return {
        name: Format.model_validate(entry, strict=False)
        for name, entry in yaml_beside(__file__, "formats.yaml").items()
    }


@cache
def dumps() -> tuple[Dump, ...]:
    """What frameworks write that is no log of tokens, in the order in which it is tried."""
    return tuple(Dump.model_validate(entry, strict=False) for entry in yaml_beside(__file__, "dumps.yaml"))


@cache
def logging_lines() -> dict[str, str]:
    """How each framework logs tokens."""
    return dict(yaml_beside(__file__, "logging.yaml"))


def how_to_log(framework: str) -> str:
    """How a framework logs tokens, in a sentence or two."""
    return logging_lines().get(framework, logging_lines()["other"])


# --- which format ----------------------------------------------------------------------------------------


def parse_columns(text: str, roles: Sequence[str] = ROLES) -> dict[str, str]:
    """Names of columns from `sampler=NAME,trainer=NAME,...`: our name to the file's.

    Raises:
        StudyError: a part has another form, or an unknown or repeated name of ours.
    """
    chosen: dict[str, str] = {}
    for part in text.split(","):
        role, separator, name = (piece.strip() for piece in part.partition("="))
        if not separator or not name or role not in roles or role in chosen:
            raise ConfigurationError(
                f"--columns {one_line(text)}: {part.strip() or 'an empty part'} is not ROLE=NAME, once for each role; "
                f"the roles are {', '.join(roles)}"
            )
        chosen[role] = name
    return chosen


def check_columns(chosen: Mapping[str, str]) -> dict[str, str]:
    """The same mapping, as text; raises StudyError for an unknown role."""
    for role in chosen:
        if role not in ROLES:
            raise ConfigurationError(f"columns: {one_line(role)} is no role; the roles are {', '.join(ROLES)}")
    return {role: str(name) for role, name in chosen.items()}


def recognise(names: Iterable[str], where: str, chosen: Mapping[str, str] | None = None) -> Format:
    """The format that has these names.

    Args:
        names: those of a row's columns.
        where: of the row, for messages.
        chosen: names that the user gave, our name to the file's.

    Raises:
        RowError: there is none; it says what is missing, or what the row is instead.
    """
    present = set(names)
    known = _recognised(present, where, chosen)
    if known.columns.get("mask") in present:
        return known
    masks = (*(one.columns["mask"] for one in formats().values() if "mask" in one.columns), *MASKS_OF_ANY)
    other = next((name for name in masks if name in present), None)
    if other is None or (chosen and other in chosen.values()):
        return known
    return _with(known, {"mask": other}).model_copy(update={"is_other_mask": True})


def _recognised(present: set[str], where: str, chosen: Mapping[str, str] | None) -> Format:
    if chosen:
        if unknown := [name for name in chosen.values() if name not in present]:
            raise RowError(
                f"it has no column {unknown[0]}",
                f"{where}: has no column {unknown[0]}; it has {few(sorted(map(str, present)), 30) or 'nothing'}",
            )
        fits = [_with(known, chosen) for known in formats().values()]
        fits = [known for known in fits if all(known.columns.get(side) in present for side in SIDES)]
        if fits:
            return max(fits, key=lambda known: sum(name in present for name in known.columns.values()))
    for known in formats().values():
        if all(known.columns[side] in present for side in SIDES):
            return known
    pair = {side: {known.columns[side] for known in formats().values()} & present for side in SIDES}
    if all(len(pair[side]) == 1 for side in SIDES) and pair["sampler"] != pair["trainer"]:
        return _mixed(pair["sampler"].pop(), pair["trainer"].pop(), present)
    raise _unknown(present, where)


def has_sides(columns: Mapping[Any, Any], chosen: Mapping[str, str] | None = None) -> bool:
    """Whether a mapping has columns of both sides."""
    try:
        recognise([name for name in columns if isinstance(name, str)], "", chosen)
    except RowError:
        return False
    return True


def _with(known: Format, chosen: Mapping[str, str]) -> Format:
    return known.model_copy(update={"columns": {**known.columns, **chosen}})


def _mixed(sampler: str, trainer: str, present: set[str]) -> Format:
    """A format of one framework's name for the sampler and another one's for the trainer."""
    fits = [
        _with(known, {"sampler": sampler, "trainer": trainer})
        for known in formats().values()
        if sampler == known.columns["sampler"] or trainer == known.columns["trainer"]
    ]
    best = max(fits, key=lambda known: sum(name in present for name in known.columns.values()))
    return best.model_copy(update={"title": f"columns {sampler} and {trainer}", "late": ()})


def _unknown(present: set[str], where: str) -> RowError:
    names = few(sorted(map(str, present))) or "nothing"
    for dump in dumps():
        if dump.columns and set(dump.columns) <= present:
            words = f"is {dump.title}; a mismatch needs the log-probs of both sides. {how_to_log(dump.framework)}"
            return RowError(f"it is {dump.title}", f"{where}: {words}", dump.framework)
    halves: dict[tuple[str, str], list[str]] = {}
    for known in formats().values():
        for side, other in (SIDES, SIDES[::-1]):
            if known.columns[side] in present:
                halves.setdefault((known.columns[side], other), []).append(known.columns[other])
    for (has, other), lacks in halves.items():
        lacking = " or ".join(dict.fromkeys(lacks))
        says = f"has {has} and no {lacking}: a mismatch needs the log-probs of both sides"
        way = f"it has {few(sorted(map(str, present)), 12)}; name the other one with --columns {other}=NAME"
        return RowError(f"it {says}", f"{where}: {says}; {way}")
    plain = " and ".join(formats()["plain"].columns[side] for side in SIDES)
    titles = ", ".join(dict.fromkeys(known.title.partition(",")[0] for known in formats().values()))
    return RowError(
        "it has no column of a known log",
        f"{where}: no known log: it has {names}, and not {plain}, nor the columns of {titles}; "
        "other names are given with --columns sampler=NAME,trainer=NAME, and of curves k3=NAME,step=NAME",
    )


# --- rectangles ------------------------------------------------------------------------------------------


def rows_of(row: Mapping[str, Any], known: Format, where: str) -> Iterator[Mapping[str, Any]]:
    """The sequences of a row: the row itself, or one for each line of a rectangle [B, T], B > 1.

    A column with B entries is one entry a sequence; any other is shared by all, such as the step.

    Raises:
        RowError: one side is a rectangle, and the other is none of as many lines.
    """
    row = {name: value.unbind() if getattr(value, "is_nested", False) else value for name, value in row.items()}
    sides = [known.columns[side] for side in SIDES]
    lines = {name: _lines(row.get(name)) for name in sides}
    count = max(lines.values())
    if count < 2:
        yield row
        return
    if min(lines.values()) < count:
        shapes = " and ".join(f"{name} {'a list' if n == 1 else f'a table of {n} rows'}" for name, n in lines.items())
        raise RowError(
            "their sides differ in shape", f"{where}: both sides' log-probs must have one shape, but here are {shapes}"
        )
    of_each = {name for name in known.columns.values() if name in row and length_of(row[name]) == count}
    for line in range(count):
        yield {name: value[line] if name in of_each else value for name, value in row.items()}


def length_of(value: Any) -> int:
    """How many entries a list, an array or a tensor has; 0 for a number or a text."""
    if isinstance(value, list | tuple):
        return len(value)
    shape = _shape(value)
    return int(shape[0]) if shape else 0


def _shape(value: Any) -> tuple[int, ...]:
    """The shape of an array or a tensor; () of what has none, as torch's nested tensors."""
    try:
        shape: tuple[int, ...] = getattr(value, "shape", ())
        return shape
    except RuntimeError:  # torch's word on a nested tensor
        return ()


def _lines(value: Any) -> int:
    """B of a rectangle [B, T]; 1 for a list of numbers."""
    if isinstance(value, list | tuple):
        return len(value) if value and all(isinstance(one, list | tuple) or length_of(one) for one in value) else 1
    shape = _shape(value)
    return int(shape[0]) if len(shape) == 2 else 1


# --- a row as a sequence ---------------------------------------------------------------------------------


def row_of(
    row: Mapping[str, Any], known: Format, where: str, step: float = np.nan, notes: Counter[str] | None = None
) -> LoggedRow | None:
    """One sequence from a row of a log; None if the log leaves it out.

    `notes` counts sentences on what was taken in another way than by the format.

    Raises:
        RowError: a column is no list of numbers, or two columns differ in length.
    """
    columns = {role: row[name] for role, name in known.columns.items() if row.get(name) is not None}
    notes = Counter() if notes is None else notes
    _check_schema(columns.pop("schema", SCHEMA), where)
    if "kept" in columns and not _one(columns["kept"], known, "kept", where):
        return None
    needed = SIDES if known.is_other_mask else (*SIDES, "mask")
    tokens: dict[str, FloatArray] = {}
    for name in (*PER_TOKEN, "mask"):
        try:
            if name in columns:
                tokens[name] = _numbers(columns[name], known, name, where)
        except RowError as error:
            if name in needed:
                raise
            notes[f"{error.reason}; it is not used"] += 1
    if absent := [known.columns[side] for side in SIDES if side not in tokens]:
        raise RowError(f"{absent[0]} is missing", f"{where}: {absent[0]} is missing")
    length = len(tokens["sampler"])
    whole_token_T = tokens.get("token")
    for name in known.from_second:
        if name in tokens and len(tokens[name]) == length - 1:
            tokens[name] = np.append(np.nan, tokens[name])
    if known.is_other_mask and "mask" in tokens:
        mask = known.columns["mask"]
        if len(tokens["mask"]) < length:
            del tokens["mask"]
            notes[f"{mask} is shorter than the log-probs and is not used as a mask"] += 1
        else:
            notes[f"the mask is the column {mask}"] += 1
    for name, values in list(tokens.items()):
        if name in ("token", "mask") and len(values) > length:
            tokens[name] = values[len(values) - length :]  # the prompt comes first
            if name == "mask":
                notes[f"{known.columns[name]} is longer than the log-probs, and its end is taken"] += 1
        elif name == "advantage" and len(values) == 1:
            tokens[name] = np.full(length, values[0])
        elif len(values) != length and name not in needed:
            notes[f"{known.columns[name]} differs in length from {known.columns['sampler']}; it is not used"] += 1
            del tokens[name]
        elif len(values) != length:
            raise RowError(
                "their columns differ in length",
                f"{where}: {known.columns[name]} has {len(values)} numbers, and {known.columns['sampler']} {length}",
            )
    if known.late:
        tokens = _aligned(tokens, known, "advantage" in tokens)
    chosen_T = np.ones(length, bool)
    if "mask" in tokens:
        chosen_T = tokens.pop("mask") > 0
        tokens = {name: values[chosen_T] for name, values in tokens.items()}
    row_ids_T = None if whole_token_T is None else ids(whole_token_T)
    prompt, seen_T, whole_T, place_T = _before(row_ids_T, chosen_T, columns)
    of_row: dict[str, float] = {}
    for name in ("step", "version", "reward"):
        try:
            if name in columns:
                of_row[name] = _one(columns[name], known, name, where)
        except RowError as error:
            notes[f"{error.reason}; it is not used"] += 1
    text = columns.get("text")
    step = of_row.get("step", step)
    return LoggedRow(
        where=where,
        sampler_T=tokens["sampler"],
        trainer_T=tokens["trainer"],
        token_T=ids(tokens["token"]) if "token" in tokens else None,
        **{f"{name}_T": tokens.get(name) for name in OPTIONAL_NUMBERS},
        seen_T=seen_T,
        step=step,
        version=of_row.get("version", np.nan),
        reward=of_row.get("reward", np.nan),
        text=str(text[0] if isinstance(text, list) and text else text) if text is not None else None,
        prompt=prompt,
        labels=_labels(row, known),
        digest=_digest(step, columns.get("prompt"), whole_token_T, tokens),
        whole_T=whole_T,
        place_T=place_T,
        prompt_text=columns["prompt"] if isinstance(columns.get("prompt"), str) else None,
    )


def _check_schema(value: Any, where: str) -> None:
    """Raises StudyError for a version of the plain schema that is not known here; a text is another's label."""
    if isinstance(value, str):
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value <= SCHEMA:
        raise RowError(
            "their schema is newer",
            f"{where}: schema is {_shown(value)}, and this tailrl reads {SCHEMA}: a newer one may know it",
        )


def _before(
    ids_T: IntArray | None, chosen_T: NDArray[np.bool_], columns: Mapping[str, Any]
) -> tuple[float, NDArray[np.bool_] | None, IntArray | None, IntArray | None]:
    """What stands before the chosen tokens.

    `ids_T`: the row's ids, which may begin with the prompt. Without a prompt of its own the row's prompt is what stands
    before the first chosen token.

    Returns:
        The prompt's number; which chosen tokens have an id that stands before them; the ids of prompt and response,
        and each chosen token's place in them: None and None where no prompt has ids.
    """
    prompt = columns.get("prompt")
    number = np.nan if prompt is None else _number_of(_shown_whole(prompt).encode("utf-8", "replace"))
    if ids_T is None or len(ids_T) < len(chosen_T) or not chosen_T.any():
        return number, None, None, None
    place_T = len(ids_T) - len(chosen_T) + np.flatnonzero(chosen_T)
    seen_T = seen_before(ids_T)[place_T]
    if place_T[0] and prompt is None:
        number = _number_of(ids_T[: place_T[0]].tobytes())
    elif place_T[0] == 0 and prompt is not None:
        prompt_T = _prompt_ids(columns)
        ids_T, place_T = np.concatenate([prompt_T, ids_T]), place_T + len(prompt_T)
    if place_T[0] == 0:
        return number, seen_T, None, None
    return number, seen_T, ids_T[: place_T[-1] + 1], place_T


def _prompt_ids(columns: Mapping[str, Any]) -> IntArray:
    """The prompt's ids without the padding that a mask shows; none for words or a name in digits."""
    try:
        given = numbers(columns["prompt"])
        mask_T = numbers(columns["prompt_mask"]).reshape(-1) if "prompt_mask" in columns else np.ones(given.size)
    except ValueError:
        return np.empty(0, np.int64)
    prompt_T: IntArray = ids(given.reshape(-1))[: given.size if given.ndim else 0]
    return prompt_T[mask_T[: len(prompt_T)] > 0] if len(mask_T) >= len(prompt_T) else prompt_T


def _number_of(content: bytes) -> float:
    """A number that is the same for equal contents: 52 bits, exact in float64."""
    return float(int.from_bytes(hashlib.blake2b(content, digest_size=7).digest(), "big") >> 4)


def _shown_whole(value: Any) -> str:
    try:
        return str(value.tolist() if hasattr(value, "tolist") else value)
    except Exception:  # an object of another library
        return type(value).__name__


def _labels(given: Mapping[str, Any], known: Format) -> dict[str, str]:
    """The other columns with one word or whole number a row, such as the data source."""
    taken = set(known.columns.values())
    if isinstance(given.get("schema"), str):
        taken.discard("schema")
    labels: dict[str, str] = {}
    for name, value in given.items():
        if name in taken or not isinstance(value, str | int) or len(labels) >= MOST_LABELS:
            continue
        if len(word := str(value) if isinstance(value, str) or abs(value) < 2**53 else "") <= LONGEST_LABEL and word:
            labels[str(name)[:LONGEST_LABEL]] = word
    return labels


def _digest(step: float, prompt: Any, whole_token_T: FloatArray | None, tokens: Mapping[str, FloatArray]) -> bytes:
    """What tells a response from any other: step, prompt, tokens and both sides' log-probs to the bit."""
    made = hashlib.blake2b(digest_size=12)
    for value in (step, prompt, whole_token_T, tokens["sampler"], tokens["trainer"]):
        try:
            made.update(numbers(value).tobytes())
        except ValueError:  # a prompt in words
            made.update(repr(value).encode("utf-8", "backslashreplace"))
        made.update(b"/")
    return made.digest()


def _aligned(tokens: dict[str, FloatArray], known: Format, is_later: bool) -> dict[str, FloatArray]:
    """The columns with each token's own entry at its place.

    AReaL's trainer has the log-prob of the token after a place there. When it computes advantages it moves the
    sampler's log-probs and the mask to the same places, and the token ids stay. A log that was written otherwise, with
    all columns at the tokens' own places, has no prompt or agrees better as it is.
    """
    if "mask" not in tokens or (len(tokens["mask"]) and tokens["mask"][0] > 0):
        return tokens
    if is_later:
        moved = {name: np.roll(tokens[name], -1) for name in ("token",) if name in tokens}
        return {**tokens, **moved}
    moved = {name: np.roll(tokens[name], 1) for name in known.late if name in tokens}
    chosen_T = tokens["mask"] > 0
    if chosen_T.sum() >= FEWEST_TO_ALIGN:
        sampler_T = tokens["sampler"][chosen_T]
        as_it_is, as_moved = (_gap(sampler_T, side["trainer"][chosen_T]) for side in (tokens, {**tokens, **moved}))
        if as_it_is < as_moved:
            return tokens
    return {**tokens, **moved}


def _gap(sampler_T: FloatArray, trainer_T: FloatArray) -> float:
    with np.errstate(all="ignore"):
        return float(np.nanmedian(np.abs(sampler_T - trainer_T)))


def _numbers(value: Any, known: Format, name: str, where: str) -> FloatArray:
    """A list of numbers, or a batch of one; null is NaN."""
    column = known.columns[name]
    try:
        values = numbers(value)
    except ValueError:
        values = np.empty((2, 2))
    if values.ndim == 0 and name in SIDES:
        raise RowError(
            "they have one number in place of a list",
            f"{where}: {column} is one number, {one_line(value)}; a row is one response, with a list of its tokens' "
            "numbers, or one token, with a column response_id",
        )
    if (values.ndim > 1 and len(values) != 1) or values.ndim > 2:
        raise RowError(f"{column} is no list of numbers", f"{where}: {column} is no list of numbers: {_shown(value)}")
    return values.reshape(-1)


def _one(value: Any, known: Format, name: str, where: str) -> float:
    """A number of the whole sequence; of several versions the last, which gave the last tokens."""
    try:
        return last(value)
    except ValueError:
        if name == "step" and isinstance(value, str) and (digits := re.fullmatch(STEP_IN_WORDS, value)):
            return float(digits[1])
        if name == "version":  # a name such as a digest says nothing of an order
            return np.nan
        column = known.columns[name]
        raise RowError(f"{column} is no number", f"{where}: {column} is no number: {_shown(value)}") from None


def _shown(value: Any) -> str:
    try:
        return one_line(value)
    except Exception:  # a tensor without data may not be printed
        return type(value).__name__


def is_scalar(value: Any) -> bool:
    """Whether a cell holds one number, as where a row is a token."""
    return isinstance(value, str | int | float | np.number) and not is_json_list(value)
