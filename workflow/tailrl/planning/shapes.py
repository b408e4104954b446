"""The sizes of a policy: from the settings of a scratch policy, from config.json, or from a table of hub names."""

import json
from dataclasses import dataclass, replace
from pathlib import Path

from tailrl.config.policy import Policy, ScratchPolicy, lies
from tailrl.runtime.data_files import yaml_beside
from tailrl.runtime.errors import ConfigurationError, ModelError, reason
from tailrl.runtime.limits import regular


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder of the Llama family: gated MLP, or a mixture of such (Qwen3-MoE), RMSNorm, no biases."""

    hidden: int  # H, width of the residual stream
    layers: int  # blocks
    heads: int  # of the queries
    kv_heads: int  # of the keys
    head: int  # numbers in a head
    intermediate: int  # I, width of the MLP, or of each expert
    vocabulary: int  # V
    tied: bool  # whether the head is the embedding
    normed: bool = False  # whether queries and keys are normed, as in Qwen3
    experts: int = 0  # of a layer; 0: one dense MLP
    chosen: int = 1  # experts of a token

    @property
    def products(self) -> int:
        """Entries of a layer's matrices that a token meets: of its experts alone. It costs twice as many operations."""
        return self.entries(self.chosen)

    def entries(self, experts: float) -> int:
        """Entries of a layer's matrices with so many of its experts, or with its one MLP; router included."""
        attention = 2 * self.heads * self.head + 2 * self.kv_heads * self.head
        mlps = experts if self.experts else 1
        return round(self.hidden * (attention + self.experts + 3 * mlps * self.intermediate))

    def read(self, rows: float) -> int:
        """Entries of a layer's matrices that so many tokens read, whose experts are spread evenly."""
        missed = (1 - self.chosen / self.experts) ** rows if self.experts else 0.0
        return self.entries(self.experts * (1 - missed))

    @property
    def layer(self) -> int:
        """Parameters of a layer, all its experts' among them."""
        return self.entries(self.experts) + 2 * self.hidden + (2 * self.head if self.normed else 0)

    @property
    def embedding(self) -> int:
        """Parameters of the embedding; the head has as many."""
        return self.vocabulary * self.hidden

    @property
    def root(self) -> int:
        """Parameters outside the layers: embedding, last norm, and the head, which counts once if tied."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters; a tied head counts once."""
        return self.layers * self.layer + self.root

    @property
    def active(self) -> int:
        """Parameters that a token meets: all but those of the experts that it does not choose."""
        return self.parameters - self.layers * (self.entries(self.experts) - self.products)

    @property
    def cached(self) -> int:
        """Numbers that a token leaves in the cache of keys and values."""
        return 2 * self.layers * self.kv_heads * self.head


KNOWN = {name: Shape(**sizes) for name, sizes in yaml_beside(__file__, "shapes.yaml").items()}
"""Models on the hub, by name without `-Base` or `-Instruct`."""


def shape_of(policy: Policy) -> Shape:
    """The policy's sizes, without a network; raises StudyError if they are unknown."""
    if isinstance(policy, ScratchPolicy):
        sizes = policy.hidden_size, policy.layers, policy.heads, policy.heads, policy.hidden_size // policy.heads
        shape = Shape(*sizes, policy.intermediate_size, policy.vocabulary_size, tied=True)
        if policy.experts is None:
            return shape
        return replace(shape, normed=True, experts=policy.experts, chosen=policy.experts_per_token)
    path = policy.folder or ""
    if lies(Path.is_file, Path(path) / "config.json"):
        return _read(Path(path) / "config.json")
    name = path.removesuffix("-Base").removesuffix("-Instruct")
    if name not in KNOWN:
        raise ConfigurationError(
            f"policy.path: the sizes of {path} are not known: give a folder that holds its config.json, or one "
            f"of {', '.join(KNOWN)}"
        )
    return KNOWN[name]


def known_shape(policy: Policy) -> Shape | None:
    """The sizes of a policy; None where they are not known before it is there."""
    try:
        return shape_of(policy)
    except (ConfigurationError, ModelError):
        return None


def _read(file: Path) -> Shape:
    try:
        with open(file, encoding="utf-8", opener=regular) as opened:
            config = json.load(opened)
        heads, mixture = config["num_attention_heads"], config.get("model_type") == "qwen3_moe"
        if mixture and (config.get("mlp_only_layers") or config.get("decoder_sparse_step", 1) != 1):
            raise ValueError("some of its layers have no experts")
        return Shape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head=config.get("head_dim") or config["hidden_size"] // heads,
            intermediate=config["moe_intermediate_size" if mixture else "intermediate_size"],
            vocabulary=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings", False)),
            normed=config.get("model_type") in ("qwen3", "qwen3_moe"),
            experts=config["num_experts"] if mixture else 0,
            chosen=config["num_experts_per_tok"] if mixture else 1,
        )
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file}: no sizes of a decoder could be read from it: {reason(error)}") from None
