"""reference/corrections.md: remedies by the names that a study gives them, from the code that computes them."""

import ast
from collections.abc import Sequence
from pathlib import Path

import yaml

from docsite.markdown import filtered, first_sentence, table
from docsite.source import functions_of, tree
from tailrl.artifacts.tables import read_csv
from tailrl.config.arm import REMEDIES, Correction, Limited
from tailrl.config.load import read_yaml
from tailrl.config.presets import frameworks
from tailrl.config.reference_kl import ReferenceKL
from tailrl.config.rejection import Rejection
from tailrl.config.vocabulary import Vocabulary

HEAD = """# Corrections and remedies

A study names these in an arm's `correction`, `vocabulary` and `estimator` blocks; [the study file](study.md#arm) has
their other keys. Weights are without gradient. Δ_t = log π_train − log π_infer of a sampled token; Δ_y is its sum over
a response; T is a response's number of tokens.
"""

CATALOGUE = """## The catalogue

ρ_t = p/q = e^Δ_t, of trainer and sampler. A mask drops tokens. A rejection drops responses; MIS weights those that it
keeps. The metric says what a remedy drops, truncates or adds. The last column is the CPU time of one update, from
`benchmarks/remedies.py`; what an engine does more is not in it.
"""

ELSEWHERE = """Settings of sampler or trainer that a paper or a framework has as a remedy. They are no corrections. Of
routing replay: [a mixture of experts](../concepts/experts.md).
"""

INFINITE = """A ratio beyond e^88 is infinite in float32. A token whose response is dropped weighs 0 all the same. The
weight of a kept token must be finite: if not, the update is skipped and counted.
"""

CENTRED = """Centering subtracts, in each state, the expectation of a sampled token's own term. A veto or a rejection
drops a response by all its tokens, so that a term's chance to count depends on tokens that follow. Over every response
of models that can be enumerated, centering beside a veto, a rejection or a masked response leaves a drift, and may add
to it. To centre over the kept tokens removes it for responses of one token alone. So settings refuse centering beside
these. A sampled token outside the trainer's set is dropped alone, and not its response: then no drift stays
(`tests/unit/objective/test_centering.py`).
"""

EXAM = """Exact sums over every response of four random models with 10 tokens and responses of 3, RLOO with 8 prompts
and 8 responses each (`make gradient_remedies`). The dose of each cause is the one that has the k3. Bias is in units of
|∇J|; noise is the standard deviation of a step's gradient, naive without mismatch = 1. Medians over the models. Old
weights: the sampler's are those before a step of exact gradient ascent. A step's bias is not a run's harm, and a
response of three tokens has a milder product than one of thousands.

- At a k3 of 0.01 most thresholds are not reached: token TIS, IcePop, DPPO, IPO, KPop and A-3PO are the same there, and
  M2PO, OPSM, the veto and ROLL's difference are naive.
- Only the weight of a whole response removes the bias, and it adds the most noise. The geometric mean of the ratios
  takes a little more of it than token weights, with less noise.
- What drops whole responses by a tight limit has the least noise and nearly all the bias: little is learned.
- Old weights leave more bias than noise of the same k3, under most remedies.
"""

READ = """A loss that reads no clip refuses `low` and `high`. With A > 0 the clip bounds every term. With A < 0 nothing
bounds PPO's and GSPO's: where such a ratio overflows, the loss is infinite and the update is skipped."""


def corrections_page(root: Path) -> str:
    """The page: a table for each key that names a remedy."""
    corrections = "objective.corrections"
    rules = Rejection.model_fields
    sequence = functions_of(root, corrections, "SEQUENCE_WEIGHTS")
    sequence |= {name: _weigh(root, name) for name in REMEDIES}
    rows = [
        (f"`{name}`", first_sentence(text), "" if name == "is" else f"{Correction(sequence=name).limit:g}")
        for name, text in sequence.items()
    ]
    threshold = f"{Correction(token='tis').token_threshold:g}"
    tokens = functions_of(root, corrections, "TOKEN_WEIGHTS").items()
    veto = Correction.model_fields["veto"].description
    rejects = Correction.model_fields["rejects"].description
    return "\n".join(
        [
            HEAD,
            CATALOGUE,
            filtered(_catalogue(root), "remedies", "remedies", ("kind", "framework")),
            "### Not a correction\n\n" + ELSEWHERE,
            _listed(root, "elsewhere", ("remedy", "arm", "source", "preset", "test", "metric", "cost of an update")),
            "### Not built\n\nRemedies that have no arm here, each with the reason.\n",
            _listed(root, "not_built", ("remedy", "source", "what it does", "why it is not here")),
            "### Bias, noise and cost\n\n" + EXAM,
            _exam(root),
            "![Bias against standard deviation of every remedy, a panel for each cause and k3]"
            "(../results/gradient_remedies/gradient_quality.svg)\n",
            "## Weights of a response\n\n`correction: {sequence: NAME, sequence_threshold: C}`\n",
            table(("name", "weight", "default C"), rows),
            f"What a rejection judges, `rejects`: {rejects}.\n",
            "## Weights of a token\n\n`correction: {token: NAME, token_threshold: C}`\n",
            table(("name", "weight", "default C"), ((f"`{n}`", first_sentence(t), threshold) for n, t in tokens)),
            f"`token_lower`: {Correction.model_fields['token_lower'].description}. `sequence_lower`: "
            f"{Correction.model_fields['sequence_lower'].description}. `normalise`: "
            f"{Correction.model_fields['normalise'].description}.\n",
            INFINITE,
            f"`log_ratio_limit`: {Correction.model_fields['log_ratio_limit'].description}. Only presets of frameworks "
            "that clamp set it.\n",
            "## Rejections\n\n`correction: {reject: [{of: NAME, by: mean, above: x, below: y}]}`, with r = p/q\n",
            _names(functions_of(root, "objective.rejections", "STATISTICS")),
            "\n".join(f"- `{name}`: {rules[name].description}." for name in ("by", "ratio", "when")) + "\n",
            "## Vetoes\n\n`correction: {veto: 1e-4, veto_above: 100}`: "
            f"{veto}; {Correction.model_fields['veto_above'].description}.\n",
            "## Score centering\n\n`correction: {centering: full}`: "
            f"{Correction.model_fields['centering'].description}.\n",
            CENTRED,
            _centering(root),
            "## Losses of the ratio\n\n`clip: {ratio: bypass, loss: NAME}`\n",
            _names(functions_of(root, "objective.ratio_losses", "RATIO_LOSSES")),
            f"`log_ratio_limit`: {Limited.model_fields['log_ratio_limit'].description}. {READ}\n",
            "## KL to the base policy\n\n`reference_kl: {coefficient: 0.001, estimator: k3, where: loss}`, with r = "
            "p_base/p: k1 = −log r, k2 = (log r)²/2, k3 = r − log r − 1\n\n"
            f"{ReferenceKL.model_fields['where'].description}. Refused are k1 in the loss, whose expected gradient is "
            "0, and k2 and k3 in the reward, whose gradient is not the divergence's.\n",
            "## Safe sets\n\n`vocabulary: {rule: NAME}`\n",
            _names(functions_of(root, "objective.safe_set", "RULES")),
            f"`side`: {Vocabulary.model_fields['side'].description}.\n",
            "## Estimators\n\n`estimator: NAME`\n",
            _names(functions_of(root, "objective.advantages", "ESTIMATORS")),
            "## Presets\n\n`correction: {preset: NAME}`; `default` is the whole loss that a framework ships. Other "
            "modes are what one setting changes; clip and KL of the default are the arm's own to give. `make peers` "
            "executes the frameworks' code beside ours: the largest difference of loss or gradient is 1e-6 "
            "(`docs/results/presets.csv`). Versions: "
            + "; ".join(f"{name} {own.version}" for name, own in frameworks().items())
            + ".\n",
            _presets(),
        ]
    )


def _presets() -> str:
    """Every preset with its settings as YAML has them, and where it was read."""
    lines = []
    for name, framework in frameworks().items():
        for mode, preset in framework.modes.items():
            blocks = ("correction", "clip", "reference_kl", "vocabulary")
            settings = {block: own for block in blocks if (own := getattr(preset, block))}
            words = f"refused: {preset.refused}" if preset.refused else _inline(settings) if settings else "nothing"
            note = f"; {preset.note}" if preset.note else ""
            note += f"; not executed: {preset.unexecuted}" if preset.unexecuted else ""
            lines.append((f"`{name}/{mode}`", words, f"{preset.source}{note}"))
    return table(("name", "settings", "read in"), lines)


def _inline(settings: object) -> str:
    """Settings as YAML on one line."""
    return f"`{yaml.safe_dump(settings, default_flow_style=True, width=1000).strip()[1:-1]}`"


def _names(of: dict[str, str]) -> str:
    return table(("name", "meaning"), ((f"`{name}`", first_sentence(text)) for name, text in of.items()))


def _weigh(root: Path, name: str) -> str:
    """What an added remedy says of itself."""
    module = tree(root, f"objective.remedies.{name}")
    function = next(n for n in module.body if isinstance(n, ast.FunctionDef) and n.name == "weigh")
    return ast.get_docstring(function) or ast.get_docstring(module) or ""


def _centering(root: Path) -> str:
    """What score centering costs by whole logits and in chunks."""
    measured = read_csv(root / "docs/results/centering_memory.csv")
    rows = [(row["case"], row["megabytes"], row["cpu_seconds"]) for row in measured]
    return (
        "At a vocabulary of 49,152 tokens, forward and backward of 2,048 tokens, on one CPU thread. Memory is that "
        "beyond the inputs, among which are the sampler's logits. Training works in chunks.\n\n"
        + table(("logits", "memory, MB", "CPU seconds"), rows)
    )


def _listed(root: Path, group: str, header: Sequence[str]) -> str:
    """A group of remedies without a row in the catalogue: the columns are an entry's keys, in their order."""
    entries = read_yaml(root / "benchmarks/not_built.yaml")[group]
    cells = [[_cell(key, value) for key, value in entry.items()] for entry in entries]
    return table(header, cells)


def _cell(key: str, value: object) -> str:
    """A value as a table shows it: an arm as YAML; tests and metrics by their names."""
    if isinstance(value, dict):
        return _inline(value)
    return f"`{value}`" if key in ("test", "metric") else str(value)


def _exam(root: Path) -> str:
    """Bias and noise of every remedy at equal k3 under five causes, and its measured cost."""
    entries = yaml.safe_load((root / "benchmarks/remedies.yaml").read_text(encoding="utf-8"))
    measured = read_csv(root / "docs/results/gradient_remedies/gradient_quality.csv")
    of = {(row["arm"], row["mismatch"], float(row["dose"])): row for row in measured}
    causes = list(dict.fromkeys(row["mismatch"] for row in measured if row["mismatch"] != "none"))
    doses = sorted({float(row["dose"]) for row in measured if row["mismatch"] != "none"})
    cost = _cost(root)
    rows = []
    for entry in entries:
        arm = entry.get("exam")
        cells = [
            f"{float(found['bias_median']):.2f}; {float(found['deviation_ratio_median']):.2f}"
            if (found := of.get((arm, cause, dose)))
            else ""
            for cause in causes
            for dose in doses
        ]
        if arm is None:
            cells[0] = f"none: {entry['unexamined']}"
        rows.append((entry["name"], *cells, cost[entry["name"]]))
    titles = {"bias": "bias of tokens", "old": "old weights"}
    header = [f"{titles.get(cause, cause)}, {dose:g}" for cause in causes for dose in doses]
    return table(("bias; noise at a k3 of", *header, "update, naive = 1"), rows)


def _cost(root: Path) -> dict[str, str]:
    """CPU time of an update under each remedy, naive's = 1."""
    rows = read_csv(root / "docs/results/remedies_cost.csv")
    return {row["remedy"]: f"{float(row['ratio_to_naive']):.2f}" for row in rows}


def _catalogue(root: Path) -> str:
    """Every remedy of the benchmark's list with kind, formula, source, preset, test, metric, and its measured cost."""
    entries = yaml.safe_load((root / "benchmarks/remedies.yaml").read_text(encoding="utf-8"))
    cost = _cost(root)
    header = ("remedy", "kind", "weight or term", "source", "framework", "preset", "test in `tests/unit`", "metric")
    rows = [
        (
            entry["name"],
            entry["kind"],
            entry["formula"],
            entry["source"],
            entry.get("preset", "none").partition("/")[0],
            f"`{entry['preset']}`" if "preset" in entry else f"none: {entry['unshipped']}",
            f"`{entry['test']}`",
            f"`{entry['metric']}`" if "metric" in entry else f"none: {entry['unlogged']}",
            cost[entry["name"]],
        )
        for entry in entries
    ]
    return table((*header, "update, naive = 1"), rows)
