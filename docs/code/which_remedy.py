"""The tables of docs/how-to/which-remedy.md, from the rules that `tailrl diagnose` advises by.

One table: cause and size to what to do, the evidence and its scope. Then each remedy's lines in every framework.
"""

from collections.abc import Iterator
from pathlib import Path

from docsite.markdown import table
from tailrl.diagnosis.advice import AdviceRule, advice_rules
from tailrl.diagnosis.causes import cause_words
from tailrl.diagnosis.replay import catalogue, configuration

FACTS = {
    "no_tokens": "no token has log-probs of both sides",
    "trainer_disagrees_with_itself": "the trainer's own numbers differ",
    "nothing_replayed": "no token has a sound recomputed log-prob",
    "grows": "k3 grows over the steps",
    "within_sixteen_bits": "the size of 16 bits",
    "grows_with_age": "k3 grows with the samples' age",
    "log_is_wrong": "the log itself is wrong",
    "tokens_of_responses": "some tokens of some responses",
}
"""What a rule's `if` says, in words."""

THERE = {
    "{do}": "Fix the cause: see what `diagnose` says of it.",
    "{fault}": "Fix the log: see what `diagnose` says of it.",
    "{look}": "Look at these tokens first.",
}
"""What stands where the page of a log has words of its own."""


def rules_table() -> str:
    """A row for each rule, in their order: the first that holds is taken."""
    rows = []
    for rule in advice_rules().rules:
        names = [f"[{_remedy(name, threshold)}](#{name})" for name, threshold in remedies_of(rule)]
        finding = f"[{Path(rule.finding).stem}](../findings/{Path(rule.finding).name})" if rule.finding else ""
        own = f"[lines](#{rule.name})" if rule.settings else ""
        k3 = "any" if rule.k3_upto == float("inf") else f"to {rule.k3_upto:g}"
        words = THERE.get(rule.words, rule.words.replace("of {k3} nats ", "of this size "))
        rows.append(
            (_causes(rule), k3, words, ", ".join([*names, *([own] if own else [])]), rule.evidence, rule.scope, finding)
        )
    return table(("cause", "k3, nats", "do", "set", "evidence", "scope", "more"), rows)


def remedies_of(rule: AdviceRule) -> Iterator[tuple[str, float | None]]:
    """The remedies of a rule, each once."""
    yield from dict.fromkeys((choice.name, choice.threshold) for choice in rule.remedies)


def lines() -> str:
    """What sets each advised remedy, and each setting that is none, in every framework that has it."""
    parts = []
    chosen: dict[str, list[float]] = {}
    for rule in advice_rules().rules:
        for name, threshold in remedies_of(rule):
            tried = [value for value, _ in catalogue().remedies[name].settings()]
            chosen.setdefault(name, [])
            chosen[name] += [t for t in ([threshold] if threshold is not None else tried) if t not in chosen[name]]
    for name, thresholds in chosen.items():
        remedy = catalogue().remedies[name]
        parts.append(f'### <a id="{name}"></a>{remedy.title}\n\n{remedy.words[0].upper()}{remedy.words[1:]}.\n')
        numbers = ", ".join(f"{value:g}" for value in thresholds)
        parts.append(f"Advised at C = {numbers}; the lines have {thresholds[0]:g}.\n")
        parts += [_block(one.framework, one.version, one.text) for one in configuration(name, thresholds[0])]
    for rule in advice_rules().rules:
        if rule.settings:
            parts.append(f'### <a id="{rule.name}"></a>{SETTINGS[rule.name]}\n')
            versions = catalogue().versions
            parts += [_block(name, versions.get(name, ""), text) for name, text in rule.settings.items()]
    return "\n".join(parts)


SETTINGS = {
    "mistake": "Say every parameter, or replay the sampler's set",
    "few_bits": "A trainer with the engine's few bits",
    "experts": "Routing replay",
}
"""Titles of settings that are no weights."""


def _block(framework: str, version: str, text: str) -> str:
    title = f"{framework} {version}".strip()
    return f"{title}:\n\n```text\n{text.strip()}\n```\n"


def _causes(rule: AdviceRule) -> str:
    titles = [cause_words()[name].title for name in rule.causes or ()]
    fact = [FACTS[rule.fact]] if rule.fact else []
    return "; ".join([*fact, ", ".join(titles)] if titles else fact) or "any other"


def _remedy(name: str, threshold: float | None) -> str:
    title = catalogue().remedies[name].title
    return title if threshold is None else f"{title}, C = {threshold:g}"
