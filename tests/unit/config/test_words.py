"""Settings in words."""

from tailrl.config.policy import PretrainedPolicy, ScratchPolicy
from tailrl.config.words import policy_name


def test_a_policy_in_words() -> None:
    assert policy_name(ScratchPolicy()) == "from scratch, 4 layers of 128, V = 2048"
    assert policy_name(ScratchPolicy(experts=16)) == "from scratch, 4 layers of 128 with 16 experts, V = 2048"
    assert policy_name(PretrainedPolicy(source="pretrained", path="x/y")) == "x/y"
