"""Each framework's own names and files: what its own code wrote is read, or gets the way to log tokens."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from log_fixture import SEQUENCES, plain_rows, write_lines

from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.formats import ROLES, dumps, formats, logging_lines, parse_columns
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log
from tailrl.diagnosis.tables import read_table
from tailrl.runtime.errors import StudyError

FILES = Path(__file__).parents[2] / "fixtures/framework_files"
"""`tests/fixtures/make_framework_files.py` made them with the frameworks' own writers."""


def check(log: Log) -> None:
    assert log.token_T.tolist() == [token for one in SEQUENCES for token in one["tokens"]]
    np.testing.assert_allclose(log.trainer_T, np.concatenate([one["train"] for one in SEQUENCES]), rtol=1e-6)
    np.testing.assert_allclose(log.sampler_T, np.concatenate([one["infer"] for one in SEQUENCES]), rtol=1e-6)
    lengths = [len(one["tokens"]) for one in SEQUENCES]
    assert log.advantage_T.tolist() == np.repeat([one["advantage"] for one in SEQUENCES], lengths).tolist()


@pytest.mark.parametrize("name", ["verl", "skyrl", "openrlhf"])
def test_batches_of_the_frameworks_own_classes_as_plain_tensors(name: str) -> None:
    ((title, log),) = read_log([FILES / name / "columns.pt"])
    assert title == formats()[name].title
    check(log)


@pytest.mark.parametrize(
    ("file", "word", "line"),
    [
        ("verl/batch.pkl", "verl.protocol.DataProto", "DataProto.load_from_disk('batch.pkl').batch.items()"),
        ("verl/tensordict.pt", "tensordict.", "torch.load('tensordict.pt', weights_only=False)"),
        (
            "skyrl/dumped_data/global_step_3_training_input.pkl",
            "skyrl.backends.skyrl_train.training_batch.",
            "pickle.load(open('global_step_3_training_input.pkl', 'rb'))",
        ),
    ],
)
def test_pickles_of_classes_get_the_line_that_makes_columns(file: str, word: str, line: str) -> None:
    with pytest.raises(StudyError) as raised:
        diagnose(FILES / file)
    sentence = str(raised.value)
    assert word in sentence and line in sentence and "which could run code; they are not loaded" in sentence
    compile(sentence.rpartition("turn it into columns: ")[2], file, "exec")


DUMPS = {
    "verl_rollouts": "verl",
    "trl": "TRL",
    "ms_swift": "ms-swift",
    "areal": "AReaL",
    "skyrl_eval": "SkyRL",
    "torchtitan": "torchtitan",
    "tinker_cookbook": "tinker-cookbook",
    "open_instruct": "open-instruct",
    "slime_rollouts": "slime",
}


@pytest.mark.parametrize("name", DUMPS)
def test_what_has_no_log_probs_of_both_sides_gets_the_way_to_log_tokens(name: str) -> None:
    framework = DUMPS[name]
    title = next(dump.title for dump in dumps() if dump.framework == framework)
    with pytest.raises(StudyError) as raised:
        diagnose(FILES / name)
    says = f"{FILES / name}: holds no log of tokens. It looks like a folder of {framework}: "
    assert str(raised.value).startswith(says) and f"is {title}. " in str(raised.value)
    assert str(raised.value).endswith(logging_lines()[framework])
    file = next(file for file in sorted((FILES / name).rglob("*")) if file.is_file() and "aggregated" not in file.name)
    with pytest.raises(StudyError) as raised:
        diagnose(file)
    assert f"is {title}; a mismatch needs the log-probs of both sides. {logging_lines()[framework]}" in str(
        raised.value
    )


def test_every_framework_has_a_way_to_log_tokens_and_every_format_a_source() -> None:
    assert {dump.framework for dump in dumps()} <= set(logging_lines())
    ours = {"plain", "plain_tokens", "tailrl"}
    for name, known in formats().items():
        assert set(known.columns) <= set(ROLES)
        assert name in ours or re.search(r"\.py(:\d+)? (and .*)?(of|at) |\.py", known.source or "")


def renamed(name: str, **more: Any) -> list[dict[str, Any]]:
    names = formats()[name].columns
    rows = []
    for one in SEQUENCES:
        row = {names["token"]: one["tokens"], names["sampler"]: one["infer"], names["trainer"]: one["train"]}
        rows.append(row | {names["advantage"]: one["advantage"], **more})
    return rows


@pytest.mark.parametrize("name", [name for name in formats() if name not in ("plain_tokens", "tailrl", "nemo_rl")])
def test_a_row_under_each_frameworks_own_names(name: str, tmp_path: Path) -> None:
    ((title, log),) = read_log([write_lines(tmp_path / "log.jsonl", renamed(name))])
    same_names = [
        one.title for one in formats().values() if one.columns["sampler"] == formats()[name].columns["sampler"]
    ]
    assert title in same_names
    check(log)


def test_names_of_two_frameworks_in_one_row() -> None:
    rows = [{"rollout_log_probs": [-1.0, -2.0], "old_per_token_logps": [-1.5, -2.0], "completion_mask": [1, 1]}]
    ((title, log),) = read_table(rows)
    assert title == "columns rollout_log_probs and old_per_token_logps"
    assert log.trainer_T.tolist() == [-1.5, -2.0]


# --- how columns are aligned -----------------------------------------------------------------------------


def areal(is_later: bool, late: bool = True) -> list[dict[str, Any]]:
    """A trajectory before or after compute_advantages, which moves log-probs and mask (areal/trainer/ppo/actor.py)."""
    random = np.random.default_rng(5)
    rows = []
    for length in (6, 9):
        train, prompt = -random.exponential(1, length), [7, 8, 9]
        infer = np.minimum(train + random.normal(0, 0.01, length), 0)
        row = {
            "input_ids": [*prompt, *random.integers(10, 90, length).tolist()],
            "loss_mask": [0] * 3 + [1] * length,
            "logprobs": [0.0] * 3 + infer.tolist(),
            "prox_logp": [-4.0] * 3 + train.tolist(),
        }
        if late:
            row["prox_logp"] = np.roll(row["prox_logp"], -1).tolist()
        if is_later:
            row |= {name: np.roll(row[name], -1).tolist() for name in ("loss_mask", "logprobs")}
            row["advantages"] = [0.5] * (length + 3)
        rows.append(row)
    return rows


@pytest.mark.parametrize(
    "rows", [areal(False), areal(True), areal(False, late=False)], ids=["before", "after", "moved"]
)
def test_areals_trainer_scores_the_token_after_a_place(rows: list[dict[str, Any]]) -> None:
    ((_, log),) = read_table(rows)
    expected = areal(False, late=False)
    assert log.trainer_T.tolist() == [x for row in expected for x in row["prox_logp"][3:]]
    assert log.sampler_T.tolist() == [x for row in expected for x in row["logprobs"][3:]]
    assert log.token_T.tolist() == [x for row in expected for x in row["input_ids"][3:]]


def test_open_instructs_trainer_begins_at_the_second_token() -> None:
    row = {
        "query_responses": [[1, 2, 3, 4]],
        "response_masks": [[0, 0, 1, 1]],
        "vllm_logprobs": [[np.nan, np.nan, -0.5, -0.25]],
        "old_logprobs": [[-9.0, -0.75, -0.125]],
    }
    ((_, log),) = read_table([row])
    assert (log.token_T.tolist(), log.sampler_T.tolist(), log.trainer_T.tolist()) == (
        *([3, 4], [-0.5, -0.25], [-0.75, -0.125]),
    )


# --- names that the user gives ---------------------------------------------------------------------------

OWN = {"sampler_logprobs": "lp vllm", "trainer_logprobs": "lp_fsdp", "token_ids": "ids", "advantage": "adv"}


def own_rows(**more: Any) -> list[dict[str, Any]]:
    return [{OWN.get(name, name): value for name, value in row.items()} | more for row in plain_rows()]


def test_names_that_the_user_gives(tmp_path: Path) -> None:
    chosen = parse_columns("sampler=lp vllm, trainer=lp_fsdp,token=ids,advantage=adv")
    file = write_lines(tmp_path / "log.jsonl", own_rows())
    for parts in (read_log([file], columns=chosen), read_table(own_rows(), columns=chosen)):
        ((_, log),) = parts
        check(log)
        assert log.reward_S.tolist() == [one["reward"] for one in SEQUENCES]  # under its known name
    assert diagnose(file, columns=chosen).measured.tokens == 8
    with pytest.raises(StudyError, match="no known log: it has adv, ids, lp vllm, lp_fsdp and 2 more"):
        diagnose(file)


@pytest.mark.parametrize(
    ("sampler", "trainer", "role"),
    [
        ("vllm_logprobs", "hf_logprobs", "trainer"),
        ("inference_logprobs", "train_logprobs", "trainer"),
        ("rollout_log_probs", "logprobs", "trainer"),
        ("engine_lp", "old_log_probs", "sampler"),
    ],
)
def test_a_renamed_side_is_refused_with_the_option_that_reads_it(sampler: str, trainer: str, role: str) -> None:
    rows = [{sampler: [-1.0, -2.0], trainer: [-1.5, -2.0]}]
    with pytest.raises(StudyError) as raised:
        list(read_table(rows))
    names = ", ".join(sorted([sampler, trainer]))
    assert str(raised.value).endswith(f"it has {names}; name the other one with --columns {role}=NAME")
    ((_, log),) = read_table(rows, columns={role: {"sampler": sampler, "trainer": trainer}[role]})
    assert log.sampler_T.tolist() == [-1, -2] and log.trainer_T.tolist() == [-1.5, -2]


def test_one_name_beside_a_frameworks_own() -> None:
    rows = [{"rollout_lp": [-1.0, -2.0], "old_log_probs": [-1.0, -1.5], "response_mask": [0, 1], "responses": [3, 4]}]
    ((title, log),) = read_table(rows, columns={"sampler": "rollout_lp"})
    assert title.startswith("verl") and log.token_T.tolist() == [4] and log.trainer_T.tolist() == [-1.5]


def test_both_names_beside_a_frameworks_other_columns() -> None:
    rows = [{"a": [-1.0, -2.0], "b": [-1.0, -1.5], "response_mask": [0, 1], "responses": [3, 4]}]
    ((title, log),) = read_table(rows, columns={"sampler": "a", "trainer": "b"})
    assert title.startswith("verl") and log.token_T.tolist() == [4] and log.trainer_T.tolist() == [-1.5]


def test_a_column_in_use_says_nothing_of_responses() -> None:
    """`id` and `position` are other columns here, and `uid` says which response a token is of."""
    rows = [{"uid": u, "id": i, "position": a, "s": -i, "t": -i} for u, i, a in ((7, 3, 1.5), (7, 4, 0.5), (8, 4, 0.5))]
    chosen = {"sampler": "s", "trainer": "t", "token": "id", "advantage": "position"}
    ((_, log),) = read_table(rows, columns=chosen)
    assert log.token_T.tolist() == [3, 4, 4] and log.sequence_T.tolist() == [0, 0, 1]
    assert log.advantage_T.tolist() == [1.5, 0.5, 0.5]


def test_a_mask_under_another_name_and_the_response_of_a_token() -> None:
    rows = [{"turn": "a", "s": -1.0, "t": -1.5, "keep": 1}, {"turn": "b", "s": -2.0, "t": -2.5, "keep": 0}] * 1
    rows += [{"turn": "c", "s": -3.0, "t": -3.5, "keep": 1}, {"turn": "c", "s": -4.0, "t": -4.5, "keep": 1}]
    left_out = LeftOut()
    chosen = {"sampler": "s", "trainer": "t", "mask": "keep", "response": "turn"}
    ((_, log),) = read_table(rows, left_out, chosen)
    assert log.sampler_T.tolist() == [-1, -3, -4] and log.sequence_T.tolist() == [0, 1, 1]
    assert left_out.sentences() == ("1 response has no token that counts.",)


def test_an_unknown_name_lists_what_the_file_has(tmp_path: Path) -> None:
    file = write_lines(tmp_path / "log.jsonl", own_rows())
    with pytest.raises(StudyError) as raised:
        diagnose(file, columns={"sampler": "lp_vllm", "trainer": "lp_fsdp"})
    assert "line 1: has no column lp_vllm; it has adv, ids, lp vllm, lp_fsdp, reward, step" in str(raised.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [("", "an empty part"), ("sampler", "sampler"), ("sampler=", "sampler="), ("engine=x", "engine=x"),
     ("sampler=a,sampler=b", "sampler=b"), ("sampler=a,,mask=b", "an empty part")],
)  # fmt: skip
def test_what_is_no_choice_of_columns_is_one_sentence(text: str, part: str) -> None:
    with pytest.raises(StudyError) as raised:
        parse_columns(text)
    assert f"{part} is not ROLE=NAME" in str(raised.value) and "sampler, trainer, token" in str(raised.value)


def test_a_role_that_is_unknown_in_python() -> None:
    with pytest.raises(StudyError, match="columns: engine is no role; the roles are sampler, trainer, token"):
        diagnose(plain_rows(), columns={"engine": "x"})


# --- dumps of tensors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor], ids=["numpy", "torch"])
def test_arrays_and_tensors_in_a_dump(kind: Callable[[Any], Any], tmp_path: Path) -> None:
    rows = [
        {name: kind(value) if isinstance(value, list) else value for name, value in row.items()} for row in plain_rows()
    ]
    torch.save({"rows": rows, "number": np.float64(3)}, tmp_path / "log.pt")
    ((_, log),) = read_log([tmp_path / "log.pt"])
    check(log)


def test_a_dictionary_of_rectangles_with_a_mask_in_python() -> None:
    random = np.random.default_rng(0)
    mask = np.arange(7) < np.array([7, 1, 3])[:, None]
    sampler, trainer = -random.random((3, 7)), -random.random((3, 7))
    columns = {"sampler_logprobs": sampler, "trainer_logprobs": trainer, "mask": mask, "step": 5, "reward": [1, 0, 1]}
    for kind in (np.asarray, np.ndarray.tolist, torch.as_tensor):
        table = {name: kind(value) if isinstance(value, np.ndarray) else value for name, value in columns.items()}
        ((_, log),) = read_table(table)
        np.testing.assert_allclose(log.sampler_T, sampler[mask])
        np.testing.assert_allclose(log.trainer_T, trainer[mask])
        assert log.step_S.tolist() == [5, 5, 5] and log.reward_S.tolist() == [1, 0, 1]
        assert diagnose(table).measured.sequences == 3


def masked_rows(name: str, before: int, inside: int) -> list[dict[str, Any]]:
    """Rows of the plain format with a fill after the response, and a mask that also covers `before` more places."""
    rows = plain_rows()
    for row in rows:
        row.pop("mask", None)
        count = len(row["trainer_logprobs"])
        row["sampler_logprobs"] = [*row["sampler_logprobs"], *[0.0] * inside]
        row["trainer_logprobs"] = [*row["trainer_logprobs"], *[-3.0] * inside]
        row["token_ids"] = [*row["token_ids"], *[0] * inside]
        row[name] = [1] * (before + count) + [0] * inside
    return rows


@pytest.mark.parametrize(
    ("name", "before", "says"),
    [
        ("response_mask", 0, "the mask is the column response_mask"),
        ("loss_mask", 0, "the mask is the column loss_mask"),
        ("attention_mask", 7, "attention_mask is longer than the log-probs, and its end is taken"),
        ("mask", 2, "mask is longer than the log-probs, and its end is taken"),
    ],
)
def test_a_mask_under_another_formats_name_or_over_the_prompt(name: str, before: int, says: str) -> None:
    left_out = LeftOut()
    ((_, log),) = read_table(masked_rows(name, before, inside=4), left_out)
    check(log)
    assert f"In {len(SEQUENCES)} of {len(SEQUENCES)} rows {says}." in left_out.sentences()


def test_a_number_under_a_masks_name_is_no_mask() -> None:
    left_out = LeftOut()
    ((_, log),) = read_table([row | {"loss_mask": 1} for row in plain_rows()], left_out)
    check(log)
    assert "loss_mask is shorter than the log-probs and is not used as a mask" in left_out.sentences()[0]
