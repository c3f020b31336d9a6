"""The tokenizer of the tiny checkpoint: one token a byte, then GLM's special tokens.

Ids 0..255 are the bytes themselves, so that any text round-trips and a password costs one token a
character; the special tokens follow from 256 under GLM's names. The chat template is our own
wording of GLM's turn structure; ``training.chat`` renders the same text without jinja and a test
holds the two together. A turn has no end token: the next role marker ends it.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

__all__ = [
    "CHAT_TEMPLATE",
    "END_TOKENS",
    "PAD_TOKEN",
    "SPECIAL_TOKENS",
    "build_tokenizer",
    "special_ids",
    "write_tokenizer",
]

FIRST_SPECIAL = 256

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|system|>",
    "<|user|>",
    "<|observation|>",
    "<|assistant|>",
    "[gMASK]",
    "<sop>",
    "<think>",
    "</think>",
    "[MASK]",
    "[sMASK]",
    "<eop>",
    "<|begin_of_image|>",
    "<|end_of_image|>",
    "<|begin_of_video|>",
    "<|end_of_video|>",
    "<|begin_of_audio|>",
    "<|end_of_audio|>",
    "<|begin_of_transcription|>",
    "<|end_of_transcription|>",
    "<|code_prefix|>",
    "<|code_middle|>",
    "<|code_suffix|>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "/nothink",
    "<|begin_of_box|>",
    "<|end_of_box|>",
    "<|image|>",
    "<|video|>",
)
"""Names of the special tokens of the GLM-4.5/5 tokenizers; the ids 256, 257, ... are this checkpoint's own."""

END_TOKENS = ("<|endoftext|>", "<|user|>", "<|observation|>")
"""What ends generation, as in GLM's ``eos_token_id`` list: end of text, or the marker of whoever speaks next."""

PAD_TOKEN = "<|endoftext|>"

CHAT_TEMPLATE = """\
[gMASK]<sop>
{%- for message in messages -%}
{%- if message.role == "assistant" -%}
{%- if enable_thinking is defined and enable_thinking -%}
{{ "<|assistant|><think>" + (message.reasoning_content or "") + "</think>" + message.content }}
{%- else -%}
{{ "<|assistant|></think>" + message.content }}
{%- endif -%}
{%- elif message.role == "tool" or message.role == "observation" -%}
{%- if loop.first or messages[loop.index0 - 1].role not in ("tool", "observation") -%}
{{ "<|observation|>" }}
{%- endif -%}
{{ "<tool_response>" + message.content + "</tool_response>" }}
{%- elif message.role == "system" or message.role == "user" -%}
{{ "<|" + message.role + "|>" + message.content }}
{%- else -%}
{{ raise_exception("unknown role " + message.role) }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{ "<|assistant|>" + ("<think>" if enable_thinking is defined and enable_thinking else "</think>") }}
{%- endif -%}
"""


def build_tokenizer() -> Tokenizer:
    """Return the byte-level tokenizer with GLM's special tokens added."""
    vocabulary = {char: byte for byte, char in enumerate(_byte_alphabet())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS]
    )
    return tokenizer


def write_tokenizer(out: Path) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja into ``out``."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(out / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": PAD_TOKEN,
        "pad_token": PAD_TOKEN,
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "extra_special_tokens": list(SPECIAL_TOKENS),
    }
    (out / "tokenizer_config.json").write_text(
        json.dumps(settings, indent=2) + "\n", encoding="utf-8"
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")


def special_ids() -> dict[str, int]:
    """Return the id of each special token of this tokenizer."""
    return {token: FIRST_SPECIAL + offset for offset, token in enumerate(SPECIAL_TOKENS)}


def _byte_alphabet() -> list[str]:
    """What the byte-level pre-tokenizer puts for each byte: itself if printable Latin-1, else U+0100 and on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]
