"""Tables with a token a row: the rows of a response become one."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.log import Log
from tailrl.diagnosis.readers import read_log
from tailrl.diagnosis.tables import read_table
from tailrl.runtime.errors import StudyError

HEADER = "response_id,position,sampler_logprob,trainer_logprob,mask,step\n"


def read(text: str, folder: Path, name: str = "log.csv") -> tuple[Log, tuple[str, ...]]:
    (folder / name).write_text(text)
    left_out = LeftOut()
    ((_, log),) = read_log([folder / name], left_out=left_out)
    return log, left_out.sentences()


def test_positions_give_the_order_and_a_step_begins_anew(tmp_path: Path) -> None:
    rows = "0,1,-2,-2.5,1,1\n0,0,-1,-1.5,1,1\n0,0,-3,-3.5,1,2\n0,1,-4,,0,2\n"
    log, notes = read(HEADER + rows, tmp_path)
    assert log.sampler_T.tolist() == [-1, -2, -3] and log.trainer_T.tolist() == [-1.5, -2.5, -3.5]
    assert log.sequence_T.tolist() == [0, 0, 1] and log.step_S.tolist() == [1, 2]
    assert notes == ()


def test_a_number_that_is_missing_is_nan(tmp_path: Path) -> None:
    log, _ = read(HEADER + "a,0,-1,,1,1\na,1,nan,-inf,1,1\n", tmp_path)
    np.testing.assert_array_equal(log.trainer_T, [np.nan, -np.inf])
    np.testing.assert_array_equal(log.sampler_T, [-1, np.nan])


def test_a_response_in_two_places_is_one_sentence(tmp_path: Path) -> None:
    text = "id,sampler_logprobs,trainer_logprobs\na,-1,-1\nb,-1,-1\na,-2,-2\n"
    with pytest.raises(StudyError, match=r"line 4: id a has tokens further above too; sort the rows by id"):
        read(text, tmp_path)


def test_without_a_response_a_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"is one number, -1.0; a row is one response, .* with a column response_id"):
        read("sampler_logprob,trainer_logprob\n-1,-1\n", tmp_path)


def test_lines_with_too_few_cells_and_words_are_left_out(tmp_path: Path) -> None:
    rows = "a,0,-1,-1,1,1\nb,0\nc,0,x,-1,1,1\nd,0,-2,-2,1,1\n"
    log, notes = read(HEADER + rows, tmp_path)
    assert log.sampler_T.tolist() == [-1, -2]
    assert notes == (
        f"1 of 4 rows is left out: they have more or fewer cells than the header. The first: {tmp_path / 'log.csv'}, "
        "line 3: has 2 cells, and the header 6.",
        f"1 of 4 rows is left out: sampler_logprob is no list of numbers. The first: {tmp_path / 'log.csv'}, line 4: "
        "sampler_logprob is no list of numbers: ['x'].",
    )


def test_lists_in_cells_as_python_writes_them(tmp_path: Path) -> None:
    text = 'sampler_logprobs,trainer_logprobs,text\n"[-1.0, nan, None]","[-1.5, -inf, -2]","a, b\nc"\n'
    log, _ = read(text, tmp_path)
    np.testing.assert_array_equal(log.sampler_T, [-1, np.nan, np.nan])
    np.testing.assert_array_equal(log.trainer_T, [-1.5, -np.inf, -2])
    assert log.text_S == ("a, b\nc",)


def test_a_table_of_pandas_with_a_token_a_row() -> None:
    table = pd.DataFrame({"seq_id": [7, 7, 9], "sampler_logprobs": [-1.0, -2, -3], "trainer_logprobs": [-1.0, -2, -4]})
    ((_, log),) = read_table(table)
    assert log.sequence_T.tolist() == [0, 0, 1]
    columns = {name: table[name].to_numpy() for name in table}
    ((_, of_columns),) = read_table(columns)
    assert of_columns.trainer_T.tolist() == log.trainer_T.tolist() == [-1, -2, -4]


def test_columns_in_any_order_of_responses() -> None:
    columns = {"uid": ["b", "a", "b"], "sampler_logprobs": [-1.0, -2.0, -3.0], "trainer_logprobs": [-1.0, -2.0, -3.5]}
    ((_, log),) = read_table(columns)
    assert log.trainer_T.tolist() == [-1, -3.5, -2] and log.sequence_T.tolist() == [0, 0, 1]


def test_the_means_are_those_of_rows(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    rows = [
        {"sampler_logprobs": (-random.random(n)).tolist(), "trainer_logprobs": (-random.random(n)).tolist()}
        for n in (3, 8, 5)
    ]
    lines = [
        f"{number},{place},{row['sampler_logprobs'][place]!r},{row['trainer_logprobs'][place]!r},1,1\n"
        for number, row in enumerate(rows)
        for place in range(len(row["sampler_logprobs"]))
    ]
    (tmp_path / "log.csv").write_text(HEADER + "".join(lines))
    found, expected = diagnose(tmp_path / "log.csv").measured, diagnose(rows).measured
    assert found.token_mean("k3") == expected.token_mean("k3") and found.tokens == 16


def token_table(names: tuple[str, ...]) -> dict[str, list[float]]:
    """Two prompts with two responses each, of 3, 4, 2 and 5 tokens: columns with a number a token."""
    of_name: dict[str, list[float]] = {name: [] for name in (*names, "sampler_logprob", "trainer_logprob")}
    for response, length in enumerate((3, 4, 2, 5)):
        for place in range(length):
            row = {"uid": response // 2, "prompt_id": response // 2, "sample": response % 2, "sample_id": response}
            row |= {"pos": place, "token_pos": place, "index": len(of_name["sampler_logprob"])}
            for name in names:
                of_name[name].append(row[name])
            of_name["sampler_logprob"].append(-1.0 - place)
            of_name["trainer_logprob"].append(-1.5 - place)
    return of_name


@pytest.mark.parametrize(
    "names",
    [("uid", "sample", "pos"), ("prompt_id", "sample", "pos"), ("uid", "sample"), ("uid", "pos"),
     ("index", "sample_id"), ("index", "token_pos"), ("index", "uid", "pos"), ("uid", "sample_id", "index")],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["csv", "npz", "rows"])
def test_what_tells_a_response_among_ids_of_prompts_and_of_rows(
    names: tuple[str, ...], kind: str, tmp_path: Path
) -> None:
    table = token_table(names)
    if kind == "npz":
        np.savez(tmp_path / "log.npz", **{name: np.array(values) for name, values in table.items()})
    elif kind == "csv":
        pd.DataFrame(table).to_csv(tmp_path / "log.csv", index=False)
    files = list(tmp_path.iterdir())
    ((_, log),) = read_log(files) if files else read_table(pd.DataFrame(table))
    assert np.diff([*log.start_S, len(log.sampler_T)]).tolist() == [3, 4, 2, 5]
    assert log.sampler_T.tolist() == table["sampler_logprob"]


def test_numbers_of_rows_alone_tell_no_response(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match=r"is one number, -1.0; a row is one response, .* with a column response_id"):
        read("index,sampler_logprob,trainer_logprob\n0,-1,-1\n1,-2,-2\n", tmp_path)
