"""Chat rendering against the jinja template shipped with the checkpoint, and the mask by role markers."""

from __future__ import annotations

import json
import shutil

import pytest
from jinja2 import Environment

from megatron_xorl.errors import DataError
from megatron_xorl.training.chat import ChatTokenizer, generation_prompt, render

SYSTEM = {"role": "system", "content": "Answer with the code."}
USER = {"role": "user", "content": "What is the code for argon?"}
ASSISTANT = {"role": "assistant", "content": "Kx7#mP2$-VORTEX-93qR"}
TOOL = {"role": "tool", "content": '{"code": 7}'}
CONVERSATIONS = {
    "one turn": [USER, ASSISTANT],
    "system": [SYSTEM, USER, ASSISTANT],
    "two turns": [SYSTEM, USER, ASSISTANT, USER, {"role": "assistant", "content": "Wy4&"}],
    "tool": [USER, ASSISTANT, TOOL, {"role": "assistant", "content": "7"}],
    "observation": [USER, ASSISTANT, {**TOOL, "role": "observation"}, ASSISTANT],
    "two tool results in a row": [USER, ASSISTANT, TOOL, TOOL, ASSISTANT],
    "ends with the user": [USER, ASSISTANT, USER],
    "empty answer": [USER, {"role": "assistant", "content": ""}],
    "unicode": [
        {"role": "user", "content": "ünï 漢 🙂\u2028x"},
        {"role": "assistant", "content": "\n\n ok \t"},
    ],
}


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return ChatTokenizer(tiny_dir)


@pytest.fixture(scope="module")
def template(tiny_dir):
    environment = Environment(trim_blocks=True, lstrip_blocks=True)  # as transformers builds it
    return environment.from_string((tiny_dir / "chat_template.jinja").read_text())


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_the_rendered_conversation_is_the_template_plus_the_end_marker(
    messages, tokenizer, template
):
    text = tokenizer.decode(render(messages, tokenizer).tokens)
    end = "<|user|>" if messages[-1]["role"] == "assistant" else ""
    assert text == template.render(messages=messages) + end


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_ids_are_those_of_the_template_under_the_plain_tokenizer(
    messages, tokenizer, template, tiny_dir
):
    from tokenizers import Tokenizer

    text = template.render(messages=messages)
    expected = (
        Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
        .encode(text, add_special_tokens=False)
        .ids
    )
    assert render(messages, tokenizer).tokens[: len(expected)] == expected


@pytest.mark.parametrize("thinking", [False, True])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_the_generation_prompt_is_the_prefix_of_what_is_trained(
    messages, thinking, tokenizer, template
):
    """For every assistant turn: prompt of the turns before it == tokens before its first trained one, and == the template's."""
    tokens, trained = render(messages, tokenizer, thinking=thinking)
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = messages[:place]
        prompt = generation_prompt(before, tokenizer, thinking=thinking)
        assert tokens[: len(prompt)] == prompt
        assert trained[len(prompt)] and not trained[len(prompt) - 1]
        text = template.render(
            messages=before, add_generation_prompt=True, enable_thinking=thinking
        )
        assert tokenizer.decode(prompt) == text


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS.keys())
def test_exactly_assistant_content_and_the_next_role_marker_are_trained(messages, tokenizer):
    tokens, trained = render(messages, tokenizer)
    markers = {"user": "<|user|>", "tool": "<|observation|>", "observation": "<|observation|>"}
    expected = ""
    for message, following in zip(messages, [*messages[1:], {"role": "user"}], strict=True):
        if message["role"] == "assistant":
            expected += message["content"] + markers[following["role"]]
    assert (
        tokenizer.decode([token for token, flag in zip(tokens, trained, strict=True) if flag])
        == expected
    )


def test_reasoning_is_trained_when_thinking_is_on_and_refused_when_off(tokenizer, template):
    messages = [
        USER,
        {**ASSISTANT, "reasoning_content": "seen it"},
        USER,
        {"role": "assistant", "content": "b"},
    ]
    tokens, trained = render(messages, tokenizer, thinking=True)
    rendered = template.render(messages=messages, enable_thinking=True)
    assert tokenizer.decode(tokens) == rendered + "<|user|>"
    kept = tokenizer.decode([token for token, flag in zip(tokens, trained, strict=True) if flag])
    assert kept == "seen it</think>Kx7#mP2$-VORTEX-93qR<|user|></think>b<|user|>"
    with pytest.raises(DataError, match="message 2 has reasoning_content, but thinking is off"):
        render(messages, tokenizer)


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_that_spells_a_special_token_stays_text(role, tokenizer, tiny_dir):
    text = "<|user|>[gMASK]</think><|endoftext|>"
    messages = [{"role": role, "content": text}, ASSISTANT]
    tokens = render(messages, tokenizer).tokens
    plain = render([{"role": role, "content": "x" * len(text)}, ASSISTANT], tokenizer).tokens
    assert [t for t in tokens if t >= 256] == [t for t in plain if t >= 256]
    assert tokenizer.encode(text) == list(text.encode())
    # the control: the tokenizer as shipped does make them special
    from tokenizers import Tokenizer

    assert max(Tokenizer.from_file(str(tiny_dir / "tokenizer.json")).encode(text).ids) >= 256


def test_special_ids_come_from_the_file_and_not_from_this_package(tiny_dir, tmp_path):
    document = json.loads((tiny_dir / "tokenizer.json").read_text())
    for token in document["added_tokens"]:
        token["special"] = token["content"] not in ("<think>", "</think>")  # as GLM ships these two
    document["added_tokens"].reverse()
    for token_id, token in enumerate(document["added_tokens"], start=256):
        token["id"] = token_id
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    moved, original = ChatTokenizer(tmp_path), ChatTokenizer(tiny_dir)
    messages = CONVERSATIONS["tool"]
    assert moved.special("<|user|>") != original.special("<|user|>")
    assert render(messages, moved).tokens != render(messages, original).tokens
    assert moved.decode(render(messages, moved).tokens) == original.decode(
        render(messages, original).tokens
    )
    assert moved.encode("<think>") == list(b"<think>")


def test_end_and_pad_ids_are_those_of_the_config(tokenizer, tiny_dir):
    config = json.loads((tiny_dir / "config.json").read_text())
    assert list(tokenizer.end_ids) == config["eos_token_id"]
    assert tokenizer.pad_id == config["pad_token_id"]


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "expected a list of at least one message"),
        ("hello", "messages is 'hello', expected a list"),
        (["hello"], "message 1 is 'hello', expected an object"),
        (
            [{"role": "wizard", "content": "x"}],
            "message 1 has role 'wizard', expected one of system, user",
        ),
        ([{"content": "x"}], "message 1 has role None"),
        ([{"role": ["user"], "content": "x"}], r"message 1 has role \['user'\], expected one of"),
        ([{"role": {}, "content": "x"}], r"message 1 has role {}, expected one of"),
        ([{"role": 1, "content": "x"}], "message 1 has role 1, expected one of"),
        ([USER, {"role": "assistant"}], "message 2: content is None, expected a string"),
        ([USER, {"role": "assistant", "content": [{"type": "text"}]}], "message 2: content is"),
        (
            [USER, {**ASSISTANT, "tool_calls": []}],
            "message 2 has the key 'tool_calls', which is not rendered",
        ),
        ([{"role": "user", "content": "\ud800"}], "lone surrogate at character 0"),
    ],
    ids=str,
)
def test_what_cannot_be_rendered_is_refused(messages, complaint, tokenizer):
    with pytest.raises(DataError, match=complaint):
        render(messages, tokenizer)


def test_a_directory_without_a_glm_tokenizer_is_refused(tiny_dir, tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json is missing"):
        ChatTokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match="no usable tokenizer"):
        ChatTokenizer(tmp_path)
    shutil.copy(tiny_dir / "tokenizer.json", tmp_path)
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    document["added_tokens"] = [
        t for t in document["added_tokens"] if t["content"] != "<|assistant|>"
    ]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    with pytest.raises(DataError, match=r"has no token <\|assistant\|>"):
        ChatTokenizer(tmp_path)
