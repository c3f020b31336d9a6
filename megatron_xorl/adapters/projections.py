"""Every projection of the model that an adapter can stand on, in model order.

The one idea: one namespace, Hugging Face's. A projection has the path it has in a checkpoint,
whatever Megatron fuses or stacks: ``model.layers.7.self_attn.q_a_proj``. The experts of a layer are
one bank per projection, named ``model.layers.7.mlp.experts.gate_proj``. The router, the DSA
indexer, the embedding and the MTP layer are not in the list: nothing adapts them.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_xorl.config.model import GlmConfig

__all__ = ["Projection", "projections"]


@dataclass(frozen=True, slots=True)
class Projection:
    """One linear map of the model.

    ``num_experts`` is 0 for an ordinary projection and the number of experts for a bank.
    ``parallel`` says how Megatron cuts the base over tensor ranks (expert tensor ranks for a bank):
    ``column`` by outputs, ``row`` by inputs, ``vocab`` by vocabulary entries, ``replicated`` not at
    all.
    """

    name: str
    region: str
    layer: int | None
    in_features: int
    out_features: int
    num_experts: int
    parallel: str

    @property
    def leaf(self) -> str:
        """The last component of the name."""
        return self.name.rpartition(".")[2]

    def expert_names(self) -> tuple[str, ...]:
        """Return the per-expert names of a bank, ``….experts.0.gate_proj`` onwards; empty for an ordinary projection."""
        return tuple(self.expert_name(expert) for expert in range(self.num_experts))

    def expert_name(self, expert: int) -> str:
        """Return the name of one expert's projection in a bank."""
        parent, _, leaf = self.name.rpartition(".")
        return f"{parent}.{expert}.{leaf}"


def projections(config: GlmConfig) -> tuple[Projection, ...]:
    """Return the projections of ``config`` in model order: layer by layer, then the head."""
    found: list[Projection] = []
    for layer in range(config.num_hidden_layers):
        found += _attention(config, layer)
        found += _dense(config, layer) if config.is_dense(layer) else _sparse(config, layer)
    found.append(
        Projection("lm_head", "lm_head", None, config.hidden_size, config.vocab_size, 0, "vocab")
    )
    return tuple(found)


def _attention(config: GlmConfig, layer: int) -> list[Projection]:
    heads, hidden = config.num_attention_heads, config.hidden_size
    latent = config.kv_lora_rank
    rows = (
        ("q_a_proj", hidden, config.q_lora_rank, "replicated"),
        ("q_b_proj", config.q_lora_rank, heads * config.qk_head_dim, "column"),
        ("kv_a_proj_with_mqa", hidden, latent + config.qk_rope_head_dim, "replicated"),
        ("kv_b_proj", latent, heads * (config.qk_nope_head_dim + config.v_head_dim), "column"),
        ("o_proj", heads * config.v_head_dim, hidden, "row"),
    )
    parent = f"model.layers.{layer}.self_attn"
    return [
        Projection(f"{parent}.{leaf}", "attention", layer, n_in, n_out, 0, cut)
        for leaf, n_in, n_out, cut in rows
    ]


def _mlp(
    parent: str, region: str, layer: int, hidden: int, width: int, experts: int = 0
) -> list[Projection]:
    return [
        Projection(f"{parent}.gate_proj", region, layer, hidden, width, experts, "column"),
        Projection(f"{parent}.up_proj", region, layer, hidden, width, experts, "column"),
        Projection(f"{parent}.down_proj", region, layer, width, hidden, experts, "row"),
    ]


def _dense(config: GlmConfig, layer: int) -> list[Projection]:
    return _mlp(
        f"model.layers.{layer}.mlp",
        "dense_mlp",
        layer,
        config.hidden_size,
        config.intermediate_size,
    )


def _sparse(config: GlmConfig, layer: int) -> list[Projection]:
    mlp, hidden, width = (
        f"model.layers.{layer}.mlp",
        config.hidden_size,
        config.moe_intermediate_size,
    )
    shared = width * config.n_shared_experts
    return [
        *_mlp(f"{mlp}.experts", "routed_experts", layer, hidden, width, config.n_routed_experts),
        *_mlp(f"{mlp}.shared_experts", "shared_experts", layer, hidden, shared),
    ]
