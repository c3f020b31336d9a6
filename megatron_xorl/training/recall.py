"""Does the adapter say what it was trained to say? Greedy generation, judged by exact match.

For every sample of the run's training data the conversation up to the last assistant turn is
rendered as in training, the model continues it greedily until an end-of-turn token, and the text is
compared with the assistant's.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

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
    questions = [_question(pair, tokenizer) for pair in read_pairs(Path(run.data.train))]
    for batch in _batches(questions, model.glm_config.max_position_embeddings):
        for question, got in zip(batch, _answers(model, tokenizer, batch), strict=True):
            expected = question.expected
            pairs.append(
                {
                    "prompt": question.text,
                    "expected": expected,
                    "got": got,
                    "exact": got == expected,
                }
            )
    return {"pairs": pairs, "exact": sum(pair["exact"] for pair in pairs), "total": len(pairs)}


class _Question(NamedTuple):
    text: str
    prompt: list[int]
    expected: str
    budget: int
    """New tokens: a little more than the expected answer has."""


def _question(pair: tuple[Sequence[Message], str], tokenizer: ChatTokenizer) -> _Question:
    messages, expected = pair
    prompt = generation_prompt(messages, tokenizer)
    budget = len(tokenizer.encode(expected)) + SURPLUS
    return _Question(messages[-1]["content"], prompt, expected, budget)


def _batches(questions: Iterable[_Question], most: int) -> Iterator[list[_Question]]:
    """Up to :data:`BATCH` questions, in order, of which the longest prompt and the largest budget fit into ``most`` tokens."""
    batch: list[_Question] = []
    for question in questions:
        room = most - len(question.prompt)
        question = question._replace(budget=min(question.budget, room))
        together = [*batch, question]
        width = max(len(one.prompt) for one in together)
        if len(batch) == BATCH or width + max(one.budget for one in together) > most:
            yield batch
            batch = []
        batch.append(question)
    if batch:
        yield batch


def _answers(model: nn.Module, tokenizer: ChatTokenizer, batch: Sequence[_Question]) -> list[str]:
    """What the model says to each question; up to its budget, where it does not end."""
    prompts = [torch.tensor(question.prompt) for question in batch]
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    rows = generate(
        model,
        pad_sequence(prompts, batch_first=True),
        max(question.budget for question in batch),
        prompt_lengths=lengths,
    )
    texts = []
    for row, length, question in zip(rows.tolist(), lengths.tolist(), batch, strict=True):
        said = row[length : length + question.budget]
        ends = [place for place, token in enumerate(said) if token in model.glm_config.eos_token_id]
        texts.append(tokenizer.decode(said[: ends[0]] if ends else said))
    return texts
