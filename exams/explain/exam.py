"""The exam of `tailrl explain`: faults planted in real samplers, and clean logs, on policies that are new to it.

    python -m exams.explain --work results/explain_exam --out docs/results/explain_exam.csv

Logs and answers are kept in the work folder: a run that was stopped goes on. `--engine` and `--policy` make a part.
Answers of another commit stay beside those of this one, and the CSV has all of them.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import yaml
from safetensors.torch import save_file
from table import show, write_csv
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from exams.tasks import problems
from tailrl.config.policy import WarmStart
from tailrl.explanation.explanation import Explanation, explain
from tailrl.explanation.page import verdict
from tailrl.model.forward import PACKED_ATTENTION
from tailrl.model.policy import load_policy, load_tokenizer, save_policy
from tailrl.model.tokenizer import train_tokenizer
from tailrl.runtime.errors import StudyError, reason
from tailrl.runtime.provenance import provenance
from tailrl.runtime.seeding import derive_seed
from tailrl.training.base_policy import warm_start

DESIGN = Path(__file__).with_name("design.yaml")
TEMPLATE = (
    "{{ '<pad>system\nWork it out.<end>' }}"
    "{% for m in messages %}{{ '<pad>' + m['role'] + '\n' + m['content'] + '<end>' }}{% endfor %}"
    "{{ '<pad>assistant\n' }}"
)
MAX_LENGTH = 256
WITHIN = 0.1  # of the dose: the fitted number's error
ENGINES = ("vllm", "transformers")
CACHE = "fp8_e4m3"
TRAINERS = (
    "trainer_temperature",
    "raw",
)  # kinds in which the trainer divides by a temperature, and the log's sampler not
RANK = 4
LESSONS = 3000


@dataclass(frozen=True)
class Case:
    """One log: a policy, an engine, a kind of fault (clean: none), its dose, its seed, and where these come from."""

    policy: str
    engine: str
    kind: str
    dose: float | dict[str, float]
    seed: int
    plan: int  # the design's seed
    draw: int

    @property
    def name(self) -> str:
        return f"{self.policy}_{self.engine}_{self.kind}_{self.seed}"


def design() -> dict[str, Any]:
    """The exam's lists and ranges."""
    found: dict[str, Any] = yaml.safe_load(DESIGN.read_text(encoding="utf-8"))
    return found


def planned(plan: dict[str, Any], seed: int) -> Iterator[Case]:
    """All cases of one of the design's seeds."""
    for spec in plan["policies"]:
        for engine in ENGINES:
            clean = {"kind": "clean", "draws": plan["clean"][seed]}
            for entry in [*plan[engine], clean]:
                if spec["name"] not in entry.get("policies", [spec["name"]]):
                    continue
                for draw in range(entry["draws"]):
                    own = derive_seed("explain", seed, spec["name"], engine, entry["kind"], draw) % 2**31
                    dose = _dose(entry, random.Random(own)) if entry is not clean else 0.0
                    yield Case(spec["name"], engine, entry["kind"], dose, own, seed, draw)


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
    if case.kind == "raw":
        return {"temperature": case.dose}
    return {case.kind: case.dose} if case.kind in names else {}


def model_of(case: Case) -> tuple[str, str]:
    """The folders of the trainer's policy and of the sampler's weights."""
    return {"other_weights": ("now", "older"), "adapter": ("merged", "now")}.get(case.kind, ("now", "now"))


def changed_config(case: Case, folder: Path) -> PretrainedConfig:
    """The configuration of the sampler's model, in which a plant may have changed a line."""
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if case.kind == "rope_base":
        config.rope_parameters["rope_theta"] *= case.dose
    if case.kind == "window":
        config.use_sliding_window, config.sliding_window = True, int(case.dose)  # type: ignore[arg-type]
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    return config


@torch.no_grad()
def sample_transformers(case: Case, folder: Path, read: Sequence[list[int]], longest: int) -> Iterator[dict[str, Any]]:
    """Responses, their log-probs, the largest ones and raw ones, from transformers' own `generate`."""
    torch.manual_seed(case.seed)
    dtype = torch.float32 if case.seed % 3 == 0 else torch.bfloat16
    path = folder / model_of(case)[1]
    model = AutoModelForCausalLM.from_pretrained(
        path, config=changed_config(case, path), dtype=dtype, trust_remote_code=False, use_safetensors=True
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


@dataclass(frozen=True)
class Engine:
    """How a vLLM is started: the folder's name, and what is no option of a request."""

    folder: str
    dtype: str = "bfloat16"
    logprobs_mode: str = "processed_logprobs"
    kv_cache_dtype: str = "auto"


def engine_of(case: Case) -> Engine:
    """The vLLM that a case needs."""
    if case.kind in ("int8", "int4", "int4_32"):
        return Engine(case.kind)
    if case.kind == "int4_and_cache":
        return Engine("int4", kv_cache_dtype=CACHE)
    if case.kind == "cache":
        return Engine("now", kv_cache_dtype=CACHE)
    if case.kind == "raw":
        return Engine("now", logprobs_mode="raw_logprobs")
    return Engine(model_of(case)[1], "float32" if case.kind == "clean" and case.seed % 3 == 0 else "bfloat16")


class Vllm:
    """One vLLM of one policy."""

    def __init__(self, policy: Path, engine: Engine) -> None:
        """Raises StudyError where this processor has no kernel for it."""
        # The package's import sets vLLM's environment: one process, and 16-bit activations beside int4 weights.
        from tailrl.rollout.vllm.classes import classes_put_back, give_classes

        from vllm import LLM  # isort: skip

        if engine.folder.startswith("int") and not (policy / engine.folder).exists():
            write_quantised(policy / "now", policy / engine.folder, engine.folder)
        try:
            with classes_put_back(load_policy(policy / "now")) as changed:
                self.llm = LLM(
                    model=str(policy / engine.folder),
                    trust_remote_code=False,
                    dtype=engine.dtype,
                    kv_cache_dtype=engine.kv_cache_dtype,
                    max_model_len=MAX_LENGTH,
                    generation_config="vllm",
                    logprobs_mode=engine.logprobs_mode,
                    enforce_eager=True,
                    gpu_memory_utilization=0.1,
                    skip_tokenizer_init=True,
                    disable_log_stats=True,
                )
            if changed:
                self.llm.apply_model(lambda model: give_classes(model, changed))
        except (OSError, ValueError, RuntimeError, AssertionError, NotImplementedError, KeyError) as error:
            raise StudyError(f"vLLM does not start: {reason(error)}") from error

    def sample(self, case: Case, work: Path, read: Sequence[list[int]], longest: int) -> Iterator[dict[str, Any]]:
        """Responses and their log-probs."""
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        options: dict[str, Any] = dict(options_of(case))
        if "top_k" in options:
            options["top_k"] = int(options["top_k"])
        if case.kind == "generation_config":
            options = self.defaults_from(work / "generation_config" / case.name, options)
        params = SamplingParams(
            max_tokens=longest, ignore_eos=True, logprobs=0, seed=case.seed, detokenize=False, **options
        )
        for output in self.llm.generate([TokensPrompt(prompt_token_ids=ids) for ids in read], params, use_tqdm=False):
            one = output.outputs[0]
            tokens = list(one.token_ids)
            logprobs = [place[token].logprob for place, token in zip(one.logprobs, tokens, strict=True)]
            yield {"tokens": tokens, "logprobs": logprobs}

    def defaults_from(self, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
        """The engine's default sampling settings, which it reads from a generation_config.json with these options."""
        GenerationConfig(do_sample=True, **options).save_pretrained(folder)
        config = self.llm.llm_engine.model_config
        config.generation_config = str(folder)
        found: dict[str, Any] = config.get_diff_sampling_param()
        config.generation_config = "vllm"
        return found


@torch.no_grad()
def write_quantised(folder: Path, out: Path, kind: str) -> None:
    """A checkpoint with linear layers in few bits, whose numbers compressed-tensors computes."""
    from compressed_tensors.compressors.pack_quantized import pack_to_int32
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils.helpers import calculate_qparams

    bits, group = (8, None) if kind == "int8" else (4, 32 if kind == "int4_32" else None)
    settings: dict[str, Any] = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
    settings |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    model, weights = load_policy(folder), {}
    head = next(name for name, module in model.named_modules() if module is model.get_output_embeddings())
    linear = {f"{n}.weight" for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and n != head}
    for name, exact in model.state_dict().items():
        weight_OI = exact.to(torch.bfloat16)
        if name not in linear:
            weights[name] = weight_OI.contiguous()
            continue
        outputs, inputs = weight_OI.shape
        grouped_OGI = weight_OI.view(outputs, -1, group or inputs)
        scale_OG, zero_OG = calculate_qparams(grouped_OGI.amin(-1), grouped_OGI.amax(-1), QuantizationArgs(**settings))
        level_OI = quantize(weight_OI, scale_OG, zero_OG, QuantizationArgs(**settings), dtype=torch.int8)
        stem = name.removesuffix("weight")
        weights[f"{stem}weight_scale"] = scale_OG
        if bits == 8:
            weights[name] = level_OI
        else:
            weights[f"{stem}weight_packed"] = pack_to_int32(level_OI, bits)
            weights[f"{stem}weight_shape"] = torch.tensor([outputs, inputs])
    out.mkdir(parents=True)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    activations = settings | {"strategy": "token", "dynamic": True} if bits == 8 else None
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if bits == 8 else "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [head],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": settings, "input_activations": activations}},
    }
    (out / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, out / "model.safetensors")


@torch.no_grad()
def trainer_logprobs(model: PreTrainedModel, prompt: list[int], tokens: list[int], temperature: float) -> list[float]:
    """The library's own forward in the model's dtype."""
    logits_PV: Tensor = model(torch.tensor([[*prompt, *tokens]])).logits[0].double() / temperature
    logp_TV = logits_PV[len(prompt) - 1 : -1].log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def make_log(case: Case, folder: Path, plan: dict[str, Any], file: Path, vllm: Vllm | None) -> None:
    """Samples, scores and writes the log of a case."""
    right, read = prompts_of(case, folder, plan)
    sampled = list(
        vllm.sample(case, file.parents[1], read, plan["longest"])
        if vllm
        else sample_transformers(case, folder, read, plan["longest"])
    )
    path = folder / model_of(case)[0]
    trainer = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
    ).eval()
    temperature = float(case.dose) if case.kind in TRAINERS else 1.0  # type: ignore[arg-type]
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
    "int4_32": {"int4": "int4_32"},
    "cache": {"cache": CACHE},
    "int4_and_cache": {"int4": "int4", "cache": CACHE},
    "clean": {},
}
"""The hypotheses that are right of kinds without a drawn dose."""


def right_of(case: Case) -> dict[str, Any]:
    if case.kind in TRAINERS:
        return {"temperature": case.dose}
    if isinstance(case.dose, dict):
        return case.dose
    return RIGHT.get(case.kind, {case.kind: case.dose})


def answer(case: Case, folder: Path, file: Path, plan: dict[str, Any]) -> dict[str, Any]:
    """What `tailrl explain` says of the log, and whether it is right."""
    began = time.process_time()
    others = [folder / "older"] if case.kind in ("other_weights", "clean") else []
    adapters = [folder / "adapter"] if case.kind == "adapter" else []
    found = explain(str(file), folder / model_of(case)[0], others=others, adapters=adapters, tokens=plan["scored"])
    side = "trainer" if case.kind in TRAINERS else "sampler"
    named = {choice.hypothesis.name: choice.value for choice in found.own(side)}
    other_side = {"trainer": "sampler", "sampler": "trainer"}[side]
    right = right_of(case)
    # A fault that the columns are said to show by themselves would be a wrong one: no plant makes any.
    invented = found.own(other_side) or any(finding.is_fault for finding in found.findings)
    says = named.keys() == right.keys() and not invented
    return {
        "seed": case.plan,
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
        "cpu_seconds": round(time.process_time() - began, 1),
        "verdict": _first(found),
    }


def _near(named: Any, right: Any) -> bool:
    if isinstance(right, str) or isinstance(named, str):
        # Bits and group are the number; how a scale is stored is not.
        return bool(str(named).removesuffix("_weights").removesuffix("_stored") == right)
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
    parser.add_argument("--seed", type=int, action="append", help="of the design's seeds; all if not said")
    parser.add_argument("--engine", choices=ENGINES, action="append")
    parser.add_argument("--policy", action="append")
    parser.add_argument("--kind", action="append")
    parser.add_argument("--clean", type=int, help="clean logs of each policy and engine, fewer than the design's")
    parser.add_argument(
        "--only", choices=("logs", "answers", "table"), help="make logs, judge those that are there, or neither"
    )
    arguments = parser.parse_args()
    plan = design()
    every = [case for seed in plan["seeds"] for case in planned(plan, seed)]
    cases = [case for case in every if _is_chosen(case, arguments)]
    if arguments.only in (None, "logs"):
        make_logs(cases, arguments.work, plan)
    if arguments.only in (None, "answers"):
        judge(cases, arguments.work, plan)
    rows = [
        {"commit": folder.name, **json.loads(file.read_text(encoding="utf-8"))}
        for folder in sorted((arguments.work / "answers").glob("*/"))
        for case in every
        if (file := folder / _answer(case, arguments.work).name).exists()
    ]
    if rows:
        show(counted(rows), None)
        if arguments.out:
            write_csv(rows, arguments.out)


def counted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of each engine and sort of log: how many there are, how many were named, and with the right number."""
    groups: dict[tuple[str, int, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        sort = "clean" if row["kind"] == "clean" else "several settings" if row["several"] else "one fault"
        groups.setdefault((row["commit"], row["seed"], row["engine"], sort), []).append(row)
    return [
        {"commit": commit, "seed": seed, "engine": engine, "log": sort, "logs": len(members)}
        | {name: sum(row[name] for row in members) for name in ("right", "number")}
        for (commit, seed, engine, sort), members in sorted(groups.items())
    ]


def _is_chosen(case: Case, arguments: argparse.Namespace) -> bool:
    if case.kind == "clean" and arguments.clean is not None and case.draw >= arguments.clean:
        return False
    return all(
        not (values := getattr(arguments, name)) or getattr(case, attribute) in values
        for name, attribute in {"seed": "plan", "engine": "engine", "policy": "policy", "kind": "kind"}.items()
    )


def _log(case: Case, work: Path) -> Path:
    return work / "logs" / f"{case.name}.jsonl"


def _answer(case: Case, work: Path) -> Path:
    """The file of the answer of this code: each commit has a folder, and code with changed files one of its own."""
    code = provenance()
    folder = str(code["commit"])[:8] + ("-changed" if code["dirty"] else "")
    return work / "answers" / folder / f"{case.name}.json"


def make_logs(cases: Sequence[Case], work: Path, plan: dict[str, Any]) -> None:
    """The logs that are not there yet; each vLLM starts once."""
    missing = [case for case in cases if not _log(case, work).exists()]
    groups: dict[tuple[str, Engine | None], list[Case]] = {}
    for case in missing:
        groups.setdefault((case.policy, engine_of(case) if case.engine == "vllm" else None), []).append(case)
    for (policy, engine), members in groups.items():
        folder = obtain(next(spec for spec in plan["policies"] if spec["name"] == policy), work)
        # A process of its own: vLLM gives an engine's gigabyte back only when its process ends.
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:
            pool.submit(_make_group, folder, engine, members, work, plan).result()


def _make_group(folder: Path, engine: Engine | None, members: Sequence[Case], work: Path, plan: dict[str, Any]) -> None:
    """The logs of one policy that one engine makes."""
    try:
        vllm = Vllm(folder, engine) if engine else None
        for case in members:
            make_log(case, folder, plan, _log(case, work), vllm)
            print(f"{case.name}: log", file=sys.stderr, flush=True)
    except StudyError as error:
        print(f"{members[0].policy}, {members[0].kind}: skipped: {error}", file=sys.stderr, flush=True)


def judge(cases: Sequence[Case], work: Path, plan: dict[str, Any]) -> None:
    """Explains the logs that are there and have no answer yet."""
    for case in cases:
        file, said = _log(case, work), _answer(case, work)
        if said.exists() or not file.exists():
            continue
        folder = obtain(next(spec for spec in plan["policies"] if spec["name"] == case.policy), work)
        row = answer(case, folder, file, plan)
        said.parent.mkdir(parents=True, exist_ok=True)
        said.write_text(json.dumps(row), encoding="utf-8")
        print(json.dumps(row), file=sys.stderr, flush=True)
