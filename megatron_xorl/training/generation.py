"""Greedy generation with a cache: the prompt once, then one token at a time.

One idea: the training forward is the generation forward. The same model runs with a ``layers.cache.LatentCache`` as Megatron's
``inference_context``; logits of prefill and decoding are those of the full forward up to the rounding of other matrix shapes. A
token stands in the cache slot of its position, so prompts of different lengths share a batch, padded at the end. It is made for
judging adapters (``megatron-xorl recall``) and for tests, not for serving.

Refused: a pipeline of several stages, context parallelism, ranks that ask for different prompts, a length beyond
``max_position_embeddings``.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor, nn

from megatron_xorl.errors import ConfigError, DataError, LayoutError, MegatronXorlError
from megatron_xorl.layers.cache import LatentCache
from megatron_xorl.training.model import check_token_ids

__all__ = ["cached_logits", "generate", "new_cache"]


@torch.no_grad()
def generate(
    model: nn.Module,
    input_ids: Tensor,
    max_new_tokens: int = 32,
    *,
    prompt_lengths: Tensor | None = None,
) -> Tensor:
    """Continue every prompt greedily until one of the config's ``eos_token_id``, or ``max_new_tokens``.

    Every rank of a distributed run passes the same prompts and gets the same answer.

    Args:
        model: from :func:`~megatron_xorl.training.model.load_model`.
        input_ids: int64 ``[b, s]``; prompts shorter than s are padded at the end with any token.
        max_new_tokens: at most this many for each prompt.
        prompt_lengths: int64 ``[b]``, tokens of each prompt; None: all s.

    Returns:
        int64 ``[b, longest]``: each row is its prompt, then its new tokens, the end token included when it was produced, then
        the config's ``pad_token_id`` (its first end token if it has none).

    Raises:
        DataError: ``input_ids`` or ``prompt_lengths`` are not prompts of this model.
        ConfigError: the result could be longer than ``max_position_embeddings``.
        LayoutError: the pipeline has several stages, rows are cut by context parallelism, or ranks passed different prompts.
    """
    glm = model.glm_config
    lengths = _checked(model, input_ids, max_new_tokens, prompt_lengths)
    batch, width = input_ids.shape
    pad = glm.eos_token_id[0] if glm.pad_token_id is None else glm.pad_token_id
    result = input_ids.new_full((batch, width + max_new_tokens), pad)
    result[:, :width] = torch.where(_places(input_ids) < lengths.unsqueeze(1), input_ids, pad)
    rows = torch.arange(batch, device=input_ids.device)
    ends, going = lengths.clone(), lengths > 0
    stop = torch.tensor(glm.eos_token_id, device=input_ids.device)
    was_training = model.training
    model.eval()
    try:
        cache = new_cache(width + max_new_tokens)
        tokens, positions, last = input_ids, _places(input_ids), lengths - 1
        for _ in range(max_new_tokens):
            chosen = cached_logits(model, tokens, positions, cache, last).argmax(-1)
            if dist.get_world_size() > 1:
                dist.broadcast(chosen, 0)  # ranks agree to the bit on what comes next
            result[rows[going], ends[going]] = chosen[going]
            ends += going
            going &= ~torch.isin(chosen, stop)
            if not going.any():
                break
            # A row that has ended repeats its last place: nobody looks at it any more.
            tokens, positions, last = (
                chosen.unsqueeze(1),
                (ends - 1).unsqueeze(1),
                torch.zeros_like(last),
            )
    finally:
        model.train(was_training)
    return result[:, : int(ends.max())]


def new_cache(tokens: int) -> LatentCache:
    """An empty cache for rows of up to ``tokens`` tokens under the active layout."""
    return LatentCache(tokens + parallel_state.get_tensor_model_parallel_world_size())


def cached_logits(
    model: nn.Module, tokens: Tensor, positions: Tensor, cache: LatentCache, last: Tensor
) -> Tensor:
    """Run ``tokens`` after what ``cache`` holds, and return the logits of one place of every row.

    Args:
        model: a model with one pipeline stage, in eval mode.
        tokens: int64 ``[b, s]``.
        positions: int64 ``[b, s]``, where they stand in their rows; rising along s.
        cache: takes their keys.
        last: int64 ``[b]``, the place of ``tokens`` whose logits are wanted.

    Returns:
        fp32 ``[b, vocab]``.
    """
    # Sequence parallelism cuts the tokens evenly: fillers follow, in slots that no real token sees and later ones overwrite.
    fill = -tokens.shape[1] % parallel_state.get_tensor_model_parallel_world_size()
    tokens = torch.cat([tokens, tokens[:, -1:].expand(-1, fill)], dim=1)
    after = torch.arange(1, fill + 1, device=tokens.device)
    positions = torch.cat([positions, positions[:, -1:] + after], dim=1)
    cache.feed(positions.t().contiguous())
    logits: Tensor = model(
        tokens,
        positions,
        None,
        inference_context=cache,
        output_processor=_logits_of_places,
        output_processor_context=last,
    )
    return logits[:, : model.glm_config.vocab_size].float()


def _logits_of_places(
    *, hidden_states: Tensor, output_layer: nn.Module, context: Tensor, **_megatron: Any
) -> Tensor:
    """``[b, vocab]``: the head runs on one token of every row alone."""
    if parallel_state.get_tensor_model_parallel_world_size() > 1:
        hidden_states = gather_from_sequence_parallel_region(hidden_states)
    picked = hidden_states[context, torch.arange(context.shape[0], device=context.device)]
    # Under sequence parallelism the head gathers the ranks' parts: every rank hands in the same row and takes back the first.
    logits, _ = output_layer(picked.unsqueeze(0), runtime_gather_output=True)
    result: Tensor = logits[0]
    return result


def _places(input_ids: Tensor) -> Tensor:
    return torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)


def _checked(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, lengths: Tensor | None
) -> Tensor:
    """Prompt lengths ``[b]`` of prompts that can be continued, the same on every rank.

    Ranks that went different ways would wait for each other forever, in the experts' exchange or here: what one rank refuses,
    all refuse.
    """
    problem: MegatronXorlError | None = None
    asked = ""
    try:
        lengths = _prompt_lengths(model, input_ids, max_new_tokens, lengths)
        asked = str((input_ids.tolist(), lengths.tolist(), max_new_tokens))
    except MegatronXorlError as error:
        problem = error
    if dist.get_world_size() > 1:
        mine = (hashlib.sha256(asked.encode()).digest(), None if problem is None else str(problem))
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, mine)
        said = [(rank, text) for rank, (_, text) in enumerate(found) if text is not None]
        if problem is None and said:
            raise DataError(f"rank {said[0][0]} refused its prompts: {said[0][1]}")
        if problem is None and len({digest for digest, _ in found}) > 1:
            raise LayoutError(
                "ranks passed different prompts to generate; pass the same prompts on every rank, or generate in one process each"
            )
    if problem is not None:
        raise problem
    assert lengths is not None
    return lengths


def _prompt_lengths(
    model: nn.Module, input_ids: Tensor, max_new_tokens: int, lengths: Tensor | None
) -> Tensor:
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    if stages > 1:
        raise LayoutError(
            f"generation runs the whole model on every rank, found {stages} pipeline stages; use pp=1"
        )
    parts = parallel_state.get_context_parallel_world_size()
    if parts > 1:
        raise LayoutError(
            f"generation keeps the keys of whole rows, found context parallel size {parts}; use cp=1, "
            "where an adapter that was trained at any cp loads"
        )
    check_token_ids(model, input_ids)
    if (
        not isinstance(max_new_tokens, int)
        or isinstance(max_new_tokens, bool)
        or max_new_tokens < 1
    ):
        raise DataError(
            f"max_new_tokens is {max_new_tokens!r}, expected a whole number of at least 1"
        )
    (batch, width), most = input_ids.shape, model.glm_config.max_position_embeddings
    if width + max_new_tokens > most:
        raise ConfigError(
            f"{width} tokens and {max_new_tokens} new ones exceed max_position_embeddings ({most}); "
            "shorten the prompt or lower max_new_tokens"
        )
    if lengths is None:
        return torch.full((batch,), width, device=input_ids.device)
    whole = isinstance(lengths, Tensor) and lengths.dtype in (torch.int32, torch.int64)
    if (
        not whole
        or lengths.shape != (batch,)
        or int(lengths.min()) < 1
        or int(lengths.max()) > width
    ):
        found = lengths.tolist() if isinstance(lengths, Tensor) else lengths
        raise DataError(
            f"prompt_lengths is {found}, expected a tensor of {batch} whole numbers from 1 to {width}"
        )
    return lengths.to(input_ids.device, torch.int64)
