"""The presets of `config/data/presets.yaml` beside the frameworks' own code: a whole loss, its value and gradient.

    python benchmarks/peer_presets.py --out docs/results/presets.csv --lines docs/results/preset_lines.csv

Each framework runs in a process of its own, from the source that `peer_sources` gives. Its modules are imported as they
are, its defaults come from its own configuration, and the loss goes through its own dispatcher. Ours is `surrogate` and
`kl_loss`, in float64. A preset of a correction changes one thing in its framework's default; so ours has the clip and
the KL of that default beside it (column `beside`). The frameworks average tokens in different ways (column `mean`);
ours adds them up, and gets the same average here. Their clamps (log-ratios at 20 nats, k3 at 10) are not reached.
"""

import argparse
import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from peer_losses import FRAMEWORKS, Batch, Case
from peer_sources import PeerError, folder_of, install_needs, peers
from torch import Tensor

from tailrl.config.arm import Arm, Correction
from tailrl.config.presets import frameworks, presets
from tailrl.diagnosis.replay import catalogue, configuration
from tailrl.objective.corrections import normaliser
from tailrl.objective.loss import log_ratio_term, surrogate
from tailrl.objective.reference_kl import kl_loss, reward_penalty
from tailrl.objective.safe_set import TokenLogprobs, safe_set, token_logprobs

RESULTS = Path(__file__).parents[1] / "docs" / "results"
LENGTHS = (1, 3, 17, 40, 8, 60, 2, 25)
SCALES = (0.0008, 0.05, 0.4, 1.5)  # nats: at the first the geometric masks keep responses, at the last none
LARGEST = 1e-6  # a difference above this is a failure
LINES = ("framework", "version", "remedy", "threshold", "function", "compared", "largest_difference", "reason")
NAMES = {
    "trl": "TRL",
    "skyrl": "SkyRL",
    "openrlhf": "OpenRLHF",
    "nemo-rl": "NeMo-RL",
    "areal": "AReaL",
    "roll": "ROLL",
}  # as diagnoses show them
COLUMNS = ("preset", "version", "function", "compared", "mean", "beside", "tokens", "largest_difference", "reason")


def random_batch(scale: float, seed: int, updated: bool = True, gaps: bool = False) -> Batch:
    """Log-probs of sampler, trainer, updated trainer and base; some tokens differ by 8 times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(LENGTHS), max(LENGTHS))
    mask_NL = torch.arange(shape[1])[None] < torch.tensor(LENGTHS)[:, None]

    def moved(from_NL: Tensor) -> Tensor:
        delta_NL = scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        far_NL = torch.rand(shape, generator=generator) < 0.02
        return (from_NL + torch.where(far_NL, 8 * delta_NL, delta_NL)).clamp(-15.0, -0.001)

    # TRL holds the sampler's log-probs in float32.
    infer_NL = (-torch.rand(shape, generator=generator) * 3 - 0.01).double()
    train_NL = moved(infer_NL)
    new_NL = moved(train_NL) if updated else train_NL
    base_NL = (new_NL + torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5).clamp(max=-0.001)
    advantage_N = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    if gaps:
        mask_NL &= (torch.arange(shape[1]) % 7 != 5)[None]
    return Batch(train_NL, infer_NL, new_NL, base_NL, mask_NL, advantage_N)


def share_of(mean: str, mask_NL: Tensor, kept_NL: Tensor) -> Tensor:
    """What each response's tokens are multiplied by in a framework's mean, [N]."""
    length_N = mask_NL.sum(-1).double()
    count = len(length_N)
    shares: dict[str, Callable[[], Tensor]] = {
        "tokens": lambda: torch.ones_like(length_N) / length_N.sum(),
        "kept tokens": lambda: torch.ones_like(length_N) / kept_NL.sum().clamp(min=1),
        "responses": lambda: 1 / (count * length_N),
        "responses' kept tokens": lambda: 1 / (count * kept_NL.sum(-1).double().clamp(min=1)),
        "responses' sums": lambda: torch.ones_like(length_N) / count,
        "sum of responses": lambda: 1 / length_N,
    }
    return shares[mean]()


def ours(arm: Arm, case: Case, batch: Batch, advantage_N: Tensor) -> tuple[Tensor, Tensor]:
    """Loss and gradient by the moved trainer's log-probs, [N, L], of an arm."""
    beside = Arm.model_validate({"correction": {"preset": case.beside}}) if case.beside else arm
    clip, reference_kl = arm.clip or beside.clip, arm.reference_kl or beside.reference_kl
    mask_NL = batch.mask_NL
    sequence_T = mask_NL.nonzero()[:, 0]
    old_T, infer_T, base_T = (x[mask_NL] for x in (batch.train_NL, batch.infer_NL, batch.base_NL))
    new_T = batch.new_NL[mask_NL].requires_grad_()
    inside_T = torch.zeros_like(sequence_T, dtype=torch.bool)
    zero_T = torch.zeros_like(old_T)
    scored = TokenLogprobs(new_T, new_T.detach(), zero_T, sequence_T, zero_T, inside_T)

    # The framework's mean is over this term's tokens too, which no advantage scales.
    weights = arm.correction.model_copy(update={"log_ratio_penalty": None})

    def of(scale_N: Tensor) -> Any:
        advantage_T = (advantage_N * scale_N)[sequence_T]
        return surrogate(
            scored,
            infer_T,
            advantage_T,
            sequence_T,
            len(LENGTHS),
            1,
            weights,
            clip,
            logp_old_T=old_T,
            segment_T=batch.segment_T,
            age_T=batch.age_N[sequence_T],
        )

    kept_T = of(torch.ones(len(LENGTHS), dtype=torch.float64)).weights.weight_T > 0
    kept_NL = torch.zeros_like(mask_NL).masked_scatter(mask_NL, kept_T)
    found = of(share_of(case.mean, mask_NL, kept_NL))
    loss = found.loss / normaliser(arm.correction, found.weights.ratio_X)
    if arm.correction.log_ratio_penalty is not None:
        for n, share in enumerate(share_of(case.mean, mask_NL, kept_NL)):
            row_T = sequence_T == n
            loss = loss + share * log_ratio_term(arm.correction, new_T[row_T], infer_T[row_T], inside_T[row_T], 1)
    if reference_kl is not None and reference_kl.where == "loss":
        share_N = share_of(case.kl_mean or case.mean, mask_NL, kept_NL)
        for n, share in enumerate(share_N):
            row_T = sequence_T == n
            loss = loss + share * kl_loss(reference_kl, new_T[row_T], base_T[row_T], inside_T[row_T], 1)
    (gradient_T,) = torch.autograd.grad(loss, new_T)
    return loss.detach(), torch.zeros_like(batch.new_NL).masked_scatter(mask_NL, gradient_T)


def penalised(arm: Arm, batch: Batch) -> Tensor:
    """The batch's rewards minus the penalty of the arm's KL in the reward, [N]."""
    settings = arm.reference_kl
    assert settings is not None
    mask_NL = batch.mask_NL
    sequence_T = mask_NL.nonzero()[:, 0]
    inside_T = torch.zeros_like(sequence_T, dtype=torch.bool)
    tokens = (batch.train_NL[mask_NL], batch.base_NL[mask_NL], inside_T, sequence_T)
    return batch.advantage_N - reward_penalty(settings, *tokens, len(LENGTHS))


def difference(arm: Arm, case: Case, batch: Batch) -> float:
    """The largest difference of the loss, of a token's gradient, and of a response's reward.

    Relative to the framework's own value, or to the mean size of its gradient where that is larger.
    """
    new_NL = batch.new_NL.clone().requires_grad_()
    loss, advantage_N = case.run(batch, new_NL)
    (gradient_NL,) = torch.autograd.grad(loss, new_NL)
    our_loss, our_gradient_NL = ours(arm, case, batch, advantage_N)
    mask_NL = batch.mask_NL
    size_T = gradient_NL[mask_NL].abs()
    scale_T = size_T.clamp(min=max(size_T.mean().item(), 1e-12))
    found = [((our_gradient_NL - gradient_NL)[mask_NL].abs() / scale_T).max().item()]
    if case.value:
        found.append(((our_loss - loss.detach()).abs() / max(loss.abs().item(), size_T.sum().item(), 1e-12)).item())
    if case.rewards is not None:
        their_N, our_N = case.rewards(batch), penalised(arm, batch)
        found.append(((our_N - our_N.mean()) - (their_N - their_N.mean())).abs().max().item())
    return max(found)


def replay_difference(case: Case, scale: float, seed: int) -> float:
    """The largest difference of log-probs on the sampler's set, and of their gradient by the trainer's logits.

    The set is the sampler's min-p; the trainer's logits are `scale` away from the sampler's.
    """
    assert case.scores is not None
    generator = torch.Generator().manual_seed(seed)
    count, vocabulary = sum(LENGTHS), 24
    infer_TV = 2 * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    moved_TV = infer_TV + scale * torch.randn(count, vocabulary, generator=generator, dtype=torch.float64)
    kept_TV = safe_set(infer_TV, "min_p", math.log(0.1))
    tokens_T = torch.where(kept_TV, torch.rand(kept_TV.shape, generator=generator, dtype=torch.float64), -1.0).argmax(
        -1
    )
    advantage_T = torch.randn(count, generator=generator, dtype=torch.float64)
    sides = []
    for score in (case.scores, lambda *given: token_logprobs(given[0], given[1], "full", safe_TV=given[2]).logp_T):
        logits_TV = moved_TV.clone().requires_grad_()
        logp_T = score(logits_TV, tokens_T, kept_TV)
        (gradient_TV,) = torch.autograd.grad((advantage_T * logp_T).sum(), logits_TV)
        sides.append((logp_T.detach(), gradient_TV))
    return max(float((one - other).abs().max()) for one, other in zip(*sides, strict=True))


def lines_of(name: str) -> dict[str, tuple[str, Arm]]:
    """The lines that `tailrl diagnose` shows for a framework, with the arm that they stand for, by a name."""
    shown = NAMES.get(name, name)
    found = {}
    for remedy, entry in catalogue().remedies.items():
        for threshold, settings in entry.settings():
            if shown in entry.lines and isinstance(settings, Correction):
                [text] = [one.text for one in configuration(remedy, threshold) if one.framework == shown]
                arm = Arm(correction=settings, deliberate=True)
                found[f"{remedy} at {threshold:.10g}"] = (text, arm)
    return found


def rows_of(name: str) -> Iterator[dict[str, Any]]:
    """A row for each preset of a framework that its own code computes, and for each of its lines."""
    lines = lines_of(name)
    for case in FRAMEWORKS[name](folder_of(peers()[name]), {key: text for key, (text, _) in lines.items()}):
        known = case.mode in lines
        preset = f"{name}/{case.mode}"
        arm = lines[case.mode][1] if known else Arm.model_validate({"correction": {"preset": preset}})
        worst = max(
            replay_difference(case, scale, seed)
            if case.scores is not None
            else difference(arm, case, random_batch(scale, seed, case.moved, case.gaps))
            for seed, scale in enumerate(SCALES * 3)
        )
        parts = ["value"] if case.value else []
        parts += ["gradient"]
        parts += ["reward"] if case.rewards is not None else []
        row = {"function": case.function, "compared": ", ".join(parts), "largest_difference": f"{worst:.2g}"}
        if known:
            remedy, _, threshold = case.mode.partition(" at ")
            yield row | {"line": case.mode, "remedy": remedy, "threshold": threshold}
        else:
            mean = case.mean + (f"; KL: {case.kl_mean}" if case.kl_mean else "")
            tokens = sum(LENGTHS) * len(SCALES) * 3
            yield row | {"preset": preset, "mean": mean, "beside": case.beside, "tokens": tokens}


def executed(name: str) -> tuple[dict[str, dict[str, Any]], str]:
    """The rows of a framework in a process of its own, by preset or line; and why some are missing, if they are."""
    try:
        folder_of(peers()[name])
    except PeerError as error:
        return {}, str(error)
    command = [sys.executable, __file__, "--framework", name]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [json.loads(line) for line in ended.stdout.splitlines()]
    failed = ""
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        failed = (ended.stderr.strip().splitlines() or ["it ended"])[-1]
    return {row.get("preset") or row["line"]: row for row in rows}, failed


def tables() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """A row for each preset, and one for each line."""
    rows, line_rows = [], []
    for name, framework in frameworks().items():
        found, failed = executed(name)
        version = peers()[name].label
        for mode, preset in framework.modes.items():
            key = f"{name}/{mode}"
            row = dict.fromkeys(COLUMNS, "") | {"preset": key, "version": version} | found.get(key, {})
            if key not in found:
                row["compared"] = "refused" if preset.refused else "not executed"
                row["reason"] = preset.refused or preset.unexecuted or failed
            rows.append(row)
        for key in lines_of(name):
            remedy, _, threshold = key.partition(" at ")
            empty = {"compared": "not executed", "reason": failed, "remedy": remedy, "threshold": threshold}
            row = dict.fromkeys(LINES, "") | {"framework": NAMES.get(name, name), "version": version}
            row |= found.get(key, empty)
            row.pop("line", None)
            line_rows.append(row)
    return rows, line_rows


def write(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Writes a table as CSV."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def faults(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A sentence for each row that differs, or that was not executed without a reason that its preset gives."""
    for row in rows:
        name = row.get("preset") or f"{row['framework']}'s lines of {row['remedy']} at {row['threshold']}"
        if row["compared"] == "not executed" and not (row.get("preset") and presets()[row["preset"]].unexecuted):
            yield f"{name}: not executed: {row['reason'] or 'the benchmark has no case for it'}"
        elif row["largest_difference"] and not float(row["largest_difference"]) <= LARGEST:
            where = f"{row['function']} of {row['version']}"
            yield f"{name}: {where} differs by {row['largest_difference']}: the framework has moved, or we have"


def main() -> None:
    """Writes the tables, and ends with 1 and a sentence where a framework differs or was not executed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "presets.csv", help="the table of presets")
    parser.add_argument("--lines", type=Path, default=RESULTS / "preset_lines.csv", help="the table of lines")
    parser.add_argument("--framework", help="print the rows of this one as JSON")
    options = parser.parse_args()
    if options.framework:
        out = os.fdopen(os.dup(1), "w")  # what the frameworks print goes to the errors
        os.dup2(2, 1)
        for row in rows_of(options.framework):
            print(json.dumps(row), file=out, flush=True)
        return
    install_needs()
    rows, line_rows = tables()
    write(options.out, COLUMNS, rows)
    write(options.lines, LINES, line_rows)
    if sentences := [*faults(rows), *faults(line_rows)]:
        raise SystemExit("\n".join(sentences))
    print(f"{len(rows)} presets and {len(line_rows)} lines agree with their frameworks, or say why they cannot")


if __name__ == "__main__":
    main()
