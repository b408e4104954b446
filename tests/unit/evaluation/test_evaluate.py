"""Evaluation against brute force: lm-eval really runs, over a sampler and a tokenizer that are a few lines long."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lm_eval
import numpy as np
import pytest
import torch
from evaluation_fixture import PROBLEMS, SETTINGS, CharTokenizer, FakeSampler, reply, run, save_policy, text_of
from lm_eval.api.instance import Instance
from lm_eval.tasks import TaskManager
from transformers import AutoModelForCausalLM

from tailrl.artifacts.evaluation import EvaluationFile, Samples, header, read_evaluation_file
from tailrl.config.jobs import Evaluation
from tailrl.config.sampler import SamplerSettings
from tailrl.evaluation import harness
from tailrl.evaluation.evaluate import Evaluated, Sampling, check_weights, evaluate, evaluate_arm, write_results
from tailrl.evaluation.harness import make_lm, make_requests
from tailrl.model.policy import load_policy, load_tokenizer
from tailrl.rollout import Decoding
from tailrl.rollout.prompts import prompts_digest
from tailrl.rollout.sampling import stop_tokens
from tailrl.runtime import timeouts
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.runtime.timeouts import EngineError
from tailrl.tasks.problem import Problem, write_problems

INDEX = "model.safetensors.index.json"


def records(evaluated: Evaluated) -> list[dict[str, Any]]:
    """What the summary says of each policy, as in JSON."""
    return [record.model_dump() for record in evaluated.summary.policies]


def expected_replies(weight: int, settings: Evaluation = SETTINGS) -> dict[str, list[str]]:
    """The responses by problem, written out without lm-eval."""
    keys = [(p, range(settings.samples)) for p in PROBLEMS]
    return {
        p.id: [reply(p.prompt, derive_seed("evaluation", settings.seed, p.id, n), weight) for n in k] for p, k in keys
    }


@pytest.mark.parametrize("correct", [[1], [0], [1, 0, 0, 1], [0, 1], [0, 0]])
def test_process_results_keeps_the_order_and_takes_any_for_pass(correct: list[int]) -> None:
    document = {"id": "0", "prompt": "2+3=", "answer": "5", "compared": "math"}
    metrics = harness.process_results(document, [["\\boxed{5}" if right else "5" for right in correct]])
    assert metrics == {"avg_at_k": np.mean(correct), "pass_at_k": max(correct), "correct": correct}


@pytest.mark.parametrize("samples", [1, 3, 8])
def test_metrics_equal_brute_force_over_the_responses(tmp_path: Path, samples: int) -> None:
    settings = SETTINGS.model_copy(update={"samples": samples})
    evaluated, _ = run(tmp_path, range(5), settings)
    for weight, record in zip(range(5), records(evaluated), strict=True):
        replies = expected_replies(weight, settings)
        correct = {id_: [int(text.startswith("\\boxed")) for text in texts] for id_, texts in replies.items()}
        assert record["seed"] == 100 + weight
        assert {row["id"]: row["correct"] for row in record["per_problem"]} == correct
        flat = np.concatenate(list(correct.values()))
        assert record["avg_at_k"] == pytest.approx(flat.mean(), abs=1e-15)
        assert record["pass_at_k"] == pytest.approx(np.mean([any(scores) for scores in correct.values()]), abs=1e-15)
        lengths = [len(text) + text.startswith("\\boxed") for texts in replies.values() for text in texts]
        assert record["response_length_mean"] == pytest.approx(np.mean(lengths))
        assert record["stopped_fraction"] == pytest.approx(flat.mean())
    assert len({record["avg_at_k"] for record in records(evaluated)}) > 1, (
        "the cases above must differ for this test to see anything"
    )


def test_summary_takes_lm_evals_own_aggregates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes = []
    original = lm_eval.evaluate

    def spy(*args: object, **options: object) -> object:
        outcomes.append(original(*args, **options))
        return outcomes[-1]

    monkeypatch.setattr(lm_eval, "evaluate", spy, raising=False)
    evaluated, _ = run(tmp_path, (0, 1))
    for outcome, record in zip(outcomes, records(evaluated), strict=True):
        aggregates = outcome["results"]["boxed"]
        assert record["avg_at_k"] == aggregates["avg_at_k,responses"]
        assert record["pass_at_k"] == aggregates["pass_at_k,responses"]
        scores = [score for problem in record["per_problem"] for score in problem["correct"]]
        assert sum(scores) == aggregates["correct,responses"]


def test_every_problem_and_repeat_has_its_seed_and_policies_share_them(tmp_path: Path) -> None:
    evaluated, sampler = run(tmp_path, (0, 1))
    (first, decoding), (second, _) = sampler.calls
    assert first == second
    assert decoding == Decoding(temperature=0.7, max_new_tokens=20, rule="full")
    wanted = {(p.prompt, derive_seed("evaluation", 11, p.id, repeat)) for p in PROBLEMS for repeat in range(3)}
    assert {(text_of(request), request.seed) for request in first} == wanted
    assert len(first) == len(wanted) == 9
    replies = [*expected_replies(0).values(), *expected_replies(1).values()]
    assert [sample.responses for sample in evaluated.samples] == replies


def test_streams_depend_on_the_evaluations_seed_and_not_on_the_other_problems(tmp_path: Path) -> None:
    _, one = run(tmp_path / "one")
    _, other = run(tmp_path / "other", settings=SETTINGS.model_copy(update={"seed": 12}))
    _, alone = run(tmp_path / "alone", problems=PROBLEMS[2:])
    requests, reseeded, subset = (sampler.calls[0][0] for sampler in (one, other, alone))
    assert not {request.seed for request in requests} & {request.seed for request in reseeded}
    assert subset == requests[-3:]


def test_repeats_are_counted_per_problem_in_any_order() -> None:
    options = {"temperature": 1.0, "max_gen_toks": 20}
    calls = [(id_, (f"{id_}=", options)) for id_ in "ababb"]
    instances = [Instance("generate_until", {"id": id_}, call, 0, metadata=("boxed", 0, 3)) for id_, call in calls]
    requests = make_requests(instances, CharTokenizer(), 5, 100)
    repeats = [("a", 0), ("b", 0), ("a", 1), ("b", 1), ("b", 2)]
    assert [request.seed for request in requests] == [derive_seed("evaluation", 5, *key) for key in repeats]


def test_prompts_reach_the_encoder_as_written_and_get_the_policys_template_once(tmp_path: Path) -> None:
    _, plain = run(tmp_path / "plain")
    _, chat = run(tmp_path / "chat", chat_template="a template")
    assert [text_of(request) for request in plain.calls[0][0][::3]] == [p.prompt for p in PROBLEMS]
    assert [text_of(request) for request in chat.calls[0][0][::3]] == [f"<user>{p.prompt}<assistant>" for p in PROBLEMS]


def test_sampler_lm_does_not_score_text() -> None:
    lm = make_lm(FakeSampler(), CharTokenizer(), Evaluation(), 100)
    for method in (lm.loglikelihood, lm.loglikelihood_rolling):
        with pytest.raises(NotImplementedError, match="a sampler does not score given text"):
            method([SimpleNamespace(args=("a", "b"))])


def test_files_hold_what_was_evaluated(tmp_path: Path) -> None:
    evaluated, _ = run(tmp_path, (0, 1))
    json_path, samples_path = tmp_path / "new" / "dvp.json", tmp_path / "new" / "dvp.samples.jsonl"
    write_results(evaluated, json_path, samples_path)
    summary = json.loads(json_path.read_text(encoding="utf-8"))
    settings = ["arm", "task", "samples_per_problem", "temperature", "max_new_tokens", "sampler", "seed"]
    assert list(summary) == [*settings, "policies", "lm_eval_version"]
    assert list(summary["policies"][0])[:2] == ["seed", "avg_at_k"], "no step, which is a snapshot's"
    assert EvaluationFile.model_validate(summary) == evaluated.summary == read_evaluation_file(json_path)
    assert list(summary.values())[:5] == ["dvp", "arithmetic", 3, 0.7, 20]
    assert [json.loads(line) for line in samples_path.read_text(encoding="utf-8").splitlines()] == [
        {"seed": 100 + weight, "id": p.id, "answer": p.answer, "responses": expected_replies(weight)[p.id]}
        for weight in (0, 1)
        for p in PROBLEMS
    ]


def test_a_greedy_response_is_asked_for_once_a_problem(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"greedy": True})
    plain, _ = run(tmp_path / "plain", (0, 2))
    evaluated, sampler = run(tmp_path / "greedy", (0, 2), settings)
    sampled, greedy = sampler.calls[:2]
    assert (greedy[1].rule, {request.threshold for request in greedy[0]}) == ("top_k", {1.0})
    assert [text_of(request) for request in greedy[0]] == [p.prompt for p in PROBLEMS] and len(sampled[0]) == 9
    # The fake engine's answers hang on the seed, which is that of the first sample.
    for weight, record, before in zip((0, 2), records(evaluated), records(plain), strict=True):
        first = {id_: texts[0] for id_, texts in expected_replies(weight).items()}
        assert {row["id"]: row["greedy"] for row in record["per_problem"]} == {
            id_: int(text.startswith("\\boxed")) for id_, text in first.items()
        }
        assert [row["correct"] for row in record["per_problem"]] == [row["correct"] for row in before["per_problem"]]
        assert record["response_length_mean"] == before["response_length_mean"]
    write_results(evaluated, tmp_path / "dvp.json", tmp_path / "dvp.samples.jsonl")
    scores = read_evaluation_file(tmp_path / "dvp.json").arrays().scores
    assert [score.greedy_P.tolist() for score in scores if score.greedy_P is not None] == [
        [row["greedy"] for row in record["per_problem"]] for record in records(evaluated)
    ]
    half = evaluated.summary.model_dump()
    half["policies"][0]["per_problem"][1]["greedy"] = None
    summary = EvaluationFile.model_validate(half)
    write_results(replace(evaluated, summary=summary), tmp_path / "half.json", tmp_path / "half.samples.jsonl")
    with pytest.raises(StudyError, match=r"half\.json: some problems of a policy have a greedy response, and some"):
        read_evaluation_file(tmp_path / "half.json")


@pytest.mark.parametrize("engine", ["exact", "transformers"])
def test_greedy_responses_are_of_the_most_probable_tokens(
    tmp_path: Path, policy_folder: Path, problems: list[Problem], engine: str
) -> None:
    """Token by token, by the model alone."""
    write_problems(problems[:4], tmp_path / "problems.jsonl")
    settings = Evaluation(samples=1, max_new_tokens=12, sampler={"engine": engine, "dtype": "float32"})
    evaluated = evaluate_arm("a", [(0, policy_folder)], tmp_path / "problems.jsonl", settings, tmp_path / "parts")
    assert evaluated is not None
    model = AutoModelForCausalLM.from_pretrained(policy_folder, dtype=torch.float32)
    tokenizer = load_tokenizer(policy_folder)
    ends = set(stop_tokens(policy_folder, tokenizer))
    for problem, sample in zip(problems, evaluated.samples, strict=False):
        ids = tokenizer.encode(problem.prompt)
        start = len(ids)
        while len(ids) < start + 12 and not (len(ids) > start and ids[-1] in ends):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        assert sample.greedy == tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_its_own_files_alone_are_brought_to_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another arm's may be gone between two looks, as what a link that leads nowhere names."""
    evaluated, _ = run(tmp_path / "work", (0, 1))
    out = tmp_path / "out"
    (out / "naive.parts").mkdir(parents=True)
    (out / "naive.parts" / "writing-1").symlink_to("gone")
    synced: set[Path] = set()
    monkeypatch.setattr(os, "fsync", lambda number: synced.add(Path(f"/proc/self/fd/{number}").resolve()))
    write_results(evaluated, out / "dvp.json", out / "dvp.samples.jsonl")
    assert synced == {out, *(out / f"dvp.{ending}" for ending in ("json", "samples.jsonl", "manifest.json"))}


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    for full in ("dvp.json", "dvp.samples.jsonl"):
        paths = [tmp_path / name for name in ("dvp.json", "dvp.samples.jsonl")]
        for path in paths:
            path.unlink(missing_ok=True)
        (tmp_path / full).symlink_to("/dev/full")
        samples = [Samples(seed=0, id="a", answer="1", responses=["x" * 10_000])]
        summary = EvaluationFile(**header("dvp", SETTINGS), policies=[], lm_eval_version="0")
        evaluated = Evaluated(summary, samples, {})
        with pytest.raises(StudyError, match=rf"^{tmp_path / full}: could not be written: No space left on device$"):
            write_results(evaluated, *paths)


def test_every_call_of_the_engine_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends in time, and its own error differs from bad input."""
    limits: list[tuple[float, str]] = []
    deadline = timeouts.deadline

    @contextmanager
    def note(seconds: float, what: str) -> Iterator[None]:
        limits.append((seconds, what))
        with deadline(seconds, what):
            yield

    monkeypatch.setattr(timeouts, "deadline", note)
    run(tmp_path / "two", (0, 1))
    seconds = Evaluation().rollout_timeout
    calls = ["the hand-over of the weights", "a batch of 9 responses"]
    assert limits == [(seconds, call) for call in 2 * calls]

    def fail(*_: object) -> None:
        raise RuntimeError("the engine core died")

    monkeypatch.setattr(FakeSampler, "generate", fail)
    with pytest.raises(EngineError, match=r"^a batch of 9 responses failed: RuntimeError: the engine core died$"):
        run(tmp_path / "failing")


def test_sharded_policies_are_read(tmp_path: Path) -> None:
    load_policy(save_policy(tmp_path / "whole", 2)).save_pretrained(tmp_path / "sharded", max_shard_size=600)
    assert not (tmp_path / "sharded" / "model.safetensors").exists()
    evaluated, _ = run(tmp_path, [tmp_path / "sharded"])
    assert [sample.responses for sample in evaluated.samples] == list(expected_replies(2).values())


@pytest.mark.slow  # every other test here loads the task
def test_works_without_a_network_or_a_home(tmp_path: Path) -> None:
    """In a process of its own, so that nothing is cached in memory; the caches lie where nothing can be written."""
    write_problems(PROBLEMS, tmp_path / "problems.jsonl")
    blocked = tmp_path / "a file, not a folder"
    blocked.touch()
    script = """if True:
        import socket, sys
        def refuse(*_): raise AssertionError("the network was used")
        socket.socket.connect = socket.getaddrinfo = refuse
        from pathlib import Path
        from tailrl.evaluation.harness import load_tasks
        from tailrl.config.jobs import Evaluation
        task = load_tasks(Path(sys.argv[1]), Evaluation(), 8)["boxed"]
        print(len(task.eval_docs), task.eval_docs[1]["answer"])
    """
    # Nothing else is passed on, so that only HOME says where caches go.
    environment = {"HOME": str(blocked), "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, str(tmp_path / "problems.jsonl")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "3 2020"


def test_definition_alone_is_a_task_for_lm_evals_own_command_line(tmp_path: Path) -> None:
    """What the comment in boxed.yaml promises: the file comes as metadata, and one response is sampled."""
    write_problems(PROBLEMS, tmp_path / "problems.jsonl")
    metadata = {"problems_file": str(tmp_path / "problems.jsonl")}
    manager = TaskManager(include_path=str(harness.TASKS_FOLDER), include_defaults=False, metadata=metadata)
    lm = make_lm(sampler := FakeSampler(), CharTokenizer(), Evaluation(), 100)
    outcome = lm_eval.evaluate(lm, manager.load(["boxed"]), bootstrap_iters=0)
    assert [text_of(request) for request in sampler.calls[0][0]] == [problem.prompt for problem in PROBLEMS]
    right = sum(rollout.stopped for rollout in lm.rollouts)
    assert outcome["results"]["boxed"]["avg_at_k,responses"] == right / 3


def test_prompt_that_does_not_fit_is_named(tmp_path: Path) -> None:
    longest = len(PROBLEMS[1].prompt)
    run(tmp_path / "fits", max_length=longest + 20)
    with pytest.raises(StudyError, match=rf"prompt of problem 'b' has {longest} tokens.*20.*{longest + 19}"):
        run(tmp_path / "does not", max_length=longest + 19)


@pytest.mark.parametrize(
    ("name", "content"),
    [("other", b""), ("model.safetensors", b"not safetensors"), (INDEX, b'{"weight_map": {"a": "1.safetensors"}}')]
    + [(INDEX, content) for content in (b"{}", b"[1]", b"\xff")],
)
def test_unreadable_weights_are_named(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StudyError, match=rf"^{tmp_path}: no weights could be read from it: .+\Z"):
        check_weights(tmp_path)


def test_every_policy_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cut = save_policy(tmp_path / "cut", 1) / "model.safetensors"
    cut.write_bytes(cut.read_bytes()[:-4])
    monkeypatch.setattr(FakeSampler, "generate", lambda *_: pytest.fail("something was sampled"))
    for broken in (cut.parent, tmp_path / "absent"):
        with pytest.raises(StudyError, match=f"{broken.name}: no weights"):
            run(tmp_path, [0, broken])


@pytest.mark.parametrize(
    ("problems", "sentence"),
    [([], "jsonl: holds no problem"), ([*PROBLEMS, PROBLEMS[2]], "jsonl: 2 problems share the id 'c', which must")],
)
def test_unusable_problems_are_named(tmp_path: Path, problems: list[Problem], sentence: str) -> None:
    with pytest.raises(StudyError, match=sentence):
        run(tmp_path, problems=problems)


def test_an_evaluation_says_which_prompts_it_gave(
    policy_folder: Path, problems: list[Problem], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_problems(problems[:2], tmp_path / "problems.jsonl")
    sampler = SamplerSettings(engine="transformers", dtype="float32")
    settings = Evaluation(samples=1, max_new_tokens=4, sampler=sampler)
    evaluated = evaluate_arm("a", [(0, policy_folder)], tmp_path / "problems.jsonl", settings, tmp_path / "parts")
    tokenizer = load_tokenizer(policy_folder)
    tokens = [tokenizer.encode(problem.prompt) for problem in problems[:2]]
    assert evaluated is not None and evaluated.summary.policies[0].prompts == prompts_digest(tokens)
    assert f"tailrl: arm a: the first prompt is {problems[0].prompt!r}\n" in capsys.readouterr().err


def test_policies_on_the_way_are_evaluated_as_the_last_ones_are(tmp_path: Path) -> None:
    """Beside them, not among them: what reads the policies alone sees what it saw."""
    alone, _ = run(tmp_path, (3, 4))
    file = tmp_path / "problems.jsonl"
    kept = [(100, 20, tmp_path / "policy4"), (100, 40, tmp_path / "policy3")]
    seeded = [(100, tmp_path / "policy3"), (101, tmp_path / "policy4")]
    engine = Sampling(FakeSampler(), CharTokenizer(None), 100)
    both = evaluate("dvp", seeded, file, SETTINGS, lambda: engine, tmp_path / "both", kept)
    assert both is not None
    ways = [record.model_dump() for record in both.summary.snapshots]
    assert both.summary.model_copy(update={"snapshots": []}) == alone.summary
    assert [(record.pop("seed"), record.pop("step")) for record in ways] == [(100, 20), (100, 40)]
    plain = [{key: value for key, value in record.items() if key not in ("seed", "step")} for record in records(alone)]
    assert ways == [plain[1], plain[0]]
    assert {sample.step for sample in both.samples} == {None, 20, 40}
