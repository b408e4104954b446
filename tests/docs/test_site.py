"""What the documentation site makes from the code: formulas, reference, claims, navigation, pages of files."""

import csv
import json
import re
from pathlib import Path

import pytest
import torch
import typer
import yaml

import tailrl
from docsite.claims import CAUSES, HEADER, NO_RUN, cause, claims_table, with_table
from docsite.links import links
from docsite.lists import indented
from docsite.markdown import docstring, filtered, plain
from docsite.nav import expanded
from docsite.outside import outside_pages, place_of, relinked
from docsite.reference import PAGES, reference_pages
from docsite.schema import SCHEMA, numbers, units
from docsite.source import NotThereError, definition, functions_of, signature
from tailrl.claims.catalogue import STATEMENTS
from tailrl.cli import jobs
from tailrl.cli.command_line import app
from tailrl.config.arm import Arm
from tailrl.config.presets import frameworks, presets
from tailrl.config.vocabulary import Vocabulary
from tailrl.objective.ratio_losses import RATIO_LOSSES, RatioTokens
from tailrl.objective.rejections import STATISTICS
from tailrl.reports.overview.evidence import made_for, read_answers
from tailrl.tracking.metrics import CLIPPED, METRICS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """The reference, by the place of each page."""
    made = reference_pages(ROOT)
    assert tuple(made) == PAGES
    return made


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables, without the lines between head and body."""
    lines = [line for line in page.splitlines() if line.startswith("| ") and not line.startswith("| ---")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def formula(text: str) -> str:
    pytest.importorskip("latex2mathml", reason="`make docs` installs it")
    from markdown import markdown

    from docsite.mathml import Formulas

    return markdown(text, extensions=[Formulas(), "tables"])


def test_a_formula_is_mathml() -> None:
    shown = formula(r"the ratio $\pi_\theta^{mp}/\pi'$ of" + "\n\n" + r"$$\sum_{t=1}^T \Delta_t \le 2\epsilon$$")
    inline, block = re.findall(r"<math.*?</math>", shown, re.DOTALL)
    assert 'display="inline"' in inline and "<msubsup>" in inline and "<mi>π</mi>" in inline
    assert 'display="block"' in block and 'alttext="\\sum_{t=1}^T \\Delta_t \\le 2\\epsilon"' in block
    assert "$" not in re.sub(r'alttext="[^"]*"', "", shown)
    assert "<math" in formula("| a |\n| --- |\n| $x_1$ |")


@pytest.mark.parametrize("text", ["`$x$ and $y$`", "it costs $5 or $6", r"\$x\$", "a$b$c", "    $x$"])
def test_what_is_no_formula_stays(text: str) -> None:
    assert "<math" not in formula(text)


@pytest.mark.parametrize("latex", [r"\nosuchcommand{x}", r"\left(x"])
def test_a_wrong_formula_ends_a_strict_build(latex: str, caplog: pytest.LogCaptureFixture) -> None:
    formula(f"${latex}$")
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].name.startswith("mkdocs.") and latex in caplog.text


def test_the_study_page_has_every_key_with_unit_default_and_meaning(pages: dict[str, str]) -> None:
    schema = json.loads((ROOT / SCHEMA).read_text(encoding="utf-8"))
    sections = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", pages["reference/study.md"], re.MULTILINE | re.DOTALL))
    for name, block in {"Study": schema, **schema["$defs"]}.items():
        assert [row[0].strip("`") for row in rows(sections[name])[1:]] == list(block["properties"]), name
    steps = next(row for row in rows(sections["Training"]) if row[0] == "`max_new_tokens`")
    assert steps == ["`max_new_tokens`", "integer ≥ 1 ≤ 1e+08", "`64`", "tokens", "longest response, tokens"]
    assert "needed, unless it extends a file" in rows(sections["Study"])[1]


def test_every_number_of_a_study_has_a_unit() -> None:
    schema = json.loads((ROOT / SCHEMA).read_text(encoding="utf-8"))
    assert set(numbers(schema)) == units().keys()


def test_the_command_line_has_every_command_and_parameter(pages: dict[str, str]) -> None:
    page = pages["reference/cli.md"]
    group = typer.main.get_command(app)
    for name, command in group.commands.items():
        if name == "job":
            assert all(f"| `tailrl job {job}` |" in page for job in typer.main.get_command(jobs.app).commands)  # type: ignore[attr-defined]
            continue
        section = page.split(f"### {name}\n")[1].split("\n###")[0].split("\n## ")[0]
        assert f"tailrl {name}" in section
        shown = {row[0].strip("`").split()[0] for row in rows(section)[1:]}
        assert shown == {p.metavar if p.param_type_name == "argument" else p.opts[0] for p in command.params}


def test_the_python_page_has_every_public_name_with_its_docstring(pages: dict[str, str]) -> None:
    page = pages["reference/api.md"]
    assert sorted(re.findall(r"^### (\w+)$", page, re.MULTILINE)) == sorted(tailrl._HOME)
    assert "## Others" not in page
    for name in tailrl._HOME:
        section = page.split(f"### {name}\n")[1].split("\n### ")[0]
        assert len(section.split()) > 5 and "Source: [`workflow/tailrl/" in section, name
    loss = page.split("### batch_loss\n")[1].split("\n### ")[0]
    assert loss.startswith("\n```python\nbatch_loss(\n    ") and "**Parameters**" in loss and "**Raises**" in loss


def test_the_page_of_corrections_has_every_name_that_a_study_may_give(pages: dict[str, str]) -> None:
    schema = json.loads((ROOT / SCHEMA).read_text(encoding="utf-8"))["$defs"]
    named = {row[0].strip("`") for row in rows(pages["reference/corrections.md"])}
    asked = [("Correction", "sequence"), ("Correction", "token"), ("Arm", "estimator")]
    for block, key in asked:
        field = schema[block]["properties"][key]
        words = field.get("enum") or field["anyOf"][0]["enum"]  # beside an import path
        assert set(words) - {"none"} <= named
    assert {*STATISTICS, *RATIO_LOSSES, *Vocabulary.kinds(), *presets()} <= named
    assert ["`mis`", "2"] in [[row[0], row[-1]] for row in rows(pages["reference/corrections.md"])]


def test_links_of_the_reference_lead_to_files(pages: dict[str, str]) -> None:
    for place, text in pages.items():
        for _, _, target in links(text):
            path, _, _ = target.partition("#")
            to = (ROOT / "docs" / place).parent / path
            assert not path or to.resolve().is_file() or path in {Path(page).name for page in PAGES}, target


def test_definitions_are_found_without_an_import() -> None:
    _, node, text = definition(ROOT, "rollout", "Request")
    assert text == "One response to sample." and node.lineno > 1
    module, function, _ = definition(ROOT, "objective.advantages", "rloo")
    assert (module, signature(ROOT, module, function)) == ("objective.advantages", "rloo(rewards_PG: Tensor) -> Tensor")
    assert functions_of(ROOT, "objective.advantages", "ESTIMATORS").keys() == {"rloo", "reinforce", "grpo"}
    with pytest.raises(NotThereError, match=r"objective\.loss has no nothing"):
        definition(ROOT, "objective.loss", "nothing")


def test_a_docstring_becomes_markdown() -> None:
    text = "Weights w_t < 1 of `x_t`.\n\n    w = a * b\n\n"
    text += "Args:\n    a_T: float [T],\n        a weight.\n    b: its mate.\n"
    assert docstring(text) == (
        "Weights w\\_t &lt; 1 of `x_t`.\n\n```text\n    w = a * b\n```\n\n"
        "**Parameters**\n\n- `a_T`: float \\[T\\], a weight.\n- `b`: its mate."
    )
    assert plain("$x$ a*b*") == r"\$x\$ a\*b\*"


def test_the_table_of_claims_has_every_statement_and_each_line_once() -> None:
    table = rows(claims_table(RESULTS.parent))
    assert tuple(table[0]) == HEADER
    anchors = [found[1] for row in table[1:] if (found := re.match(r'<a id="([^"]+)"></a>', row[0]))]
    assert anchors == [statement.id for statement in STATEMENTS]
    lines = read_answers([RESULTS])[1]
    of_claim: dict[tuple[str, str], list] = {}
    for line in lines:
        of_claim.setdefault((line.statement.id, line.claim), []).append(line)
    assert sum(int(row[4]) for row in table[1:]) == sum(len(made_for(own) or own) for own in of_claim.values())
    assert {row[1] for row in table[1:]} == {"DVP", "VeXact", "open question"}
    assert {row[2] for row in table[1:]} <= {*CAUSES.values(), NO_RUN}
    assert {row[3] for row in table[1:]} <= {line.verdict for line in lines}
    assert all((ROOT / "docs" / target).is_file() for row in table for _, _, target in links(row[6]))


def test_the_cause_of_an_unknown_dose_is_asked_for() -> None:
    line = next(one for one in read_answers([RESULTS])[1] if one.line)
    object.__setattr__(line.line, "dose", "moonlight")
    with pytest.raises(ValueError, match="no words for the dose 'moonlight'"):
        cause(line)


def test_the_table_takes_the_place_of_the_brief_one() -> None:
    page = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8")
    shown = with_table(page, ROOT)
    assert shown.count("## In brief") == 1 and shown.count("data-filters=") == 1
    box = '<div class="claims" data-rows="statements" data-filters="paper,cause,verdict" markdown="1">'
    assert shown.endswith(f"{box}\n\n{claims_table(RESULTS.parent)}\n</div>\n\n")
    assert shown.count("<summary>What the verdicts mean</summary>\n\nReproduced: ") == 1


def test_the_navigation_is_completed_from_the_pages() -> None:
    nav = ["index.md", {"How-to": ["how-to/b.md", "how-to/*"]}, {"None": ["none/*"]}, "*"]
    names = ["index.md", "how-to/a.md", "how-to/b.md", "how-to/c.md", "how-to/d.md", "z.md", "results/x/summary.md"]
    inside = ["how-to/b.md", "how-to/a.md", "how-to/c.md", "how-to/d.md"]
    assert expanded(nav, dict.fromkeys(names, "")) == ["index.md", {"How-to": inside}, "z.md"]
    texts = dict.fromkeys(names, "") | {"how-to/index.md": "[d](d.md#x) [b](b.md) [c](c.md)"}
    nav[1] = {"How-to": ["how-to/index.md", "how-to/*"]}
    inside = ["how-to/index.md", "how-to/d.md", "how-to/b.md", "how-to/c.md", "how-to/a.md"]
    assert expanded(nav, texts) == ["index.md", {"How-to": inside}, "z.md"]


def test_what_is_within_an_item_is_indented_for_the_site() -> None:
    text = "1. One\n   - a\n     more\n   - b\n\n   ```sh\n   - no\n   ```\n"
    text += "2. Two\n\n   more\n3. Three\n\n- x\n  - y\n\nText\n\n    code"
    assert indented(text) == (
        "1. One\n    - a\n        more\n    - b\n\n    ```sh\n    - no\n    ```\n"
        "\n2. Two\n\n    more\n\n3. Three\n\n- x\n    - y\n\nText\n\n    code"
    )


def test_a_file_outside_docs_has_a_page(tmp_path: Path) -> None:
    for path, text in {
        "studies/a.yaml": "name: a",
        "CONTRIBUTING.md": "[x](docs/x.md#y) [a](studies/a.yaml) [b](#b)",
        "docs/deep/x.md": "[a](../../studies/a.yaml#L1) [c](../../CONTRIBUTING.md#b) [d](../y.md) [e](../../no.md)",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text, encoding="utf-8")
    text = (tmp_path / "docs/deep/x.md").read_text(encoding="utf-8")
    assert relinked(text, "docs/deep/x.md", "deep/x.md", tmp_path) == (
        "[a](../source/studies/a.yaml.md#L1) [c](../source/CONTRIBUTING.md#b) [d](../y.md) [e](../../no.md)"
    )
    made = outside_pages({"docs/deep/x.md": text}, tmp_path)
    assert made.keys() == {"source/CONTRIBUTING.md", "source/studies/a.yaml.md"}
    assert made["source/CONTRIBUTING.md"] == "[x](../x.md#y) [a](studies/a.yaml.md) [b](#b)"
    assert "name: a" in made["source/studies/a.yaml.md"] and "{.yaml " in made["source/studies/a.yaml.md"]
    assert place_of("studies", tmp_path) == "source/studies/index.md"
    assert place_of("../elsewhere", tmp_path) is None


KINDS = {
    "none": {None},
    "weight": {
        "rollout_corr/truncated_fraction",
        "rollout_corr/rollout_is_max",
        "rollout_corr/rollout_is_batch_norm_factor",
    },
    "mask": {"rollout_corr/rollout_rs_masked_fraction"},
    "rejection": {"rollout_corr/rollout_rs_seq_masked_fraction", "rollout_corr/veto_seq_fraction"},
    "loss": {CLIPPED, None},
    "KL": {"policy/reference_k1", "policy/reference_k3"},
    "vocabulary": {"dvp/kept_mass_train_mean"},
    "forward": {None},
}
"""Metrics that say what a remedy of each kind drops, truncates or adds."""
UNLOGGED = {"naive", "SAPO", "VESPO", "score centering", "score centering, top 20", "quantised trainer (QAT)"}


@pytest.fixture(scope="module")
def remedies() -> list[dict]:
    """The catalogue."""
    return yaml.safe_load((ROOT / "benchmarks" / "remedies.yaml").read_text(encoding="utf-8"))


def test_every_remedy_of_the_catalogue_has_a_test_a_metric_an_arm_and_a_cost(remedies: list[dict]) -> None:
    with (ROOT / "docs" / "results" / "remedies_cost.csv").open(encoding="utf-8", newline="") as file:
        assert [entry["name"] for entry in remedies] == [row["remedy"] for row in csv.DictReader(file)]
    for entry in remedies:
        Arm.model_validate(entry["arm"])
        assert (ROOT / "tests" / "unit" / entry["test"]).is_file(), entry["test"]
        for has, why in (("metric", "unlogged"), ("preset", "unshipped"), ("exam", "unexamined")):
            assert (has in entry) != bool(entry.get(why)), (entry["name"], has)
        assert entry.get("metric", CLIPPED) in METRICS, entry["name"]
        assert entry.get("preset", "verl/default") in presets(), entry["name"]
    assert {entry["name"] for entry in remedies if "metric" not in entry} == UNLOGGED
    assert {entry["kind"] for entry in remedies} == KINDS.keys()


def test_what_is_no_correction_has_an_arm_a_test_and_a_metric(pages: dict[str, str]) -> None:
    """And each remedy that was not built has its reason on the page."""
    listed = yaml.safe_load((ROOT / "benchmarks" / "not_built.yaml").read_text(encoding="utf-8"))
    metrics = yaml.safe_load((ROOT / "workflow/tailrl/tracking/metrics.yaml").read_text(encoding="utf-8"))
    assert {"routing replay (R3)", "a lower learning rate"} == {entry["name"] for entry in listed["elsewhere"]}
    for entry in listed["elsewhere"]:
        Arm.model_validate(entry["arm"])
        assert (ROOT / "tests" / "unit" / entry["test"]).is_file() and entry["metric"] in metrics, entry["name"]
    shown = {row[0]: row for row in rows(pages["reference/corrections.md"])}
    for entry in (*listed["elsewhere"], *listed["not_built"]):
        assert len(shown[entry["name"]]) == len(entry) and all(shown[entry["name"]]), entry["name"]


def test_a_remedy_is_of_the_kind_that_its_arm_and_its_metric_say(remedies: list[dict]) -> None:
    for entry in remedies:
        arm = entry["arm"]
        assert entry.get("metric") in KINDS[entry["kind"]], entry["name"]
        if "clip" in arm or "centering" in arm.get("correction", {}):
            kind = {"loss"}
        elif "sampler" in arm:
            kind = {"forward"}
        elif "reference_kl" in arm or "vocabulary" in arm:
            kind = {"KL" if "reference_kl" in arm else "vocabulary"}
        else:
            kind = {"weight", "mask", "rejection"} if arm else {"none"}
        assert entry["kind"] in kind, entry["name"]


def test_a_loss_names_the_clip_where_its_clip_can_act(remedies: list[dict]) -> None:
    """Ratios far from 1, for advantages of both signs."""
    logp_T = torch.tensor([-5.0, -0.1, -5.0, -0.1]).requires_grad_()
    ratio_T = logp_T - torch.tensor([-0.1, -5.0, -0.1, -5.0])
    advantage_T, sequence_T = torch.tensor([1.0, 1.0, -1.0, -1.0]), torch.arange(4)
    losses = [entry for entry in remedies if "clip" in entry["arm"]]
    assert len(losses) == 7
    for entry in losses:
        loss = entry["arm"]["clip"].get("loss", "ppo")
        _, acts_T = RATIO_LOSSES[loss](RatioTokens(logp_T, ratio_T, advantage_T, sequence_T, 4, (0.2, 0.2)))
        assert acts_T.any() == (entry.get("metric") == CLIPPED), entry["name"]


def test_the_catalogue_has_filters_by_kind_and_framework(pages: dict[str, str], remedies: list[dict]) -> None:
    """Without the script the whole table is there, and says all that one can choose."""
    page = pages["reference/corrections.md"]
    box = '<div class="remedies" data-rows="remedies" data-filters="kind,framework" markdown="1">'
    table = rows(page.split(f"{box}\n\n")[1].split("\n\n</div>\n")[0])
    shown = [dict(zip(table[0], row, strict=True)) for row in table[1:]]
    assert [row["remedy"] for row in shown] == [entry["name"] for entry in remedies]
    assert [row["kind"] for row in shown] == [entry["kind"] for entry in remedies]
    for row, entry in zip(shown, remedies, strict=True):
        assert row["framework"] == (entry["preset"].split("/")[0] if "preset" in entry else "none")
        assert row["metric"] == (f"`{entry['metric']}`" if "metric" in entry else f"none: {entry['unlogged']}")
    assert {row["framework"] for row in shown} - {"none"} <= frameworks().keys()


def test_a_filter_of_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="the table of remedies has no column colour"):
        filtered("| a | b |\n| --- | --- |\n", "x", "remedies", ["a", "colour"])


def test_score_centering_in_chunks_needs_a_fifth_of_the_memory_at_most(pages: dict[str, str]) -> None:
    with (RESULTS / "centering_memory.csv").open(encoding="utf-8", newline="") as file:
        cost = {row["case"]: row for row in csv.DictReader(file)}
    assert float(cost["in chunks"]["megabytes"]) <= float(cost["whole logits"]["megabytes"]) / 5
    section = pages["reference/corrections.md"].split("## Score centering\n")[1].split("\n## ")[0]
    assert rows(section)[1:] == [[name, row["megabytes"], row["cpu_seconds"]] for name, row in cost.items()]
    measured = (ROOT / "benchmarks" / "remedies.py").read_text(encoding="utf-8")
    assert "WIDE, HIDDEN, TOKENS = 49_152, 576, 2_048\n" in measured
    assert "of 49,152 tokens" in section and "of 2,048 tokens" in section


def test_the_page_of_claims_says_which_lines_count_collapses_by_the_rule_before() -> None:
    before, _, _ = (ROOT / "docs" / "claims.md").read_text(encoding="utf-8").partition("## In brief")
    assert "before commit `3a1c9f5`" in before and "also counts a run whose reward only fell" in before
