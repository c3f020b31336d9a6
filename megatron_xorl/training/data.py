"""Chat JSONL to fixed-length samples.

One JSON object a line with ``messages``. A sample of ``n`` tokens becomes ``n - 1`` inputs and
their ``n - 1`` shifted labels, padded to ``seq_length``; positions that are not trained have the
label -100 and loss weight 0. The whole file is read and rendered when the dataset is built, so that
a fault in line 9,000 is named before the first step and not after an hour.

Samples come in file order. :class:`TrainingSamples` is the view a run trains on: sample ``i`` of
the run is sample ``i mod N`` of the file, so a position in the data is one number and a resumed run
continues at it. Its number ``i`` comes with it: a dropout's mask is a function of it (``layers.token_keys``).

Refused, by file and line: see :func:`read_samples`, :class:`ChatDataset` and :func:`check_batches`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from megatron_xorl.errors import DataError
from megatron_xorl.training.chat import ChatTokenizer, Message, check_messages, render

__all__ = ["IGNORED", "ChatDataset", "TrainingSamples", "check_batches", "read_samples"]

log = logging.getLogger(__name__)

IGNORED = -100
"""Label of a position that is not trained, as in torch's cross entropy."""


class _Sample(NamedTuple):
    tokens: Tensor  # int32 [n]
    trained: Tensor  # bool [n]


class ChatDataset(Dataset[dict[str, Tensor]]):
    """The samples of one chat JSONL file.

    Items are ``{tokens, labels, position_ids}`` int64 and ``loss_mask`` float32, each ``[seq_length]``.

    Args:
        path: of the JSONL file.
        tokenizer: of the model.
        seq_length: inputs a sample; padded to it.
        truncate: cut longer samples at the end instead of refusing them.
        thinking: see :func:`megatron_xorl.training.chat.render`.

    Raises:
        DataError: what :func:`read_samples` refuses; the file is empty, or a sample is longer than ``seq_length`` or has no
            label left after truncation.
    """

    def __init__(
        self,
        path: Path | str,
        tokenizer: ChatTokenizer,
        *,
        seq_length: int,
        truncate: bool = False,
        thinking: bool = False,
    ) -> None:
        if seq_length < 1:
            raise DataError(f"seq_length is {seq_length}, expected at least 1")
        self.path, self.seq_length, self.pad_id = Path(path), seq_length, tokenizer.pad_id
        self._samples = []
        for where, messages in read_samples(self.path, thinking=thinking):
            self._samples.append(
                _sample(where, messages, tokenizer, seq_length, truncate, thinking)
            )
        if not self._samples:
            raise DataError(f"{self.path} is empty; expected one JSON object with messages a line")

    def __len__(self) -> int:
        """Number of samples in the file."""
        return len(self._samples)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample ``index``, padded."""
        sample = self._samples[index]
        used = sample.tokens.numel() - 1
        tokens = torch.full((self.seq_length,), self.pad_id, dtype=torch.int64)
        labels = torch.full((self.seq_length,), IGNORED, dtype=torch.int64)
        tokens[:used] = sample.tokens[:-1]
        labels[:used] = torch.where(sample.trained[1:], sample.tokens[1:].long(), IGNORED)
        return {
            "tokens": tokens,
            "labels": labels,
            "loss_mask": (labels != IGNORED).float(),
            "position_ids": torch.arange(self.seq_length),
        }


class TrainingSamples(Dataset[dict[str, Tensor]]):
    """The samples of a whole run: ``steps * global_batch`` of them, the file in order, again and again.

    Args:
        dataset: of the file.
        steps: optimizer steps of the run.
        global_batch: samples a step.
        repeat: allow a file that is smaller than one global batch.

    Raises:
        DataError: the file is smaller than one global batch and ``repeat`` is off.
    """

    def __init__(
        self, dataset: ChatDataset, *, steps: int, global_batch: int, repeat: bool = False
    ) -> None:
        size = len(dataset)
        if size < global_batch:
            if not repeat:
                raise DataError(
                    f"{dataset.path} has {size} samples, fewer than one global batch of {global_batch}; "
                    "add data, lower batch.global, or set data.repeat: true to repeat it in order"
                )
            log.info(
                "%s: %d samples are repeated in order to fill global batches of %d",
                dataset.path,
                size,
                global_batch,
            )
        self.dataset, self._length = dataset, steps * global_batch

    def __len__(self) -> int:
        """Samples of the run."""
        return self._length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Return sample ``index`` of the run, which is ``index mod N`` of the file, and its number ``sample``, int64."""
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        return self.dataset[index % len(self.dataset)] | {"sample": torch.tensor(index)}


def check_batches(*, micro: int, global_batch: int, data_parallel: int) -> int:
    """Return the number of microbatches a step.

    Raises:
        DataError: the global batch is not a multiple of ``micro * data_parallel``.
    """
    share = micro * data_parallel
    if min(micro, global_batch, data_parallel) < 1 or global_batch % share:
        raise DataError(
            f"global batch {global_batch} is not a multiple of micro batch {micro} x data parallel {data_parallel} = {share}; "
            f"use {max(1, round(global_batch / max(share, 1))) * share} or change batch.micro"
        )
    return global_batch // share


def read_samples(path: Path, *, thinking: bool = False) -> Iterator[tuple[str, Sequence[Message]]]:
    """Yield ``("<path> line <n>", messages)`` of every sample of a chat JSONL file, checked.

    A byte order mark at the beginning of the file is skipped.

    Raises:
        DataError: the file is missing or not UTF-8; a line is no JSON, has no messages, a message that is refused, no
            assistant turn, or an assistant turn before anything was asked.
    """
    for number, line in _lines(path):
        where = f"{path} line {number}"
        yield where, _messages(where, line, thinking)


def _lines(path: Path) -> list[tuple[int, str]]:
    if not path.is_file():
        raise DataError(f"{path} does not exist; data.train is the path of a chat JSONL file")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); save it as UTF-8") from error
    except OSError as error:
        raise DataError(
            f"{path} cannot be read ({error.strerror}); expected a chat JSONL file"
        ) from error
    # split at newlines alone: str.splitlines would also cut at U+2028 inside a JSON string
    return [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]


def _messages(where: str, line: str, thinking: bool) -> Sequence[Message]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is not JSON ({error}); expected an object with messages"
        ) from error
    if not isinstance(record, dict) or "messages" not in record:
        raise DataError(f"{where} has no messages; expected an object with a list of them")
    if record.get("tools"):
        raise DataError(
            f"{where} has tools, which are not rendered; write them into the system message"
        )
    messages: Sequence[Message] = record["messages"]
    try:
        check_messages(messages, thinking=thinking)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    roles = [message["role"] for message in messages]
    if "assistant" not in roles:
        raise DataError(
            f"{where} has no assistant turn, so nothing to train; add one or remove the line"
        )
    if next(role for role in roles if role != "system") == "assistant":
        raise DataError(
            f"{where} begins with an assistant turn, expected a user turn before it; add what was asked or remove the turn"
        )
    return messages


def _sample(
    where: str,
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    seq_length: int,
    truncate: bool,
    thinking: bool,
) -> _Sample:
    try:
        tokens, trained = render(messages, tokenizer, thinking=thinking)
    except DataError as error:  # text that the tokenizer refuses
        raise DataError(f"{where}: {error}") from error
    if len(tokens) - 1 > seq_length:
        if not truncate:
            raise DataError(
                f"{where} needs {len(tokens) - 1} positions, seq_length is {seq_length}; raise it, shorten the sample, or set "
                "data.truncate: true to cut it at the end"
            )
        tokens, trained = tokens[: seq_length + 1], trained[: seq_length + 1]
        if not any(trained[1:]):
            raise DataError(
                f"{where} has no label left after truncation to seq_length {seq_length}; "
                "raise it or shorten the prompt"
            )
    return _Sample(torch.tensor(tokens, dtype=torch.int32), torch.tensor(trained))
