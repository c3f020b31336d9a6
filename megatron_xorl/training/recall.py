"""Does the adapter say what it was trained to say? Greedy generation, judged by exact match.

For every sample of the run's training data the conversation up to the last assistant turn is
rendered as in training, the model continues it greedily until an end-of-turn token, and the text is
compared with the assistant's.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from megatron_xorl.config.run import RunConfig
from megatron_xorl.training.adapter_io import load_adapter
from megatron_xorl.training.chat import ChatTokenizer, Message, generation_prompt
from megatron_xorl.training.data import ChatDataset, read_samples
from megatron_xorl.training.generation import generate
from megatron_xorl.training.model import load_model

__all__ = ["read_pairs", "recall"]

BATCH = 16
"""Prompts that are continued together."""

SURPLUS = 8
"""Tokens beyond the expected answer's: an answer that runs on is seen to."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def read_pairs(path: Path) -> list[tuple[Sequence[Message], str]]:
    """``(messages before the last assistant turn, its text)`` of every sample of a chat JSONL file.

    Raises:
        DataError: a line that training refuses too.
    """
    pairs = []
    for _, messages in read_samples(path):
        last = max(
            index for index, message in enumerate(messages) if message["role"] == "assistant"
        )
        pairs.append((messages[:last], messages[last]["content"]))
    return pairs


def _says_nothing_new(record: logging.LogRecord) -> bool:
    """Drop Megatron's advice to its own developers: it would stand above the one line that a refusal is."""
    return "GPTModel IS DEPRECATED" not in record.getMessage()


def recall(run: RunConfig, adapter: str | Path | None) -> dict[str, Any]:
    """Generate for every pair of the run's data, in this process.

    Args:
        run: gives base, dtype and data.
        adapter: exported adapter directory; None asks the bare base.

    Returns:
        ``{"pairs": [{prompt, expected, got, exact}], "exact", "total"}``.

    Raises:
        DataError: the data could not be trained on either.
        ConfigError, WeightsError, AdapterError: what is wrong with the base or the adapter.
    """
    tokenizer = ChatTokenizer(run.model.path)
    ChatDataset(
        run.data.train, tokenizer, seq_length=run.data.seq_length, truncate=run.data.truncate
    )
    logging.getLogger("megatron.core.models.gpt.gpt_model").addFilter(_says_nothing_new)
    model = load_model(run.model.path, dtype=DTYPES[run.model.dtype])
    if adapter is not None:
        load_adapter(model, adapter)
    pairs = []
    for batch in itertools.batched(read_pairs(Path(run.data.train)), BATCH):
        for (messages, expected), got in zip(batch, _answers(model, tokenizer, batch), strict=True):
            prompt = messages[-1]["content"]
            pairs.append(
                {"prompt": prompt, "expected": expected, "got": got, "exact": got == expected}
            )
    return {"pairs": pairs, "exact": sum(pair["exact"] for pair in pairs), "total": len(pairs)}


def _answers(
    model: nn.Module, tokenizer: ChatTokenizer, batch: Sequence[tuple[Sequence[Message], str]]
) -> list[str]:
    """What the model says to each prompt of ``batch``; a little longer than expected, where it does not end."""
    prompts = [torch.tensor(generation_prompt(messages, tokenizer)) for messages, _ in batch]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    budgets = [len(tokenizer.encode(expected)) + SURPLUS for _, expected in batch]
    rows = generate(
        model, pad_sequence(prompts, batch_first=True), max(budgets), prompt_lengths=lengths
    )
    texts = []
    for row, length, budget in zip(rows.tolist(), lengths.tolist(), budgets, strict=True):
        said = row[length : length + budget]
        ends = [place for place, token in enumerate(said) if token in model.glm_config.eos_token_id]
        texts.append(tokenizer.decode(said[: ends[0]] if ends else said))
    return texts
