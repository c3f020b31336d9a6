"""GLM-5.2 with LoRA as plain fp64 torch: the hand computation that gradients are compared with.

Written from the architecture's description, not from the package: attention in the *expanded* form
(keys and values of every head are built, never absorbed), rotary positions as complex numbers in
place, every expert by itself with the shared factor expanded to it, and every adapter merged into
its weight as ``W + (alpha / r) B A``. Selection and routing are computed anew in fp64 and returned,
so that a test can assert that the discrete choices agree before it compares gradients.

Weights are Hugging Face's names in fp64 (``tests.oracle.hf_tensors_fp32`` dequantises), factors are
logical names in full logical shapes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracle import hf_tensors_fp32


@dataclass
class Reference:
    """The model of one directory; ``factors`` may be leaves that require a gradient."""

    directory: Path
    factors: dict[str, Tensor] = field(default_factory=dict)
    scales: dict[str, float] = field(default_factory=dict)
    """``alpha / r`` of every adapted target."""

    def __post_init__(self) -> None:
        """Read config.json and the dequantised weights."""
        self.c = json.loads((self.directory / "config.json").read_text())
        self.w = {name: t.double() for name, t in hf_tensors_fp32(self.directory).items()}
        self.selected: dict[int, Tensor] = {}
        self.routes: dict[int, Tensor] = {}

    def weight(self, projection: str, bank: str | None = None, expert: int = 0) -> Tensor:
        """Weight of a projection with its adapter merged; for an expert, with its part of the bank's factors."""
        weight = self.w[f"{projection}.weight"]
        target = bank or projection
        if f"{target}.lora_A" not in self.factors:
            return weight
        a, b = self.factors[f"{target}.lora_A"], self.factors[f"{target}.lora_B"]
        if bank is not None:
            a = a.expand(self.c["n_routed_experts"], *a.shape[1:])[expert]
            b = b.expand(self.c["n_routed_experts"], *b.shape[1:])[expert]
        return weight + self.scales[target] * (b @ a)

    def logits(self, ids: Tensor) -> Tensor:
        """fp64 ``[b, s, vocab]`` of ids ``[b, s]``."""
        x = self.w["model.embed_tokens.weight"][ids]
        chosen = None
        for layer in range(self.c["num_hidden_layers"]):
            name, eps = f"model.layers.{layer}", self.c["rms_norm_eps"]
            h = rms_norm(x, self.w[f"{name}.input_layernorm.weight"], eps)
            out, chosen = self._attention(h, layer, chosen)
            x = x + out
            h = rms_norm(x, self.w[f"{name}.post_attention_layernorm.weight"], eps)
            dense = layer < self.c["first_k_dense_replace"]
            x = x + (self._mlp(h, f"{name}.mlp") if dense else self._experts(h, layer))
        x = rms_norm(x, self.w["model.norm.weight"], self.c["rms_norm_eps"])
        return x @ self.weight("lm_head").T

    def _attention(self, h: Tensor, layer: int, chosen: Tensor | None) -> tuple[Tensor, Tensor]:
        c, name = self.c, f"model.layers.{layer}.self_attn"
        heads, nope, value = c["num_attention_heads"], c["qk_nope_head_dim"], c["v_head_dim"]
        batch, length, _ = h.shape
        q_latent = h @ self.weight(f"{name}.q_a_proj").T
        q_latent = rms_norm(q_latent, self.w[f"{name}.q_a_layernorm.weight"], 1e-6)
        q = (q_latent @ self.weight(f"{name}.q_b_proj").T).view(batch, length, heads, -1)
        kv = h @ self.weight(f"{name}.kv_a_proj_with_mqa").T
        latent = rms_norm(
            kv[..., : c["kv_lora_rank"]], self.w[f"{name}.kv_a_layernorm.weight"], 1e-6
        )
        expanded = (latent @ self.weight(f"{name}.kv_b_proj").T).view(batch, length, heads, -1)
        k_rope = self._turn(kv[..., None, c["kv_lora_rank"] :]).expand(-1, -1, heads, -1)
        k = torch.cat([expanded[..., :nope], k_rope], dim=-1)
        q = torch.cat([q[..., :nope], self._turn(q[..., nope:])], dim=-1)
        if c["indexer_types"][layer] == "full":
            chosen = self._select(h.detach(), q_latent.detach(), layer)
        assert chosen is not None
        self.selected[layer] = chosen
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / (nope + c["qk_rope_head_dim"]) ** 0.5
        probs = scores.masked_fill(~chosen[:, None], float("-inf")).softmax(-1)
        out = torch.einsum("bhqk,bkhd->bqhd", probs, expanded[..., nope:])
        assert out.shape[-1] == value
        return out.flatten(2) @ self.weight(f"{name}.o_proj").T, chosen

    def _select(self, h: Tensor, q_latent: Tensor, layer: int) -> Tensor:
        """bool ``[b, s, s]``: the keys of every query, causal, at most ``index_topk``."""
        c, name = self.c, f"model.layers.{layer}.self_attn.indexer"
        batch, length, _ = h.shape
        heads, dim, rope = c["index_n_heads"], c["index_head_dim"], c["qk_rope_head_dim"]
        q = (q_latent @ self.w[f"{name}.wq_b.weight"].T).view(batch, length, heads, dim)
        k = F.layer_norm(
            h @ self.w[f"{name}.wk.weight"].T,
            (dim,),
            self.w[f"{name}.k_norm.weight"],
            self.w[f"{name}.k_norm.bias"],
            1e-6,
        )[:, :, None]
        q, k = (torch.cat([self._turn(t[..., :rope]), t[..., rope:]], -1) for t in (q, k))
        head = h @ self.w[f"{name}.weights_proj.weight"].T / heads**0.5
        scores = torch.einsum("bqhd,bkd->bqhk", q, k[:, :, 0]).clamp(min=0) / dim**0.5
        scores = torch.einsum("bqh,bqhk->bqk", head, scores)
        legal = torch.ones(length, length, dtype=torch.bool).tril()
        best = scores.masked_fill(~legal, float("-inf")).topk(min(c["index_topk"], length), -1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, True) & legal

    def _turn(self, x: Tensor) -> Tensor:
        """Rotate ``[b, s, heads, d]`` in place: pair (2i, 2i + 1) is one complex number."""
        dim, theta = x.shape[-1], self.c["rope_parameters"]["rope_theta"]
        speed = theta ** -(torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None] * speed
        pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
        turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.view_as_real(turned).flatten(-2)

    def _mlp(self, h: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weight(f"{name}.{p}_proj") for p in ("gate", "up", "down"))
        return (F.silu(h @ gate.T) * (h @ up.T)) @ down.T

    def _experts(self, h: Tensor, layer: int) -> Tensor:
        c, name = self.c, f"model.layers.{layer}.mlp"
        assert c["n_group"] == 1
        flat = h.flatten(0, 1)
        scores = (flat @ self.w[f"{name}.gate.weight"].T).sigmoid()
        biased = scores.detach() + self.w[f"{name}.gate.e_score_correction_bias"]
        picked = biased.topk(c["num_experts_per_tok"], -1).indices
        route = torch.zeros_like(biased, dtype=torch.bool).scatter(-1, picked, True)
        self.routes[layer] = route
        mixture = scores * route
        mixture = c["routed_scaling_factor"] * mixture / mixture.sum(-1, keepdim=True)
        out = torch.zeros_like(flat)
        for expert in range(c["n_routed_experts"]):
            gate, up, down = (
                self.weight(f"{name}.experts.{expert}.{p}_proj", f"{name}.experts.{p}_proj", expert)
                for p in ("gate", "up", "down")
            )
            y = (F.silu(flat @ gate.T) * (flat @ up.T)) @ down.T
            out = out + mixture[:, expert : expert + 1] * y
        return out.view_as(h) + self._mlp(h, f"{name}.shared_experts")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * x / sqrt(mean(x^2) + eps)``."""
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def mean_loss(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Mean cross-entropy of the trained tokens: logits ``[b, s, v]``, labels and mask ``[b, s]``."""
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return (losses * mask.flatten()).sum() / mask.sum()
