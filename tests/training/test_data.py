"""Samples from chat JSONL: shifted labels, padding, order, and every named refusal."""

from __future__ import annotations

import json
import logging

import pytest
import torch

from megatron_xorl.errors import DataError
from megatron_xorl.training.chat import ChatTokenizer, generation_prompt, render
from megatron_xorl.training.data import IGNORED, ChatDataset, TrainingSamples, check_batches


def chat(question: str, answer: str) -> dict[str, object]:
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


@pytest.fixture(scope="module")
def tokenizer(tiny_dir):
    return ChatTokenizer(tiny_dir)


@pytest.fixture
def write(tmp_path):
    def _write(*lines: object):
        path = tmp_path / "train.jsonl"
        path.write_text(
            "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        )
        return path

    return _write


def test_labels_are_the_next_trained_tokens_and_nothing_else(write, tokenizer):
    record = chat("code?", "Kx7#")
    dataset = ChatDataset(write(record), tokenizer, seq_length=64)
    sample = dataset[0]
    tokens, trained = render(record["messages"], tokenizer)
    assert {key: tuple(value.shape) for key, value in sample.items()} == dict.fromkeys(
        ("tokens", "labels", "loss_mask", "position_ids"), (64,)
    )
    for place in range(64):
        inside = place < len(tokens) - 1
        assert sample["tokens"][place] == (tokens[place] if inside else tokenizer.pad_id)
        target = tokens[place + 1] if inside and trained[place + 1] else IGNORED
        assert sample["labels"][place] == target
        assert sample["loss_mask"][place] == (target != IGNORED)
    assert torch.equal(sample["position_ids"], torch.arange(64))
    kept = sample["labels"][sample["labels"] != IGNORED].tolist()
    assert tokenizer.decode(kept) == "Kx7#<|user|>"


def test_the_end_marker_is_trained_although_an_end_id_can_equal_the_pad_id(write, tokenizer):
    """Masking by ``ids != pad`` would be wrong where pad is one of the end ids: here the mask comes from the roles alone."""
    assert tokenizer.pad_id in tokenizer.end_ids
    sample = ChatDataset(write(chat("q", "a")), tokenizer, seq_length=32)[0]
    assert int(sample["loss_mask"].sum()) == 2
    assert int(sample["labels"][sample["labels"] != IGNORED][-1]) == tokenizer.special("<|user|>")


def test_inputs_up_to_the_first_label_are_the_generation_prompt(write, tokenizer):
    record = chat("What is the code?", "abc")
    sample = ChatDataset(write(record), tokenizer, seq_length=64)[0]
    first = int((sample["labels"] != IGNORED).nonzero()[0])
    assert sample["tokens"][: first + 1].tolist() == generation_prompt(
        record["messages"][:1], tokenizer
    )


def test_samples_come_in_file_order_and_blank_lines_and_line_separators_do_not_count(
    write, tokenizer
):
    path = write(
        chat("0", "zero"),
        "",
        json.dumps(chat("1", "o\u2028ne"), ensure_ascii=False),
        "  ",
        chat("2", "two"),
        "",
    )
    dataset = ChatDataset(path, tokenizer, seq_length=64)
    answers = [
        tokenizer.decode(s["labels"][s["labels"] != IGNORED].tolist())
        for s in (dataset[i] for i in range(3))
    ]
    assert len(dataset) == 3 and answers == ["zero<|user|>", "o\u2028ne<|user|>", "two<|user|>"]


def test_a_run_is_the_file_again_and_again_and_the_repeat_is_logged_once(write, tokenizer, caplog):
    dataset = ChatDataset(
        write(chat("0", "a"), chat("1", "b"), chat("2", "c")), tokenizer, seq_length=64
    )
    with caplog.at_level(logging.INFO):
        samples = TrainingSamples(dataset, steps=5, global_batch=4, repeat=True)
        order = [
            next(j for j in range(3) if torch.equal(samples[i]["tokens"], dataset[j]["tokens"]))
            for i in range(20)
        ]
    assert len(samples) == 20 and order == [i % 3 for i in range(20)]
    # A sample that comes again is another sample of the run: a dropout has another mask for it.
    assert [int(samples[i]["sample"]) for i in range(20)] == list(range(20))
    assert len(caplog.records) == 1 and "3 samples are repeated in order" in caplog.text
    with pytest.raises(IndexError):
        samples[20]


def test_a_file_of_one_batch_or_more_needs_no_repeat_and_logs_nothing(write, tokenizer, caplog):
    dataset = ChatDataset(write(chat("0", "a"), chat("1", "b")), tokenizer, seq_length=64)
    with caplog.at_level(logging.INFO):
        assert len(TrainingSamples(dataset, steps=3, global_batch=2)) == 6
    assert not caplog.records


def test_a_file_smaller_than_a_global_batch_is_refused_with_the_way_out(write, tokenizer):
    dataset = ChatDataset(write(chat("0", "a")), tokenizer, seq_length=64)
    with pytest.raises(
        DataError, match=r"1 samples, fewer than one global batch of 2; .*data\.repeat: true"
    ):
        TrainingSamples(dataset, steps=1, global_batch=2)


SYSTEM = {"role": "system", "content": "s"}
REVERSED = [{"role": role, "content": "x"} for role in ("assistant", "user", "assistant")]
GOOD = json.dumps(chat("q", "a"))


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([""], r"train\.jsonl is empty"),
        (["\n \n"], r"train\.jsonl is empty"),
        ([GOOD, "", "{oops"], r"train\.jsonl line 3 is not JSON"),
        ([GOOD, "[1]"], r"line 2 has no messages"),
        ([GOOD, '{"prompt": "x"}'], r"line 2 has no messages"),
        ([GOOD, '{"messages": []}'], r"line 2: messages is \[\], expected a list"),
        ([GOOD, {"messages": [{"role": "user", "content": "x"}]}], r"line 2 has no assistant turn"),
        ([GOOD, {"messages": [{"role": "x", "content": "x"}]}], r"line 2: message 1 has role 'x'"),
        ([GOOD, '{"messages": [{"role": [], "content": ""}]}'], r"line 2: message 1 has role \[\]"),
        ([GOOD, {"messages": REVERSED}], r"line 2 begins with an assistant turn"),
        ([GOOD, {"messages": [SYSTEM, *REVERSED]}], r"line 2 begins with an assistant turn"),
        ([GOOD, '{"messages": ' + "[" * 200_000], r"line 2 is not JSON"),
        ([{**chat("q", "a"), "tools": [1]}], r"line 1 has tools, which are not rendered"),
        (
            [GOOD, chat("q" * 50, "a")],
            r"line 2 needs 56 positions, seq_length is 40; .*data\.truncate: true",
        ),
    ],
    ids=lambda value: str(value)[:80],
)
def test_each_fault_is_named_with_its_line(lines, complaint, write, tokenizer):
    with pytest.raises(DataError, match=complaint):
        ChatDataset(write(*lines), tokenizer, seq_length=40)


def test_a_byte_order_mark_is_skipped_and_a_system_turn_may_come_first(write, tokenizer):
    path = write({"messages": [SYSTEM, *chat("q", "a")["messages"]]})
    plain = ChatDataset(path, tokenizer, seq_length=32)[0]
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    marked = ChatDataset(path, tokenizer, seq_length=32)[0]
    assert torch.equal(marked["tokens"], plain["tokens"])


def test_a_sample_may_fill_the_sequence_and_not_pass_it(write, tokenizer):
    record = chat("q" * 10, "a")
    length = len(render(record["messages"], tokenizer).tokens) - 1
    sample = ChatDataset(write(record), tokenizer, seq_length=length)[0]
    assert int(sample["labels"][-1]) == tokenizer.special("<|user|>")
    with pytest.raises(DataError, match=f"needs {length} positions"):
        ChatDataset(write(record), tokenizer, seq_length=length - 1)


def test_truncation_cuts_the_end_and_refuses_what_has_no_label_left(write, tokenizer):
    record = chat("q", "abcdefgh")
    prompt = len(generation_prompt(record["messages"][:1], tokenizer))
    sample = ChatDataset(write(record), tokenizer, seq_length=prompt + 2, truncate=True)[0]
    assert tokenizer.decode(sample["labels"][sample["labels"] != IGNORED].tolist()) == "abc"
    shortest = ChatDataset(write(record), tokenizer, seq_length=prompt, truncate=True)[0]
    assert int(shortest["loss_mask"].sum()) == 1
    with pytest.raises(
        DataError, match=f"line 1 has no label left after truncation to seq_length {prompt - 1}"
    ):
        ChatDataset(write(record), tokenizer, seq_length=prompt - 1, truncate=True)


def test_a_missing_or_binary_file_is_refused(tmp_path, tokenizer):
    with pytest.raises(DataError, match=r"nothing\.jsonl does not exist"):
        ChatDataset(tmp_path / "nothing.jsonl", tokenizer, seq_length=8)
    (tmp_path / "latin.jsonl").write_bytes(b'{"messages": "\xe9"}')
    with pytest.raises(DataError, match="is not UTF-8"):
        ChatDataset(tmp_path / "latin.jsonl", tokenizer, seq_length=8)


def test_a_global_batch_must_be_a_multiple_of_micro_times_data_parallel():
    assert check_batches(micro=2, global_batch=8, data_parallel=2) == 2
    with pytest.raises(
        DataError,
        match=r"global batch 6 is not a multiple of micro batch 2 x data parallel 2 = 4; use 8",
    ):
        check_batches(micro=2, global_batch=6, data_parallel=2)
    with pytest.raises(DataError, match="global batch 0"):
        check_batches(micro=1, global_batch=0, data_parallel=1)
