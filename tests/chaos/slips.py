"""Faults in the source that need no killed study: each with the test of seconds that must catch it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("workflow", "tests")
"""Folders of which a copy is tested; the copy links to all else."""


@dataclass(frozen=True)
class Slip:
    """A text of a file of the package, what stands for it, and the test that fails then, by its name for pytest."""

    file: str
    old: str
    new: str
    test: str


_ATOMIC = "runtime/atomic_files.py"
_DISK = "tests/unit/runtime/test_atomic_files.py"

SLIPS: dict[str, Slip] = {
    "a file gets its name before it is on the disk": Slip(
        _ATOMIC, "        os.fsync(file.fileno())\n", "", f"{_DISK}::test_a_file_is_complete_or_as_before_and_stays"
    ),
    "a folder gets its name before it is on the disk": Slip(
        _ATOMIC, "    sync(aside)\n", "", f"{_DISK}::test_a_folder_is_complete_or_as_before_and_stays"
    ),
    "a checkpoint is on the disk before the metrics that it names": Slip(
        "training/kept_data.py",
        "os.fsync(file.fileno())",
        "pass",
        "tests/unit/training/test_bad_checkpoints.py::test_a_power_cut_at_any_moment_leaves_a_state_to_go_on_from",
    ),
    "a run that goes on keeps what its engine cached in the test": Slip(
        "training/loop.py",
        "            engine.weight_sync.again(state.model)\n",
        "            pass\n",
        "tests/unit/training/test_resume.py::test_a_run_that_goes_on_has_nothing_cached_of_its_engines_test",
    ),
    "an integer is compared with written integers alone": Slip(
        "tasks/scoring.py",
        "if gold is not None and number is not None:",
        "if gold is not None:",
        "tests/unit/tasks/test_scoring.py::test_one_rule_whatever_the_spelling",
    ),
    "degrees are no spelling of a number": Slip(
        "tasks/math_verify_worker.py",
        "text.replace('°', DEGREES)",
        "text.replace(DEGREES, 'x')",
        "tests/unit/tasks/test_aime25.py::test_an_angle_and_other_spellings_are_kept_as_the_number_itself",
    ),
    "a copied sum is its own answer": Slip(
        "tasks/arithmetic.py",
        'compared="integer"',
        'compared="math"',
        "tests/unit/tasks/test_scoring.py::test_a_copied_sum_is_no_answer_to_it",
    ),
    "two spellings of an answer are two answers": Slip(
        "tasks/sources.py",
        "same_math(other, found[key].answer)",
        "other == found[key].answer",
        "tests/unit/tasks/test_dapo_math.py::test_two_spellings_of_an_answer_are_no_conflict",
    ),
    "a zero times an infinity is no number": Slip(
        "objective/sequences.py",
        "return product.masked_fill(((left == 0) & right.isinf()) | ((right == 0) & left.isinf()), 0.0)",
        "return product",
        "tests/unit/objective/test_infinite_ratios.py::test_a_dropped_response_has_no_part_in_the_loss",
    ),
    "logits that are no numbers are accepted": Slip(
        "objective/safe_set.py",
        "if not (log_sum_T.isfinite() & log_sum_safe_T.isfinite()).all():",
        "if False:",
        "tests/unit/objective/test_logits.py::test_a_logit_that_is_no_number_is_refused",
    ),
    "log-probs have as few bits as their logits": Slip(
        "objective/safe_set.py",
        "torch.promote_types(logits.dtype, torch.float32)",
        "logits.dtype",
        "tests/unit/objective/test_logits.py::test_logits_of_16_bits_have_log_probs_of_32",
    ),
    "the report does not compare the runs' problems": Slip(
        "artifacts/results.py",
        "if run.record.fingerprint.get(PROBLEMS) != _digest(problems):",
        "if False:",
        "tests/unit/config/test_bad_inputs.py::test_a_bad_input_is_one_sentence[results: other problems of a run]",
    ),
    "the prompts' tokens are no part of what a run is known by": Slip(
        "training/checkpoints.py",
        "        PROMPTS: prompts_digest(prompts),\n",
        "",
        "tests/unit/training/test_resume.py::test_a_prompt_with_the_date_is_another_runs_on_the_next_day",
    ),
    "a file that extends another drops its arms": Slip(
        "config/merging.py",
        "and not _other_kind(inner, before, after):",
        'and not _other_kind(inner, before, after) and not {"name", "source"} & after.keys():',
        "tests/unit/config/test_study_files.py::test_any_key_may_name_what_a_file_adds",
    ),
    "settings travel by the command line": Slip(
        "../rules/common.smk",
        "        return str(file)\n",
        "        return data.decode()\n",
        "tests/workflow/test_workflow.py::test_no_command_holds_settings",
    ),
    "a line of JSON ends at any separator of Unicode": Slip(
        "runtime/jsonl.py",
        "    while line := opened.readline(-1 if longest is None else longest):\n",
        "    for line in (one.encode() for one in opened.read().decode().splitlines(keepends=True)):\n",
        "tests/unit/runtime/test_jsonl.py::test_the_same_lines_for_every_reader",
    ),
    "a folder that everybody may enter is taken": Slip(
        "runtime/private_folder.py",
        "stat.S_IMODE(status.st_mode) & 0o077",
        "False",
        "tests/unit/runtime/test_private_folder.py::test_a_folder_of_somebody_else_is_refused",
    ),
    "everybody may write where ranks meet": Slip(
        "runtime/launch.py",
        "        folder = Path(name)\n",
        "        folder = Path(name)\n        folder.chmod(0o777)\n",
        "tests/unit/runtime/test_launch.py::test_ranks_meet_where_no_stranger_reaches",
    ),
    "a metric in TRL's log is from after the update": Slip(
        "integrations/trl/trainer.py",
        "            before_T, kept_T = inputs[OLD][mask_NC], inputs[OLD_KEPT][mask_NC]\n",
        "            pass\n",
        "tests/unit/integrations/trl/test_trainer.py::test_a_batchs_metrics_stay_as_the_policy_moves",
    ),
}  # fmt: skip


def caught(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, bool]]:
    """Plant one after another in a copy in this folder; whether its test has failed then.

    Ends the script where a test fails without a fault.
    """
    for entry in ROOT.iterdir():
        if entry.name in COPIED:
            shutil.copytree(entry, folder / entry.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif entry.name not in (".git", "results"):
            (folder / entry.name).symlink_to(entry)
    if failed := _failures(folder, sorted({SLIPS[name].test for name in names})):
        sys.exit(f"without a fault: {failed}")
    for name in names:
        slip = SLIPS[name]
        file = folder / "workflow" / "tailrl" / slip.file
        before = file.read_text(encoding="utf-8")
        file.write_text(planted(name, before), encoding="utf-8")
        yield name, bool(_failures(folder, [slip.test]))
        file.write_text(before, encoding="utf-8")


def planted(name: str, text: str) -> str:
    """The text of the fault's file with the fault; raises ValueError where the code has changed."""
    slip = SLIPS[name]
    if text.count(slip.old) != 1:
        raise ValueError(f"{name}: {slip.file} has {text.count(slip.old)} times the text {slip.old!r}")
    return text.replace(slip.old, slip.new)


def _failures(checkout: Path, tests: Sequence[str]) -> str:
    """Which of these tests fail in a checkout, as pytest says; raises RuntimeError where it could not run them."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {**os.environ, "PYTHONPATH": str(checkout / "workflow")}
    ran = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)
    if ran.returncode not in (0, 1):
        raise RuntimeError(f"pytest ended with {ran.returncode}:\n{ran.stdout}\n{ran.stderr}")
    return ", ".join(line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR")))
