"""The page of remedies is made of the rules that `diagnose` advises by."""

import re

from tailrl.diagnosis import advice
from tailrl.diagnosis.advice import advice_rules
from tailrl.diagnosis.replay import catalogue
from which_remedy import FACTS, SETTINGS, THERE, lines, rules_table


def test_every_rule_has_evidence_with_its_scope() -> None:
    rules = advice_rules().rules
    assert all(rule.evidence and rule.scope for rule in rules)
    assert FACTS.keys() == advice.FACTS.keys()
    assert SETTINGS.keys() == {rule.name for rule in rules if rule.settings}
    assert {word for rule in rules for word in re.findall(r"\{\w+\}", rule.words)} <= {*THERE, "{k3}"}
    assert rules_table().count("\n") == len(rules) + 2


def test_every_advised_remedy_has_its_lines_in_every_framework_that_has_it() -> None:
    shown = lines()
    for rule in advice_rules().rules:
        for choice in rule.remedies:
            section = shown.partition(f'<a id="{choice.name}"></a>')[2].partition("\n### ")[0]
            for framework in catalogue().remedies[choice.name].lines:
                assert f"\n{framework} " in section, (choice.name, framework)
            assert "\ntailrl:\n" in section
        for framework in rule.settings:
            assert f"\n{framework}" in shown.partition(f'<a id="{rule.name}"></a>')[2]
