"""Chat messages to GLM token ids, with a mask of what is trained.

    [gMASK]<sop><|system|>...<|user|>...<|assistant|></think>...<|user|>

The form of GLM-4.7 and GLM-5: nothing stands between a role marker and its text. With thinking off an
assistant turn opens with a lone ``</think>``, with thinking on with ``<think>``. Tool results stand in
``<tool_response>``, several in a row under one ``<|observation|>``.

GLM has no end-of-turn token: a turn ends where the next role marker stands, so the marker after an
assistant turn is trained, and a conversation that ends with the assistant gets ``<|user|>`` as its
end. Everything else that is trained is what the assistant wrote. What precedes an assistant turn is
exactly :func:`generation_prompt`, token for token: the assistant's text is tokenised apart from the
prompt, so no merge can cross the seam. Thinking is off by default (an empty ``<think></think>`` in
the prompt).

Special ids are looked up by name in the model's tokenizer.json. Text never becomes a special token,
whoever wrote it: content is encoded by the same tokenizer with its added tokens taken out.

Refused: unknown roles and message keys (tool calls among them), content that is no string,
reasoning where thinking is off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

from megatron_xorl.errors import DataError, nearest

__all__ = ["ChatTokenizer", "Rendered", "check_messages", "generation_prompt", "render"]

ROLE_MARKERS = {
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "tool": "<|observation|>",
    "observation": "<|observation|>",
}
_PREFIX = ("[gMASK]", "<sop>")
_OBSERVATION = "<|observation|>"
_TOOL_RESPONSE = ("<tool_response>", "</tool_response>")
_KEYS = ("role", "content", "reasoning_content")
_END_NAMES = ("<|endoftext|>", "<|user|>", "<|observation|>")

Message = Mapping[str, Any]


class Rendered(NamedTuple):
    """Token ids of a conversation and, for each, whether the model is trained to produce it."""

    tokens: list[int]
    trained: list[bool]


class ChatTokenizer:
    """The tokenizer of a model directory, with text and special tokens kept apart.

    Args:
        model_dir: holds tokenizer.json.

    Raises:
        DataError: there is no tokenizer.json, it is damaged, or it lacks GLM's role markers.
    """

    def __init__(self, model_dir: Path | str) -> None:
        path = Path(model_dir) / "tokenizer.json"
        if not path.is_file():
            raise DataError(
                f"{path} is missing; chat data needs the model's tokenizer beside its weights"
            )
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            self._special = {
                token["content"]: int(token["id"]) for token in document["added_tokens"]
            }
            self._full = Tokenizer.from_str(json.dumps(document))
            self._text = Tokenizer.from_str(
                json.dumps(document | {"added_tokens": [], "post_processor": None})
            )
        except Exception as error:  # tokenizers raises bare Exception
            raise DataError(f"{path} is no usable tokenizer ({error}); fetch it again") from error
        wanted = (
            *_PREFIX,
            *_TOOL_RESPONSE,
            "<think>",
            "</think>",
            *_END_NAMES,
            *ROLE_MARKERS.values(),
        )
        if missing := sorted({name for name in wanted if name not in self._special}):
            raise DataError(
                f"{path} has no token {', '.join(missing)}; expected the tokenizer of a GLM-4.7 or GLM-5 model"
            )

    def special(self, name: str) -> int:
        """Return the id of a special token.

        Raises:
            DataError: the tokenizer has no such token.
        """
        if name not in self._special:
            raise DataError(
                f"no special token {name!r}; nearest: {', '.join(nearest(name, self._special)) or 'none'}"
            )
        return self._special[name]

    @property
    def pad_id(self) -> int:
        """Id that fills a sample up to its length: GLM pads with ``<|endoftext|>``."""
        return self._special["<|endoftext|>"]

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Ids that end a generated turn."""
        return tuple(self._special[name] for name in _END_NAMES)

    def encode(self, text: str) -> list[int]:
        """Return the ids of plain text; what spells a special token stays text.

        Raises:
            DataError: the text has half of a surrogate pair (JSON can write one), which is no character.
        """
        try:
            text.encode()  # the tokenizers library would call it "not a str"
        except UnicodeEncodeError as error:
            raise DataError(
                f"the text has a lone surrogate at character {error.start}; write the whole character"
            ) from error
        return self._text.encode(text, add_special_tokens=False).ids if text else []

    def decode(self, ids: Sequence[int], *, special: bool = True) -> str:
        """Return the text of ``ids``, special tokens spelt out unless ``special`` is False."""
        return self._full.decode(list(ids), skip_special_tokens=not special)


def render(
    messages: Sequence[Message], tokenizer: ChatTokenizer, *, thinking: bool = False
) -> Rendered:
    """Render a whole conversation for training.

    Args:
        messages: ``role`` (system, user, assistant, tool or observation), ``content`` and, with ``thinking``,
            ``reasoning_content`` of assistant turns.
        tokenizer: of the model.
        thinking: train on reasoning too; each assistant turn then starts at ``<think>``.

    Raises:
        DataError: no messages, or a message that is refused (see the module).
    """
    tokens = [tokenizer.special(name) for name in _PREFIX]
    trained = [False] * len(tokens)
    after_assistant, before = False, ""
    for message in _checked(messages, thinking):
        marker = ROLE_MARKERS[message["role"]]
        if marker != before or marker != _OBSERVATION:
            tokens.append(tokenizer.special(marker))
            trained.append(after_assistant)
        after_assistant, before = message["role"] == "assistant", marker
        head, body = _turn(message, tokenizer, thinking)
        tokens += head + body
        trained += [False] * len(head) + [True] * len(body)
    if after_assistant:
        tokens.append(tokenizer.special("<|user|>"))
        trained.append(True)
    return Rendered(tokens, trained)


def generation_prompt(
    messages: Sequence[Message], tokenizer: ChatTokenizer, *, thinking: bool = False
) -> list[int]:
    """Return the ids after which the model writes the assistant's next turn.

    Raises:
        DataError: no messages, or a message that is refused.
    """
    tokens = render(messages, tokenizer, thinking=thinking).tokens
    if messages[-1]["role"] == "assistant":
        tokens = tokens[:-1]
    return [*tokens, tokenizer.special("<|assistant|>"), *_assistant_head(tokenizer, thinking)]


def check_messages(messages: Sequence[Message], *, thinking: bool = False) -> None:
    """Check a conversation as :func:`render` does, without a tokenizer.

    Raises:
        DataError: no messages, or a message that is refused.
    """
    for _ in _checked(messages, thinking):
        pass


def _turn(
    message: Message, tokenizer: ChatTokenizer, thinking: bool
) -> tuple[list[int], list[int]]:
    """Ids after the role marker: those that are context, and those that the assistant wrote."""
    text = tokenizer.encode(message["content"])
    if ROLE_MARKERS[message["role"]] == _OBSERVATION:
        opened, closed = (tokenizer.special(name) for name in _TOOL_RESPONSE)
        return [opened, *text, closed], []
    if message["role"] != "assistant":
        return text, []
    if thinking:
        reasoning = tokenizer.encode(message.get("reasoning_content") or "")
        text = [*reasoning, tokenizer.special("</think>"), *text]
    return _assistant_head(tokenizer, thinking), text


def _assistant_head(tokenizer: ChatTokenizer, thinking: bool) -> list[int]:
    return [tokenizer.special("<think>" if thinking else "</think>")]


def _checked(messages: Sequence[Message], thinking: bool) -> Iterator[Message]:
    if not isinstance(messages, list | tuple) or not messages:
        raise DataError(
            f"messages is {_shown(messages)}, expected a list of at least one message with role and content"
        )
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, Mapping):
            raise DataError(
                f"message {number} is {_shown(message)}, expected an object with role and content"
            )
        if unknown := sorted(str(key) for key in message if key not in _KEYS):
            raise DataError(
                f"message {number} has the key {unknown[0]!r}, which is not rendered; expected {', '.join(_KEYS)}"
            )
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLE_MARKERS:
            raise DataError(
                f"message {number} has role {_shown(role)}, expected one of {', '.join(ROLE_MARKERS)}"
            )
        for key in ("content", "reasoning_content"):
            if not isinstance(message.get(key, "" if key == "reasoning_content" else None), str):
                raise DataError(
                    f"message {number}: {key} is {_shown(message.get(key))}, expected a string"
                )
        if message.get("reasoning_content") and not (thinking and message["role"] == "assistant"):
            raise DataError(
                f"message {number} has reasoning_content, but thinking is off or the role is not assistant; "
                "remove it"
            )
        yield message


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
