"""The profiles name what is there. Whether they work, a cluster knows: `make slurm`."""

import re
from pathlib import Path

import pytest
import yaml
from study_fixture import ROOT

RULES = re.compile(r"^rule (\w+):", re.MULTILINE)


@pytest.mark.parametrize("profile", sorted(ROOT.glob("profiles/*/profile.yaml")), ids=lambda path: path.parent.name)
def test_resources_are_for_rules_that_there_are(profile: Path) -> None:
    """Snakemake says nothing of a rule that it does not know, and gives its resources to none."""
    settings = yaml.safe_load(profile.read_text(encoding="utf-8"))
    rules = {name for file in ROOT.glob("workflow/rules/*.smk") for name in RULES.findall(file.read_text())}
    assert {"train", "evaluate"} <= rules
    assert settings.get("set-resources", {}).keys() <= rules


@pytest.mark.parametrize("profile", ["slurm", "kubernetes"])
def test_threads_are_left_to_the_rules(profile: str) -> None:
    """They are in the bits of a result."""
    settings = yaml.safe_load((ROOT / "profiles" / profile / "profile.yaml").read_text(encoding="utf-8"))
    assert not {"set-threads", "cores"} & settings.keys()
    assert all("threads" not in of_rule for of_rule in settings["set-resources"].values())
