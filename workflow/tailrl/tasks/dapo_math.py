"""BytedTsinghua-SIA/DAPO-Math-17k: competition mathematics, the training set of the DVP paper.

Its published file repeats every problem about a hundred times, and wraps it in an instruction that asks for a
last line `Answer: ...`. Here every problem appears once, with our own instruction that asks for a box.

    prompt         [{"role": "user", "content": "Solve the following ... <problem> ... after \\"Answer:\\"."}]
    reward_model   {"ground_truth": "34", "style": ...}
    extra_info     {"index": "<uuid>"}
"""

from typing import Any

from tailrl.tasks.sources import RowError, answer_of, text_of

HUB_NAME = "BytedTsinghua-SIA/DAPO-Math-17k"
SPLIT = "train"

WRAPPER_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem."
)
WRAPPER_AFTER = 'Remember to put your answer on its own line after "Answer:".'


def read_row(row: dict[str, Any]) -> tuple[object, str, str]:
    """A row's id, problem and answer; raises RowError."""
    messages = row.get("prompt")
    if messages is None:
        raise RowError("prompt is missing")
    message = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    if not isinstance(message, dict) or message.get("role") != "user":
        raise RowError("prompt is not one message of the user")
    text = text_of(message.get("content"), "problem")
    text = text_of(text.removeprefix(WRAPPER_BEFORE).removesuffix(WRAPPER_AFTER), "problem")
    reward, extra = row.get("reward_model"), row.get("extra_info")
    if not isinstance(reward, dict):
        raise RowError("reward_model is missing or not a record")
    return extra.get("index") if isinstance(extra, dict) else None, text, answer_of(reward.get("ground_truth"))
