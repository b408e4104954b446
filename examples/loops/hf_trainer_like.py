"""A subclass of transformers' `Trainer` with the constrained objective, on responses that were sampled before.

    python examples/loops/hf_trainer_like.py

The data set has a row a response: the ids of prompt and response, the sampler's log-probs of the response, and its
advantage. Accumulation of gradients, devices, schedules and logs stay the Trainer's.
"""

import math
import tempfile
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tailrl.losses import Correction, LossInputs, constrained_logprobs, loss


def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Rows padded on the right. `scored` [N, L − 1]: which tokens, after the first, are of the response."""
    ids = [torch.tensor([*row["prompt"], *row["response"]]) for row in rows]
    scored = [torch.tensor([0] * (len(row["prompt"]) - 1) + [1] * len(row["response"])) for row in rows]
    logps = [torch.tensor([0.0] * (len(row["prompt"]) - 1) + list(row["logp_infer"])) for row in rows]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "attention_mask": pad_sequence([torch.ones_like(row) for row in ids], batch_first=True),
        "scored": pad_sequence(scored, batch_first=True).bool(),
        "logp_infer": pad_sequence(logps, batch_first=True),
        "advantage": torch.tensor([row["advantage"] for row in rows]),
    }


class DVPTrainer(Trainer):
    """`log_rho`, `correction` and `temperature` are those of the sampler and of the objective."""

    log_rho = math.log(0.5)
    correction = Correction(sequence="mis", veto=1e-4)
    temperature = 1.0

    def compute_loss(self, model: Any, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any) -> Any:
        """The mean over the responses of the micro-batch; the Trainer divides by its accumulation steps."""
        scored_NL = inputs["scored"]
        sequence_T, count = scored_NL.nonzero()[:, 0], len(scored_NL)
        ids_NL, mask_NL = inputs["input_ids"], inputs["attention_mask"]
        hidden_NLH = model.base_model(input_ids=ids_NL, attention_mask=mask_NL, use_cache=False).last_hidden_state
        hidden_TH, tokens_T = hidden_NLH[:, :-1][scored_NL], ids_NL[:, 1:][scored_NL]
        head_VH = model.get_output_embeddings().weight
        scored = constrained_logprobs(hidden_TH, head_VH, tokens_T, "min_p", self.log_rho, self.temperature)
        loss_inputs = LossInputs(
            trainer=scored,
            logp_sampler_T=inputs["logp_infer"][scored_NL],
            advantage_T=inputs["advantage"][sequence_T],
            sequence_T=sequence_T,
            sequences=count,
            denominator=count,
        )
        outputs = loss(loss_inputs, correction=self.correction)
        self.log(outputs.metrics)
        return (outputs.loss, {"loss": outputs.loss}) if return_outputs else outputs.loss


def random_rows(vocabulary: int, count: int = 8) -> list[dict[str, Any]]:
    """Responses of several lengths that no engine made, with near-uniform log-probs."""
    draw = torch.Generator().manual_seed(0)

    def ids(length: int) -> list[int]:
        return torch.randint(1, vocabulary, (length,), generator=draw).tolist()

    def logps(length: int) -> list[float]:
        return (-math.log(vocabulary) + 0.1 * torch.randn(length, generator=draw)).clamp(max=0.0).tolist()

    return [
        {"prompt": ids(2 + n % 3), "response": ids(3 + n % 4), "logp_infer": logps(3 + n % 4), "advantage": (-1.0) ** n}
        for n in range(count)
    ]


def make_trainer(model: Any, rows: list[dict[str, Any]], out: str, **settings: Any) -> DVPTrainer:
    """A trainer on a CPU with small settings, which `settings` override."""
    small = {"max_steps": 2, "per_device_train_batch_size": 4, "use_cpu": True, "report_to": "none"}
    small |= {"save_strategy": "no", "remove_unused_columns": False, "disable_tqdm": True}
    args = TrainingArguments(output_dir=out, **(small | settings))
    return DVPTrainer(model=model, args=args, train_dataset=rows, data_collator=collate)


def small_model(vocabulary: int) -> LlamaForCausalLM:
    """A random Llama of two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, num_key_value_heads=2, initializer_range=0.03, **sizes))


if __name__ == "__main__":
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(small_model(40), random_rows(40), folder)
        trainer.train()
    print(trainer.state.log_history)
