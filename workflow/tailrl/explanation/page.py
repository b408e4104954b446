"""What an explanation says: text for a terminal, and plain data for JSON."""

import json
from collections.abc import Sequence
from typing import Any

from tailrl.diagnosis.log import SIDES
from tailrl.explanation.catalogue import Choice
from tailrl.explanation.explanation import Explanation, Side
from tailrl.explanation.layers import Stage
from tailrl.explanation.places import FEWEST_RESPONSES
from tailrl.explanation.search import World
from tailrl.page_parts.number_text import count


def text(explanation: Explanation) -> str:
    """The explanation for a terminal."""
    read = f"{explanation.title}: {count(explanation.rows, 'response')}."
    head = "\n".join([read, _scored(explanation), *explanation.notes])
    blocks = [head, "\n".join(verdict(explanation)), _referee(explanation), _others(explanation)]
    return "\n\n".join(filter(None, [*blocks, _untried(explanation)])) + "\n"


def markdown(explanation: Explanation) -> str:
    """The explanation as a section of a probe's page."""
    sides = explanation.sides
    rows = [f"| {name} | {side.before:.4f} | {side.after:.4f} | {side.rounding:.4f} |" for name, side in sides.items()]
    others = [
        f"| {name} | {words} | {left:.4f} |"
        for name, side in sides.items()
        if not side.is_clean
        for words, left in side.others
    ]
    nearest = ["", "| of | next best, each alone | left, nats |", "| --- | --- | --- |", *others] if others else []
    lines = [
        "## The cause by experiment",
        "",
        *(f"{sentence}\n" for sentence in verdict(explanation)),
        "| column | from the model, nats | under this explanation | what bfloat16 makes |",
        "| --- | --- | --- | --- |",
        *rows,
        *nearest,
        "",
        _scored(explanation),
    ]
    return "\n" + "\n".join(lines) + "\n"


def _scored(explanation: Explanation) -> str:
    tokens = f"{count(explanation.tokens, 'token')} of {count(explanation.responses, 'response')}"
    return (
        f"{tokens} computed with {explanation.model} in float32, one response at a time, and under "
        f"{explanation.tried} hypotheses.{_samples(explanation)}"
    )


def _samples(explanation: Explanation) -> str:
    """Whether a smaller sample gave the same answer."""
    if explanation.stable:
        return f" The first {explanation.samples[-2]} tokens gave the same answer."
    return " The answer still changed with the last tokens." if len(explanation.samples) > 1 else ""


def _referee(explanation: Explanation) -> str:
    lines = ["How far each column is from the model, mean absolute difference in nats:"]
    for name, side in explanation.sides.items():
        lines.append(f"  {name:8} {side.before:8.4f}   (rounding in bfloat16 makes {side.rounding:.4f})")
    if len(explanation.steps) > 1:
        lines.append("By step:      step   responses   sampler   trainer")
        lines += [
            f"          {step:8g} {number:11d} {far:9.4f} {near:9.4f}" for step, number, far, near in explanation.steps
        ]
    return "\n".join(lines)


def verdict(explanation: Explanation) -> list[str]:
    """The sentences of the verdict, the most important first."""
    found = [finding.words for finding in explanation.findings]
    if explanation.pinned_side:
        found.append(_pinned(explanation))
    for name, side in explanation.sides.items():
        if named := explanation.named(name):
            found += _cause(name, side, named)
    written = [choice for choice in explanation.shared if choice.hypothesis.entry.kind == "record"]
    if written:
        found.append(f"Both columns hold {_words(tuple(written))}. Look at {written[0].hypothesis.entry.look}.")
    elif explanation.shared:
        found.append(
            f"Both sides have {_words(explanation.shared)}: a setting of the run, or the log's prompts are not those "
            "that were read. It makes no mismatch."
        )
    unexplained = (
        [] if explanation.pinned_side else [name for name, side in explanation.sides.items() if not side.is_explained]
    )
    if len(unexplained) == 2:
        found.append("Neither column is this model's: give the checkpoint that the log is of, or --other FOLDER.")
    for name in unexplained:
        side = explanation.sides[name]
        tried = [*([(_words(side.world), side.after)] if side.world else []), *side.others]
        words, left = min(tried, key=lambda one: one[1], default=("the model as it is", side.before))
        found.append(
            f"None of {explanation.tried} hypotheses reproduces the {name}'s numbers: {side.before:.3g} nats from the "
            f"model, at best {left:.3g} with {words}, where rounding makes {side.rounding:.2g}."
        )
    if found and explanation.responses < FEWEST_RESPONSES:
        found.append(f"Only {count(explanation.responses, 'different response')}: chance may look so. Give more.")
    if explanation.layers:
        found.append(_parting(explanation.layers))
    if not found:
        found.append(_clean(explanation))
    return found


def _parting(layers: Sequence[Stage]) -> str:
    """Where the engine's hidden states first part from the model's."""
    first = next((number for number, stage in enumerate(layers) if stage.parts), None)
    if first is None:
        return (
            f"vLLM's hidden states are this model's at all {len(layers)} places: look before the model, at what is "
            "read, or after it, at how log-probs are made."
        )
    before = (
        f"{layers[first - 1].difference:.2g} of their size at {layers[first - 1].name}" if first else "nothing before"
    )
    return (
        f"vLLM's hidden states first part from this model's at {layers[first].name}: they differ by "
        f"{layers[first].difference:.2g} of their size there, by {before}."
    )


def _clean(explanation: Explanation) -> str:
    nearest = [
        f"the {name}'s are nearest to {_words(side.benign)}" for name, side in explanation.sides.items() if side.benign
    ]
    rest = f" ({'; '.join(nearest)})" if nearest else ""
    return f"Both sides compute this model, and differ by rounding alone{rest}. There is nothing to mend."


def _cause(name: str, side: Side, own: World) -> list[str]:
    where = "" if side.share == 1 else f"In {side.share:.0%} of the computed responses the "
    subject = f"{where}{'' if where else 'The '}{name}'s numbers"
    rest = "what rounding leaves" if side.after <= side.limit else "more than rounding leaves"
    sentence = (
        f"{subject} follow those of this model with {_words(own)}: {side.before:.3g} nats become {side.after:.2g}. "
        "What is left is of the size of that format's own noise, which no recomputation repeats."
        if side.follows
        else f"{subject} are those of this model with {_words(own)}: {side.before:.3g} nats become {side.after:.2g}, "
        f"{rest}; {side.explained:.1%} explained."
    )
    looks = dict.fromkeys(choice.hypothesis.entry.look for choice in own)
    return [sentence, *(f"Look at {look}." for look in looks)]


def _pinned(explanation: Explanation) -> str:
    side = explanation.pinned_side
    other = {"sampler": "trainer", "trainer": "sampler"}[side]
    index = {"sampler": 2, "trainer": 3}[other]
    first, last = explanation.steps[0], explanation.steps[-1]
    return (
        f"The {side}'s numbers are this model's at every step, while the {other}'s move away: {first[index]:.3g} "
        f"nats at step {first[0]:g}, {last[index]:.3g} at step {last[0]:g}. The {side} keeps the weights of this "
        "checkpoint: updates never reach it. Look at the weights' hand-over."
    )


def _others(explanation: Explanation) -> str:
    lines = []
    for name, side in explanation.sides.items():
        if side.others and not side.is_clean:
            lines.append(f"Next best for the {name}, each alone:")
            lines += [f"  {left:8.4f}   {words}" for words, left in side.others]
    return "\n".join(lines)


def _untried(explanation: Explanation) -> str:
    if not explanation.untried:
        return ""
    return "Not tried: " + "; ".join(f"{name} ({why})" for name, why in explanation.untried) + "."


def _words(world: World) -> str:
    words = [choice.words for choice in world]
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


# --- as data ---------------------------------------------------------------------------------------------


def as_data(explanation: Explanation) -> dict[str, Any]:
    """The explanation as plain data."""
    return {
        "model": explanation.model,
        "format": explanation.title,
        "code": explanation.code,
        "verdict": verdict(explanation),
        "sides": {name: _side(explanation, name) for name in SIDES},
        "both": [_choice(choice) for choice in explanation.shared],
        "pinned": explanation.pinned_side or None,
        "findings": [
            {"name": one.name, "side": one.side, "share": one.share, "words": one.words} for one in explanation.findings
        ],
        "layers": [
            {"name": one.name, "difference": one.difference, "rounding": one.rounding, "parts": one.parts}
            for one in explanation.layers
        ],
        "steps": [
            {"step": step, "responses": number, "sampler": far, "trainer": near}
            for step, number, far, near in explanation.steps
        ],
        "tokens": explanation.tokens,
        "samples": list(explanation.samples),
        "stable": explanation.stable,
        "responses": explanation.responses,
        "rows": explanation.rows,
        "hypotheses": explanation.tried,
        "not_tried": dict(explanation.untried),
        "notes": list(explanation.notes),
    }


def as_json(explanation: Explanation) -> str:
    return json.dumps(as_data(explanation), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _side(explanation: Explanation, name: str) -> dict[str, Any]:
    side = explanation.sides[name]
    return {
        "nats_from_model": side.before,
        "nats_left": side.after,
        "rounding_nats": side.rounding,
        "explained": side.explained,
        "share_of_responses": side.share,
        "clean": side.is_clean,
        "cause": [_choice(choice) for choice in explanation.own(name)],
        "rounding": [_choice(choice) for choice in side.benign],
        "next": [{"words": words, "nats_left": left} for words, left in side.others],
    }


def _choice(choice: Choice) -> dict[str, Any]:
    return {"name": choice.hypothesis.name, "value": choice.value, "words": choice.words}
