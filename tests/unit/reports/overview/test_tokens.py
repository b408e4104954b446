"""The token explorer of a study's page: each arm's worst responses, from the tokens that its runs kept."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from artifacts_fixture import record_of, tokens_of, write_job
from bad_results import STUDY, write_small
from tokenizers import Tokenizer, decoders, models

from tailrl.artifacts.results import read_results
from tailrl.page_parts.explorer import explorer_data
from tailrl.reports.overview.study import write_report
from tailrl.reports.overview.tokens import MOST_OF_AN_ARM, worst_responses


def test_each_arm_has_its_worst_first(tmp_path: Path) -> None:
    write_small(tmp_path)
    found = worst_responses(read_results(STUDY, tmp_path, STUDY.arms), tmp_path)
    names = [one.name for one in found]
    assert [name.split(",")[0] for name in names] == ["a", "b"] * MOST_OF_AN_ARM
    for arm in STUDY.arms:
        own = [np.abs(one.trainer_T - one.sampler_T).mean() for one in found if one.name.startswith(arm)]
        assert own == sorted(own, reverse=True)
    assert all(len(one.token_T) == 1 and one.texts == () for one in found), "two responses of one token, four a run"


def test_responses_are_put_together_by_step_and_sequence(tmp_path: Path) -> None:
    write_small(tmp_path)
    nats = np.array([0.5, 0.1, 0.1, 0.7, 0.9], np.float32)
    step, sequence = np.array([0, 2, 0, 2, 2]), np.array([1, 1, 0, 1, 1])
    tokens = tokens_of(step, sequence=sequence, logp_train=-nats, logp_infer=np.zeros(5, np.float32))
    points = [{"train/step": float(n)} for n in range(3)]
    for arm in STUDY.arms:
        for seed in STUDY.seeds:
            write_job(tmp_path / "train" / arm / f"seed{seed}", record_of(STUDY.run(arm), seed), points, tokens)
    first = worst_responses(kept(), tmp_path)[0]
    assert (first.step, first.name) == (2, "a, seed 0")
    assert first.trainer_T.round(3).tolist() == [-0.1, -0.7, -0.9]


def kept() -> Any:
    """As much of the results as names the runs."""
    runs = {arm: tuple(SimpleNamespace(arm=arm, seed=seed) for seed in STUDY.seeds) for arm in STUDY.arms}
    return SimpleNamespace(arms=tuple(STUDY.arms), runs=runs)


def test_a_study_s_page_has_the_explorer_folded_with_texts(tmp_path: Path) -> None:
    write_small(tmp_path)
    (tmp_path / "base").mkdir(exist_ok=True)
    tokenizer = Tokenizer(
        models.WordLevel({f"</script>{number}": number for number in range(50)}, unk_token="</script>0")
    )
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "base" / "tokenizer.json"))
    responses = worst_responses(read_results(STUDY, tmp_path, STUDY.arms), tmp_path)
    assert responses[0].texts[0].startswith("</script>")
    write_report(STUDY, tmp_path, tmp_path)
    html = (tmp_path / "summary.html").read_text(encoding="utf-8")
    fold = html.index("<details><summary>The responses with the largest mismatch")
    assert html.index('class="explorer"') > fold and html.count('class="explorer"') == 1
    assert "</script>0" not in html and len(explorer_data(responses)) == 2 * MOST_OF_AN_ARM
