"""One checkpoint loaded here and in transformers, and what both gave and chose on one batch.

The one idea: every comparison of the matrix reads :class:`Seen`, in which our sequence-first tensors and
transformers' batch-first ones have the same form: logits ``[b, s, vocab]``, selections as bool ``[b, s, s]``,
routes as mixture weights and bool sets ``[b * s, experts]``, and what both were chosen by.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode

from megatron_xorl.config.model import GlmConfig, load_glm_config
from tests.oracle import hf_oracle, hf_oracle_bf16
from tests.training.harness import index_sets, use_one_process


@dataclass
class Seen:
    """Outcome of one forward."""

    logits: Tensor
    selected: dict[int, Tensor] = field(default_factory=dict)
    """By full layer: bool ``[b, s, s]``, the keys of each query."""
    mixtures: dict[int, Tensor] = field(default_factory=dict)
    """By sparse layer: ``[b * s, experts]``, zero where an expert was not chosen."""
    routes: dict[int, Tensor] = field(default_factory=dict)
    """By sparse layer: bool ``[b * s, experts]``."""
    index_scores: dict[int, Tensor] = field(default_factory=dict)
    """By full layer: fp32 ``[b, s, s]``; NaN where ours scored nothing, since the query takes all it may see."""
    route_scores: dict[int, Tensor] = field(default_factory=dict)
    """By sparse layer: ``[b * s, experts]``, what is chosen by: the sigmoid and the bias."""
    strangers: int = 0
    """Layers that used another selection than that of their source (ours only)."""


class Subject:
    """A directory, our model of it and transformers', loaded when first asked for."""

    def __init__(self, directory: Path) -> None:
        use_one_process()
        self.directory = directory
        self.glm: GlmConfig = load_glm_config(directory)

    @cached_property
    def model(self) -> Any:
        """Ours, fp32."""
        return self.loaded(torch.float32)

    @cached_property
    def half(self) -> Any:
        """Ours, bf16."""
        return self.loaded(torch.bfloat16)

    def loaded(self, dtype: torch.dtype) -> Any:
        """Ours, loaded anew."""
        from megatron_xorl.training.model import load_model

        return load_model(self.directory, dtype=dtype)

    @cached_property
    def oracle(self) -> Any:
        """transformers, fp32 eager."""
        return hf_oracle(self.directory)

    @cached_property
    def oracle_half(self) -> Any:
        """transformers, bf16."""
        return hf_oracle_bf16(self.oracle)

    @cached_property
    def exact(self) -> Any:
        """transformers' code in fp64 throughout."""
        return hf_oracle(self.directory, wide=True)

    def with_topk(self, topk: int, folder: Path) -> Subject:
        """The same weights under another ``index_topk``."""
        folder.mkdir(parents=True, exist_ok=True)
        raw = json.loads((self.directory / "config.json").read_text()) | {"index_topk": topk}
        (folder / "config.json").write_text(json.dumps(raw))
        for file in self.directory.glob("model*"):
            (folder / file.name).symlink_to(file)
        return Subject(folder)

    def parts(self, kind: type) -> list[tuple[int, Any]]:
        """``(layer, module)`` of every module of a kind in our fp32 model."""
        return parts(self.model, kind)

    def ids(self, batch: int, length: int, seed: int = 3) -> Tensor:
        """Random tokens of this vocabulary."""
        draw = torch.Generator().manual_seed(1000 * length + 10 * batch + seed)
        return torch.randint(0, self.glm.vocab_size, (batch, length), generator=draw)


def parts(model: Any, kind: type) -> list[tuple[int, Any]]:
    """``(layer, module)`` of every module of ``kind`` in the decoder, layers counted from zero."""
    return [
        (layer.layer_number - 1, part)
        for layer in model.decoder.layers
        for part in layer.modules()
        if isinstance(part, kind)
    ]


@contextmanager
def hooked(hooks: list[Any]) -> Iterator[None]:
    """Remove hooks at the end."""
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _LastTopk(TorchFunctionMode):
    """Keeps what the last ``tensor.topk`` chose from."""

    scores: Tensor

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Pass everything on."""
        del types
        if func is Tensor.topk:
            self.scores = args[0]
        return func(*args, **(kwargs or {}))


@contextmanager
def _index_scores(model: Any, ids: Tensor) -> Iterator[dict[int, Tensor]]:
    """Our index scores by layer, as :class:`Seen` has them, of a forward on unpacked ``ids``."""
    from megatron_xorl.layers import indexer

    batch, length = ids.shape
    kept: dict[int, Tensor] = {}
    place = [0, 0]  # layer, batch row
    real = indexer._scores

    def enter(layer: int) -> None:
        place[:] = layer, 0
        kept[layer] = torch.full((batch, length, length), float("nan"))

    def keep(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
        # Rows come in order and chunks are causal: the last of a chunk's queries is the last key that it is scored with.
        scores, (layer, row), end = real(query, key, weights), place, key.shape[0]
        kept[layer][row, end - len(query) : end, :end] = scores
        place[1] += end == length
        return scores

    hooks = [
        part.register_forward_pre_hook(lambda *_, n=n: enter(n))
        for n, part in parts(model, indexer.Indexer)
    ]
    with hooked(hooks), patch.object(indexer, "_scores", keep):
        yield kept


def run_ours(model: Any, ids: Tensor) -> Seen:
    """Our forward, watched."""
    from megatron_xorl.layers.attention import SparseLatentAttention
    from megatron_xorl.layers.indexer import Indexer
    from megatron_xorl.layers.router import GlmRouter
    from megatron_xorl.training.model import forward_logits

    made: dict[int, Tensor] = {}
    used: dict[int, Tensor] = {}
    given: dict[int, Tensor | None] = {}
    routed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def keep_routes(router: Any, given: Any, out: Any, n: int) -> None:
        logits = linear(given[0].flatten(0, 1).float(), router.weight.float())
        routed[n] = (*out, logits.sigmoid() + router.expert_bias)

    hooks = [
        part.register_forward_hook(lambda _, __, out, n=n: made.update({n: out}))
        for n, part in parts(model, Indexer)
    ] + [
        part.register_forward_hook(partial(keep_routes, n=n)) for n, part in parts(model, GlmRouter)
    ]
    for n, part in parts(model, SparseLatentAttention):
        hooks.append(
            part.register_forward_pre_hook(
                lambda _, __, named, n=n: given.update({n: named["selected"]}), with_kwargs=True
            )
        )
        hooks.append(part.register_forward_hook(lambda _, __, out, n=n: used.update({n: out[1]})))
    with torch.no_grad(), hooked(hooks), _index_scores(model, ids) as index_scores:
        logits = forward_logits(model, ids)
    glm = model.glm_config
    strangers = [
        layer
        for layer in range(glm.num_hidden_layers)
        if used[layer] is not made.get(glm.indexer_source(layer))
        or (layer in glm.shared_indexer_layers and given[layer] is not used[layer])
    ]
    seen = Seen(logits, {n: index_sets(out) for n, out in made.items()}, strangers=len(strangers))
    seen.index_scores = index_scores
    for n, told in routed.items():
        seen.mixtures[n], seen.routes[n], seen.route_scores[n] = (
            _batch_first(t, ids) for t in told
        )
    return seen


def _batch_first(routes: Tensor, ids: Tensor) -> Tensor:
    """Tokens reach our router in ``[s, b]`` order."""
    batch, length = ids.shape
    return routes.view(length, batch, -1).transpose(0, 1).flatten(0, 1)


def run_theirs(oracle: Any, ids: Tensor) -> Seen:
    """transformers' forward, watched."""
    made: dict[int, Tensor] = {}
    routed: dict[int, tuple[Tensor, Tensor, Tensor]] = {}
    scored: dict[int, Tensor] = {}
    hooks = []
    topk = _LastTopk()

    def keep_keys(_: Any, __: Any, out: Tensor, n: int) -> None:
        made[n], scored[n] = out.long(), topk.scores

    def keep_routes(gate: Any, _: Any, out: Any, n: int) -> None:
        routed[n] = (*out[1:], out[0].sigmoid() + gate.e_score_correction_bias)

    for n, layer in enumerate(oracle.model.layers):
        if layer.self_attn.indexer is not None:
            hook = layer.self_attn.indexer.register_forward_hook(partial(keep_keys, n=n))
            hooks.append(hook)
        if hasattr(layer.mlp, "gate"):
            hooks.append(layer.mlp.gate.register_forward_hook(partial(keep_routes, n=n)))
    with torch.no_grad(), hooked(hooks), topk:
        seen = Seen(oracle(input_ids=ids).logits, index_scores=scored)
    batch, length = ids.shape
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    for n, chosen in made.items():
        empty = torch.zeros(batch, length, length, dtype=torch.bool)
        # Padding picks of queries with fewer legal keys than top-k are masked again by transformers itself.
        seen.selected[n] = empty.scatter(-1, chosen, True) & causal
    for n, (weights, chosen, seen.route_scores[n]) in routed.items():
        empty = torch.zeros(batch * length, oracle.config.n_routed_experts)
        seen.mixtures[n] = empty.to(weights.dtype).scatter(1, chosen, weights)
        seen.routes[n] = empty.bool().scatter(1, chosen, True)
    return seen


def run_dense(oracle: Any, ids: Tensor) -> Tensor:
    """Logits of transformers as plain causal latent attention: every indexer's answer is replaced by all keys."""
    everything = torch.arange(ids.shape[1], dtype=torch.int32).expand(*ids.shape, -1)
    hooks = [
        layer.self_attn.indexer.register_forward_hook(lambda *_: everything)
        for layer in oracle.model.layers
        if layer.self_attn.indexer is not None
    ]
    with torch.no_grad(), hooked(hooks):
        return oracle(input_ids=ids).logits


def embedding_gradient_ours(model: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """Gradient ``[b, s, h]`` of the mean cross-entropy at the embedding's output."""
    from megatron_xorl.training.model import forward_logits

    kept: list[Tensor] = []

    def leaf(_: Any, __: Any, out: Tensor) -> Tensor:
        kept.append(out.detach().requires_grad_())
        return kept[-1]

    with hooked([model.embedding.register_forward_hook(leaf)]):
        logits = forward_logits(model, ids)
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    assert kept[0].grad is not None
    return kept[0].grad.transpose(0, 1)


def embedding_gradient_theirs(oracle: Any, ids: Tensor, labels: Tensor) -> Tensor:
    """The same in transformers."""
    start = oracle.model.embed_tokens(ids).detach().requires_grad_()
    oracle.zero_grad(set_to_none=True)
    logits = oracle(inputs_embeds=start).logits
    cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    assert start.grad is not None
    return start.grad
