"""The public cases: small inputs made after bug reports and files of people, each with what is read of it.

`tests/fixtures/cases/logs.tar.xz` holds them. A cause that cannot be told from a log alone is not asked for here.
"""

import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tailrl.curves.history import read_all, read_folders
from tailrl.curves.reading import read_curves, together
from tailrl.diagnosis.diagnosis import diagnose
from tailrl.diagnosis.exact_checks import ExactChecks
from tailrl.diagnosis.headline import headline
from tailrl.diagnosis.left_out import LeftOut
from tailrl.diagnosis.readers import read_log
from tailrl.runtime.errors import StudyError

CASES = Path(__file__).parents[2] / "fixtures/cases/logs.tar.xz"
PLAIN, SLIME, VERL = "the documented JSONL or Parquet", "slime and miles", "verl"


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cases")
    with tarfile.open(CASES) as packed:
        packed.extractall(folder, filter="data")
    yield folder / "logs"


LOGS: dict[str, tuple[str, int, int, tuple[str, ...], str]] = {
    # name: the format, responses, tokens, what the log itself has wrong, what is said to be left out
    "array.json": (PLAIN, 24, 1216, (), ""),
    "log.ndjson": (PLAIN, 24, 1216, (), ""),
    "batch_a_row.jsonl": (PLAIN, 24, 1216, (), ""),
    "verl_batch.pt": (VERL, 24, 1216, (), ""),
    "verl_batch.npz": (VERL, 24, 1216, (), ""),
    "n_verl.jsonl": (VERL, 32, 1622, (), ""),
    "n_trl.jsonl": ("TRL", 32, 1622, (), ""),
    "n_swift.jsonl": ("ms-swift", 32, 1622, (), ""),
    "c01_repetition_penalty": ("NeMo-RL", 48, 2171, (), ""),
    "c02_generation_config.jsonl": (PLAIN, 48, 2180, (), ""),
    "c03_double_bos.jsonl": (PLAIN, 48, 2178, (), ""),
    "c04_lengths_differ.jsonl": (
        PLAIN, 79, 3931, (),
        "17 of 96 rows are left out: their columns differ in length. The first: {}, line 1: trainer_logprobs has 55 "
        "numbers, and sampler_logprobs 56.",
    ),
    "one_row_differs.jsonl": (
        PLAIN, 23, 1160, (),
        "1 of 24 rows is left out: their columns differ in length. The first: {}, line 14: trainer_logprobs has 55 "
        "numbers, and sampler_logprobs 56.",
    ),
    "c06_outliers": ("NeMo-RL", 96, 4718, (), ""),
    "c07_first_entry": ("NeMo-RL", 96, 4860, ("first_choice",), ""),
    "c08_zero_whole": ("NeMo-RL", 96, 4860, ("filled",), ""),
    "c09_trainer_bf16_logits.jsonl": (PLAIN, 48, 2470, ("grid",), ""),
    "c10_last_three.jsonl": (PLAIN, 96, 4860, (), ""),
    "c11_pinned_weights.jsonl": (PLAIN, 96, 2966, (), ""),
    "c24_bypass_copies.jsonl": (PLAIN, 24, 1216, ("copy",), ""),
    "c25_rep_age3.jsonl": (PLAIN, 48, 2171, (), ""),
    "f_nll.jsonl": (PLAIN, 32, 1622, ("negative",), ""),
    "f_padded_0.jsonl": (PLAIN, 32, 1792, ("padding",), ""),
    "f_padded_-100.jsonl": (PLAIN, 32, 1792, ("padding",), ""),
    "slime_dump": (
        SLIME, 24, 1216, (),
        "2 files are left out, for they are no logs: rollout_data/3.pt, rollout_data/eval_3.pt.",
    ),
    "miles_dump": (
        SLIME, 24, 1216, (),
        "5 files are left out, for they are no logs: dashboard/metrics.jsonl, dashboard_columns/rollout_3.parquet, "
        "rollout_data/3.pt, rollout_data/eval_3.pt and 1 more.",
    ),
    "nemo_logs": ("NeMo-RL", 24, 1216, (), "1 file is left out, for it is no log: exp_001/val_data_step0.jsonl."),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_what_is_read_of_a_log(name: str, cases: Path) -> None:
    title, responses, tokens, faults, left = LOGS[name]
    left_out, checks = LeftOut(), ExactChecks()
    counted = [0, 0]
    for found, part in read_log([cases / name], left_out=left_out):
        assert found.startswith(title)
        counted[0] += len(part.start_S)
        counted[1] += len(part.sampler_T)
        checks.add(part)
    assert counted == [responses, tokens]
    assert tuple(fault.name for fault in checks.faults() if fault.name != "sixteen_bits") == faults
    assert left_out.sentences() == ((left.format(cases / name),) if left else ())


def test_rectangles_and_rows_hold_the_same_tokens(cases: Path) -> None:
    sums = [
        sum(float((part.trainer_T - part.sampler_T).sum()) for _, part in read_log([cases / name]))
        for name in ("array.json", "log.ndjson", "batch_a_row.jsonl", "slime_dump", "miles_dump", "nemo_logs")
    ]
    assert sums == pytest.approx([sums[0]] * len(sums), rel=1e-5) and sums[0] != 0


CURVES = {
    "metrics.jsonl": ("metrics as JSON lines", "rollout_corr/k3_kl"),
    "wandb_export_k3_kl.csv": ("a W&B export", "rollout_corr/k3_kl"),
    "trl_state/trainer_state.json": ("transformers' trainer_state.json", "sampling/sampling_logp_difference/mean"),
    "trl_state": ("transformers' trainer_state.json", "sampling/sampling_logp_difference/mean"),
}


@pytest.mark.parametrize("name", CURVES)
def test_what_is_read_of_curves(name: str, cases: Path) -> None:
    kind, metric = CURVES[name]
    histories = read_all([cases / name])
    assert bool(histories) is not (cases / name).is_dir()
    reading = read_curves(together(histories or read_folders([cases / name])))
    assert reading.kind == kind
    assert [run.main.curve.name for run in reading.runs] == [metric]
    assert len(reading.runs[0].main.curve.step_N) == 200


@pytest.mark.parametrize("name", ["verl_rollouts", "verl_rollouts/12.jsonl"])
def test_texts_of_verl_get_the_way_to_log_tokens(name: str, cases: Path) -> None:
    assert read_all([cases / name]) == [] and not read_folders([cases / name])
    with pytest.raises(StudyError) as raised:
        diagnose(cases / name)
    sentence = str(raised.value)
    assert sentence.startswith(str(cases / name)) and "verl's rollout_data_dir, texts and scores" in sentence
    assert "actor_rollout_ref.rollout.calculate_log_probs=true" in sentence and "TRL" not in sentence


def test_every_case_is_here(cases: Path) -> None:
    tested = {name.split("/")[0] for name in [*LOGS, *CURVES, "verl_rollouts"]}
    assert {path.name for path in cases.iterdir()} == tested


BF16 = ("Not bad", (), ("precision",), "Rounding in 16 bits needs no correction")
ANSWERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...], str]] = {
    # name: how bad, where, the first cause there and elsewhere, and words of what to do
    "n_verl.jsonl": BF16,
    "n_swift.jsonl": BF16,
    "log.ndjson": BF16,
    "one_row_differs.jsonl": BF16,
    "c01_repetition_penalty": ("Bad", ("sides",), ("penalty",), "generation_config.json"),
    "c02_generation_config.jsonl": ("Bad", (), ("truncation",), "generation_config.json"),
    "c03_double_bos.jsonl": ("Bad, unless", (), ("precision",), "compare the prompts' token ids"),
    "c04_lengths_differ.jsonl": ("Bad", ("in 1 of 3931 tokens",), ("precision",), "Look at these tokens"),
    "c06_outliers": ("Bad", ("in 16 of 96 responses",), ("prompt", "precision"), "Compare the token ids of one prompt"),
    "c07_first_entry": ("Bad", (), (), "Take the log-prob of the sampled token's id"),
    "c08_zero_whole": ("Bad", ("in 12 of 96 responses",), (), "Find out why these responses have no log-probs"),
    "c09_trainer_bf16_logits.jsonl": ("Not bad", (), (), "in float32 on the trainer's side"),
    "c10_last_three.jsonl": (
        "Bad",
        ("in the last 3 tokens of the responses of 56",),
        ("last", "precision"),
        "The limit of tok",
    ),
    "c11_pinned_weights.jsonl": ("Bad: k3", (), ("stale",), "Compare a checksum of the engine's weights"),
    "c24_bypass_copies.jsonl": ("Nothing can be said", (), (), "bypass_mode=false"),
    "c25_rep_age3.jsonl": ("Bad", ("sides",), ("penalty",), "repetition_penalty"),
    "f_padded_0.jsonl": ("Not bad", (), (), "Log a mask"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_what_is_answered_first(name: str, cases: Path) -> None:
    """Where a log alone cannot tell a cause, as of c03, the answer says what remains and what to compare."""
    level, places, causes, do = ANSWERS[name]
    found = diagnose(cases / name)
    answer = headline(found)
    assert answer.verdict.startswith(level) and do in answer.do
    assert len(found.places) == len(places)
    for place, words in zip(found.places, places, strict=True):
        assert place.grouping == words or place.words.startswith(words)
    first = [one[0].name for one in (found.causes, found.elsewhere) if one]
    assert not causes or tuple(first[: len(causes)]) == causes
    if name == "c10_last_three.jsonl":
        assert "the last tokens of responses" in answer.why[0] and answer.why[0].startswith("There: ")
    if name == "c03_double_bos.jsonl":
        assert any("A log alone cannot tell which it is" in sentence for sentence in answer.why)
    if name == "c11_pinned_weights.jsonl":
        assert any(sentence.startswith("It grows with the steps") for sentence in answer.where)
