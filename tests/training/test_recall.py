"""Recall: which pairs are asked, how an answer is judged, and that the adapter makes the difference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.worlds import run_world

pytestmark = pytest.mark.dist


def chat(*turns: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[n % 2], "content": t} for n, t in enumerate(turns)]}


def pairs_of(path: Path) -> list[Any]:
    from megatron_xorl.training.recall import read_pairs

    return read_pairs(path)


def test_the_last_assistant_turn_is_asked_for_and_what_precedes_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [chat("a?", "b"), chat("c?", "d", "e?", "f"), chat("g?", "h", "thanks")]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    (pairs,) = run_world(pairs_of, 1, path, process_group=False)
    asked = [([m["content"] for m in messages], expected) for messages, expected in pairs]
    assert asked == [(["a?"], "b"), (["c?", "d", "e?"], "f"), (["g?"], "h")]


def complaint(path: Path) -> str:
    from megatron_xorl.errors import DataError

    with pytest.raises(DataError) as caught:
        pairs_of(path)
    return str(caught.value)


def test_lines_are_those_that_training_reads_and_a_fault_is_named_with_its_line(
    tmp_path: Path,
) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(chat("a\u2028?", "b\x85"), ensure_ascii=False), encoding="utf-8-sig")
    (((messages, expected),),) = run_world(pairs_of, 1, path, process_group=False)
    assert (messages[0]["content"], expected) == ("a\u2028?", "b\x85")
    reversed_roles = {"messages": chat("q", "a")["messages"][::-1]}
    path.write_text(f"{json.dumps(chat('q', 'a'))}\n{json.dumps(reversed_roles)}")
    (message,) = run_world(complaint, 1, path, process_group=False)
    assert message.startswith(f"{path} line 2 begins with an assistant turn")


def judge(model: Path, data: Path, replies: list[str]) -> dict[str, Any]:
    """Recall with a model whose replies are given, token for token."""
    import torch

    import megatron_xorl.training.recall as product
    from megatron_xorl.config.run import RunConfig
    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.chat import ChatTokenizer, generation_prompt

    use_cpu()
    initialize()
    tokenizer = ChatTokenizer(model)
    prompts: list[list[int]] = []

    def reply(
        _: Any, input_ids: torch.Tensor, max_new_tokens: int, *, prompt_lengths: torch.Tensor
    ) -> torch.Tensor:
        rows = []
        for row, length in zip(input_ids, prompt_lengths.tolist(), strict=True):
            text, end, _ = replies[len(prompts)].partition("<|user|>")
            prompts.append(row[:length].tolist())
            ids = tokenizer.encode(text) + ([tokenizer.special("<|user|>")] if end else [])
            # What follows an end token is padding; an answer without one runs on to the limit.
            rest = tokenizer.encode("!" * max_new_tokens) if not end else [tokenizer.pad_id] * 99
            rows.append(torch.tensor([*prompts[-1], *ids, *rest][: length + max_new_tokens]))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    product.generate = reply
    run = RunConfig(
        model={"path": str(model), "dtype": "fp32"},
        adapter={"rank": 2, "alpha": 4},
        data={"train": str(data), "seq_length": 64},
        optimizer={"lr": 1e-3},
        schedule={"steps": 1},
        batch={"global": 1},
        output="out",
    )
    report = product.recall(run, None)
    expected = [generation_prompt(messages, tokenizer) for messages, _ in product.read_pairs(data)]
    return report | {"prompted as trained": prompts == expected}


def test_only_the_exact_answer_that_ends_counts(tiny_dir: Path, tmp_path: Path) -> None:
    replies = ["Kx7<|user|>", "Kx7", "Kx7 <|user|>", "kx7<|user|>", "<|user|>", "Kx7!<|user|>"]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(chat(f"code {n}?", "Kx7")) for n in range(len(replies))))
    (report,) = run_world(judge, 1, tiny_dir, path, replies)
    assert [pair["exact"] for pair in report["pairs"]] == [True, *[False] * 5]
    assert (report["exact"], report["total"]) == (1, 6)
    got = [pair["got"] for pair in report["pairs"]]
    assert got[0] == "Kx7" and got[2:] == ["Kx7 ", "kx7", "", "Kx7!"]
    assert set(got[1].removeprefix("Kx7")) == {"!"}  # it runs on until it is cut
    assert report["pairs"][0] == {
        "prompt": "code 0?",
        "expected": "Kx7",
        "got": "Kx7",
        "exact": True,
    }
    assert report["prompted as trained"]


def test_more_pairs_than_one_batch_are_answered_in_order(tiny_dir: Path, tmp_path: Path) -> None:
    replies = [f"Kx{n}<|user|>" for n in range(18)]
    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps(chat(f"code {n}?", f"Kx{n}")) for n in range(18)))
    (report,) = run_world(judge, 1, tiny_dir, path, replies)
    assert (report["exact"], report["total"]) == (18, 18)
    assert [pair["prompt"] for pair in report["pairs"]] == [f"code {n}?" for n in range(18)]
