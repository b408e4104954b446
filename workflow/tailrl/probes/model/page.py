"""A probe's page: that of a log's diagnosis, with what whole distributions add."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tailrl.diagnosis.diagnosis import Diagnosis, diagnose_parts
from tailrl.diagnosis.gate import Judgement
from tailrl.diagnosis.log import pack
from tailrl.diagnosis.page import cell, html_page
from tailrl.page_parts.explorer import with_texts
from tailrl.page_parts.number_text import count
from tailrl.probes.model.probe import Probed
from tailrl.reports.distributions.numbers import distance, set_overlaps, signature
from tailrl.runtime.templates import renderer

TITLE = "tailrl probe"
"""The format's name on the page."""

render = renderer(Path(__file__).parent / "templates", cell, count)


def diagnose_probe(probed: Probed) -> Diagnosis:
    """The diagnosis of the probe's log; its responses have the text of each token."""
    found = diagnose_parts([(TITLE, pack(probed.rows))])
    found = replace(found, faults=())  # both sides were computed here: equal columns are no copy
    fast = getattr(probed.tokenizer, "backend_tokenizer", None)
    return replace(found, responses=with_texts(found.responses, fast)) if fast else found


def probe_page(probed: Probed, diagnosis: Diagnosis, judgements: Sequence[Judgement] = (), experiment: str = "") -> str:
    """The diagnosis of a probe as a page, with what whole distributions add.

    `experiment` is Markdown on the cause that a recomputation names.
    """
    return html_page(diagnosis, f"Probe of {probed.model}", experiment + whole_section(probed), judgements)


def whole_section(probed: Probed) -> str:
    """The part of the page on whole distributions, in Markdown."""
    signatures = signature(probed.engine)
    return render(
        "probe.md.j2",
        vocabulary=probed.vocabulary,
        self_test=probed.self_test,
        dtype=probed.engine.settings.dtype,
        distances=[distance(probed.engine), distance(probed.floor)],
        signatures=signatures,
        mass=sum(row.mass for row in signatures),
        overlaps=set_overlaps(probed.engine),
        inf=math.inf,
    )
