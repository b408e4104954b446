"""The exam of `tailrl explain`: faults planted in real samplers, and clean logs, on policies that are new to it.

    python benchmarks/explain_exam.py --work results/explain_exam --out docs/results/explain_exam.csv

Logs and answers are kept in the work folder: a run that was stopped goes on. `--engine` and `--policy` make a part.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from exam_tasks import problems
from safetensors.torch import save_file
from table import show
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tailrl.config.policy import WarmStart
from tailrl.config.sampler import SamplerSettings
from tailrl.explanation.explanation import Explanation, explain
from tailrl.explanation.page import verdict
from tailrl.model.forward import PACKED_ATTENTION
from tailrl.model.policy import load_policy, load_tokenizer, named_weights, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.runtime.errors import StudyError
from tailrl.runtime.seeding import derive_seed
from tailrl.training.base_policy import warm_start

DESIGN = Path(__file__).with_name("explain_exam.yaml")
TEMPLATE = (
    "{{ '<pad>system\nWork it out.<end>' }}"
    "{% for m in messages %}{{ '<pad>' + m['role'] + '\n' + m['content'] + '<end>' }}{% endfor %}"
    "{{ '<pad>assistant\n' }}"
)
MAX_LENGTH = 256
WITHIN = 0.1  # of the dose: the fitted number's error
QUANTISED = ("int8", "int4", "cache")
RANK = 4
LESSONS = 3000


@dataclass(frozen=True)
class Case:
    """One log: a policy, an engine, a kind of fault (clean: none), its dose and a seed."""

    policy: str
    engine: str
    kind: str
    dose: float | dict[str, float]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.policy}_{self.engine}_{self.kind}_{self.seed}"


def design() -> dict[str, Any]:
    """The exam's lists and ranges."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def planned(plan: dict[str, Any]) -> Iterator[Case]:
    """All cases, drawn by the design's seed."""
    for spec in plan["policies"]:
        for engine in ("transformers", "vllm"):
            for entry in plan[engine]:
                for draw in range(entry["draws"]):
                    seed = derive_seed("explain", plan["seed"], spec["name"], engine, entry["kind"], draw) % 2**31
                    yield Case(spec["name"], engine, entry["kind"], _dose(entry, random.Random(seed)), seed)
            for draw in range(plan["clean"]):
                seed = derive_seed("explain", plan["seed"], spec["name"], engine, "clean", draw) % 2**31
                yield Case(spec["name"], engine, "clean", 0.0, seed)


def _dose(entry: dict[str, Any], rng: random.Random) -> float | dict[str, float]:
    if entry.get("several"):
        settings = {
            "temperature": round(rng.uniform(0.6, 0.9), 2),
            "top_k": float(rng.randint(4, 12)),
            "repetition_penalty": round(rng.uniform(1.05, 1.3), 2),
        }
        left_out = rng.choice(["", *settings])
        return {name: value for name, value in settings.items() if name != left_out}
    low, high = entry.get("range", [0, 0])
    return float(rng.randint(low, high)) if entry.get("whole") else round(rng.uniform(low, high), 3)


# --- policies --------------------------------------------------------------------------------------------


def obtain(spec: dict[str, Any], work: Path) -> Path:
    """The folder with the policy, an older checkpoint of it and an adapter; made first where it is not there."""
    folder: Path = work / "models" / spec["name"]
    if (folder / "ready").exists():
        return folder
    seed = derive_seed("explain", spec["name"]) % 2**31
    lessons = problems(spec["task"], LESSONS, seed, 0.15)
    tokenizer = train_tokenizer(spec["vocabulary"], (one.prompt + (one.solution or "") for one in lessons[:2000]))
    torch.manual_seed(seed)
    model = _created(spec, tokenizer)
    warm_start(model, tokenizer, lessons, WarmStart(batch=32, learning_rate=3e-3))
    tokenizer.bos_token, tokenizer.chat_template = tokenizer.pad_token, TEMPLATE
    save_policy(model, tokenizer, folder / "older")
    warm_start(model, tokenizer, problems(spec["task"], 320, seed + 1, 0.15), WarmStart(batch=32, learning_rate=3e-4))
    save_policy(model, tokenizer, folder / "now")
    _write_adapter(model, folder / "adapter", seed)
    _merge(load_policy(folder / "now"), folder / "adapter", folder / "merged", tokenizer)
    (folder / "ready").touch()
    return folder


def _created(spec: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    sizes = {
        "vocab_size": len(tokenizer),
        "hidden_size": spec["hidden"],
        "intermediate_size": 3 * spec["hidden"],
        "num_hidden_layers": spec["layers"],
        "num_attention_heads": spec["heads"],
        "max_position_embeddings": MAX_LENGTH,
        "bos_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "attn_implementation": PACKED_ATTENTION,
    }
    if spec["name"] == "neox":
        return GPTNeoXForCausalLM(GPTNeoXConfig(**sizes))
    return Qwen3ForCausalLM(Qwen3Config(**sizes, num_key_value_heads=spec["heads"], head_dim=32))


def _targets(model: PreTrainedModel) -> list[str]:
    ends = ("down_proj.weight", "dense_4h_to_h.weight")
    return [name for name, _ in model.named_parameters() if name.endswith(ends)]


def _write_adapter(model: PreTrainedModel, folder: Path, seed: int) -> None:
    """A random LoRA adapter in PEFT's format, about a fifth of the weights' size."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, weight in model.named_parameters():
        if name in _targets(model):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            outputs, inputs = weight.shape
            size = 0.4 * float(weight.detach().std())
            weights[f"{stem}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
            weights[f"{stem}.lora_B.weight"] = size / RANK**0.5 * torch.randn(outputs, RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
    (folder / "adapter_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _merge(model: PreTrainedModel, adapter: Path, out: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    """The model with the adapter in its weights: B A is added by this script's own lines."""
    from safetensors.torch import load_file

    parts = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            if f"{stem}.lora_A.weight" in parts:
                weight += parts[f"{stem}.lora_B.weight"] @ parts[f"{stem}.lora_A.weight"]
    save_policy(model, tokenizer, out)


# --- logs ------------------------------------------------------------------------------------------------


def prompts_of(case: Case, folder: Path, plan: dict[str, Any]) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts that the log has, and those that the sampler reads."""
    tokenizer = load_tokenizer(folder / "now")
    task = next(spec["task"] for spec in plan["policies"] if spec["name"] == case.policy)
    right, read = [], []
    for problem in problems(task, plan["responses"], case.seed):
        # The policy was warm-started without a template: its text is the problem, behind a system text.
        text = tokenizer.apply_chat_template([{"role": "user", "content": problem.prompt}], tokenize=False)
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        right.append(ids)
        read.append(_read(case, ids, text, tokenizer))
    return right, read


def _read(case: Case, ids: list[int], text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    if case.kind == "begin_doubled":
        return [ids[0], *ids]
    if case.kind == "begin_missing":
        return ids[1:]
    if case.kind == "prompt_ends_earlier":
        return ids[: -int(case.dose)]  # type: ignore[arg-type]
    if case.kind == "system_missing":
        without: list[int] = tokenizer.encode(text[text.index("<pad>user") :], add_special_tokens=False)
        return without
    return ids


def options_of(case: Case) -> dict[str, float]:
    """The sampling options of a case, by the names that both engines have."""
    if isinstance(case.dose, dict):
        return case.dose
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    return {case.kind: case.dose} if case.kind in names else {}


def model_of(case: Case) -> tuple[str, str]:
    """The folders of the trainer's policy and of the sampler's weights."""
    return {"other_weights": ("now", "older"), "adapter": ("merged", "now")}.get(case.kind, ("now", "now"))


@torch.no_grad()
def sample_transformers(case: Case, folder: Path, read: Sequence[list[int]], longest: int) -> Iterator[dict[str, Any]]:
    """Responses, their log-probs, the largest ones and raw ones, from transformers' own `generate`."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(case.seed)
    dtype = torch.float32 if case.seed % 3 == 0 else torch.bfloat16
    path = folder / model_of(case)[1]
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=dtype, trust_remote_code=False, use_safetensors=True
    ).eval()
    options: dict[str, Any] = {"top_k": 0, "top_p": 1.0, "temperature": 1.0, **options_of(case)}
    options["top_k"] = int(options["top_k"])
    model.generation_config = GenerationConfig(do_sample=True, eos_token_id=None, pad_token_id=0, **options)
    for prompt in read:
        ids_1P = torch.tensor([prompt])
        found = model.generate(
            ids_1P,
            attention_mask=torch.ones_like(ids_1P),
            max_new_tokens=longest,
            output_scores=True,
            return_dict_in_generate=True,
        )
        tokens = found.sequences[0, len(prompt) :].tolist()
        logp_TV = torch.cat(found.scores).double().log_softmax(-1)
        logp_T = logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        yield {"tokens": tokens, "logprobs": logp_T.tolist(), "top": logp_TV.amax(-1).tolist()}


class Vllm:
    """One vLLM of one folder, in bfloat16, with processed log-probs."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self.llm = LLM(
            model=str(folder),
            trust_remote_code=False,
            dtype="bfloat16",
            max_model_len=MAX_LENGTH,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enforce_eager=True,
            gpu_memory_utilization=0.1,
            skip_tokenizer_init=True,
            disable_log_stats=True,
        )

    def sample(self, case: Case, read: Sequence[list[int]], longest: int) -> Iterator[dict[str, Any]]:
        """Responses and their log-probs."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        options: dict[str, Any] = dict(options_of(case))
        if "top_k" in options:
            options["top_k"] = int(options["top_k"])
        params = SamplingParams(
            max_tokens=longest, ignore_eos=True, logprobs=0, seed=case.seed, detokenize=False, **options
        )
        for output in self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in read], params, use_tqdm=False):
            one = output.outputs[0]
            tokens = list(one.token_ids)
            logprobs = [place[token].logprob for place, token in zip(one.logprobs, tokens, strict=True)]
            yield {"tokens": tokens, "logprobs": logprobs}


def sample_quantised(case: Case, folder: Path, read: Sequence[list[int]], longest: int) -> Iterator[dict[str, Any]]:
    """Responses of the project's vLLM with few bits; raises StudyError where this processor cannot."""
    from tailrl.rollout import Decoding, make_sampler
    from tailrl.rollout.types import Request

    few = {"int8": {"quantization": "int8"}, "int4": {"quantization": "int4"}, "cache": {"kv_cache_dtype": "fp8_e4m3"}}
    settings = SamplerSettings(engine="vllm", dtype="bfloat16", **few[case.kind])
    sampler = make_sampler(settings, folder / "now", MAX_LENGTH, seed=0)
    sampler.load_weights(named_weights(load_policy(folder / "now")))
    requests = [Request(tuple(ids), case.seed + number, 0.0) for number, ids in enumerate(read)]
    for rollout in sampler.generate(requests, Decoding(1.0, longest)):
        yield {"tokens": list(rollout.tokens), "logprobs": rollout.logp_infer_T.tolist()}


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """The library's own forward in the model's dtype."""
    logits_PV: Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    logp_TV = logits_PV[len(prompt) - 1 : -1].log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def make_log(case: Case, folder: Path, plan: dict[str, Any], file: Path, vllm: dict[str, Vllm]) -> None:
    """Samples, scores and writes the log of a case."""
    from transformers import AutoModelForCausalLM

    right, read = prompts_of(case, folder, plan)
    if case.engine == "transformers":
        sampled = list(sample_transformers(case, folder, read, plan["longest"]))
    elif case.kind in QUANTISED:
        sampled = list(sample_quantised(case, folder, read, plan["longest"]))
    else:
        path = folder / model_of(case)[1]
        engine = vllm.setdefault(str(path), Vllm(path)) if str(path) not in vllm else vllm[str(path)]
        sampled = list(engine.sample(case, read, plan["longest"]))
    path = folder / model_of(case)[0]
    trainer = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    temperature = float(case.dose) if case.kind == "trainer_temperature" else 1.0  # type: ignore[arg-type]
    lines = []
    for prompt, one in zip(right, sampled, strict=True):
        column = one["logprobs"]
        if case.kind == "most_likely":
            column = one["top"]
        elif case.kind == "shifted":
            column = [*column[1:], column[-1]]
        row = {
            "token_ids": [*prompt, *one["tokens"]],
            "sampler_logprobs": [round(value, 6) for value in column],
            "trainer_logprobs": [
                round(value, 6) for value in trainer_logprobs(trainer, prompt, one["tokens"], temperature)
            ],
        }
        lines.append(json.dumps(row) + "\n")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(lines), encoding="utf-8")


# --- answers ---------------------------------------------------------------------------------------------

RIGHT: dict[str, dict[str, Any]] = {
    "begin_doubled": {"begin_doubled": 0.0},
    "begin_missing": {"begin_missing": 0.0},
    "system_missing": {"system_missing": 0.0},
    "other_weights": {"other_weights": 0.0},
    "adapter": {"adapter": -1.0},
    "most_likely": {"most_likely": 0.0},
    "shifted": {"shifted": 1.0},
    "int8": {"int8": "int8"},
    "int4": {"int4": "int4"},
    "cache": {"cache": "fp8_e4m3"},
    "clean": {},
}
"""The hypotheses that are right of kinds without a drawn dose."""


def right_of(case: Case) -> dict[str, Any]:
    if case.kind == "trainer_temperature":
        return {"temperature": case.dose}
    if isinstance(case.dose, dict):
        return case.dose
    return RIGHT.get(case.kind, {case.kind: case.dose})


def answer(case: Case, folder: Path, file: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """What `tailrl explain` says of the log, and whether it is right."""
    began = time.perf_counter()
    others = [folder / "older"] if case.kind in ("other_weights", "clean") else []
    adapters = [folder / "adapter"] if case.kind == "adapter" else []
    found = explain(str(file), folder / model_of(case)[0], others=others, adapters=adapters, tokens=plan["scored"])
    side = "trainer" if case.kind == "trainer_temperature" else "sampler"
    named = {choice.hypothesis.name: choice.value for choice in found.own(side)}
    other_side = {"trainer": "sampler", "sampler": "trainer"}[side]
    right = right_of(case)
    says = named.keys() == right.keys() and not found.own(other_side)
    return {
        "policy": case.policy,
        "engine": case.engine,
        "kind": case.kind,
        "dose": _shown(right),
        "named": _shown(named),
        "right": int(says and (case.kind != "clean" or found.code == 0)),
        "number": int(says and all(_near(named[name], value) for name, value in right.items())),
        "several": int(len(right) > 1),
        "before": round(getattr(found, side).before, 5),
        "after": round(getattr(found, side).after, 5),
        "code": found.code,
        "seconds": round(time.perf_counter() - began, 1),
        "verdict": _first(found),
    }


def _near(named: Any, right: Any) -> bool:
    if isinstance(right, str) or isinstance(named, str):
        return bool(named == right)
    return bool(abs(named - right) <= WITHIN * abs(right))


def _shown(values: dict[str, Any]) -> str:
    return "; ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else str(value) for name, value in values.items()
    )


def _first(found: Explanation) -> str:
    return verdict(found)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--work", type=Path, default=Path("results/explain_exam"))
    parser.add_argument("--out", type=Path, default=None, help="CSV of all answers that there are")
    parser.add_argument("--engine", choices=("transformers", "vllm"), action="append")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--clean", type=int, help="clean logs of each policy and engine, fewer than the design's")
    parser.add_argument("--only-logs", action="store_true")
    arguments = parser.parse_args()
    plan = design()
    cases = list(planned(plan))
    vllm: dict[str, Vllm] = {}
    clean: dict[tuple[str, str], int] = {}
    for case in cases:
        if case.kind == "clean":
            key = case.policy, case.engine
            clean[key] = clean.get(key, 0) + 1
            if arguments.clean is not None and clean[key] > arguments.clean:
                continue
        chosen = {name: getattr(arguments, name) for name in ("engine", "policy", "kind")}
        if any(values and getattr(case, name) not in values for name, values in chosen.items()):
            continue
        folder = obtain(next(spec for spec in plan["policies"] if spec["name"] == case.policy), arguments.work)
        log, said = (arguments.work / name / f"{case.name}.json" for name in ("logs", "answers"))
        log = log.with_suffix(".jsonl")
        if said.exists():
            continue
        try:
            if not log.exists():
                make_log(case, folder, plan, log, vllm)
            if arguments.only_logs:
                continue
            row = answer(case, folder, log, plan)
        except StudyError as error:
            print(f"{case.name}: skipped: {error}", file=sys.stderr, flush=True)
            continue
        said.parent.mkdir(parents=True, exist_ok=True)
        said.write_text(json.dumps(row), encoding="utf-8")
        print(json.dumps(row), file=sys.stderr, flush=True)
    rows = [
        json.loads(file.read_text(encoding="utf-8"))
        for case in cases
        if (file := arguments.work / "answers" / f"{case.name}.json").exists()
    ]
    if rows:
        show(rows, arguments.out)


if __name__ == "__main__":
    main()
