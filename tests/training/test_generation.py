"""Cached generation against full forwards of the same model: prefill, decoding, unequal prompts, ends, layouts, wrong input."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_xorl.config.adapter import AdapterConfig
from megatron_xorl.errors import ConfigError, DataError, LayoutError
from tests.training.harness import randomise, use_one_process
from tests.worlds import run_world

ADAPTER = {"rank": 4, "alpha": 8}
LIMIT = 5e-6
"""Other matrix shapes round otherwise: of the size that transformers' own cached decoding differs from its full forward."""

LENGTHS = (61, 33, 12, 1)  # above, at about, below index_topk (32), and a single token


def _ids(batch: int, length: int, seed: int = 21) -> Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def bare(tiny_dir: Path) -> Any:
    """The base alone, whose logits are of size 4: random adapters amplify rounding."""
    use_one_process()
    from megatron_xorl.training.model import load_model

    return load_model(tiny_dir).eval()


@pytest.fixture(scope="module")
def model(tiny_dir: Path) -> Any:
    """With random adapters everywhere; no end token, so that generation goes on."""
    use_one_process()
    from megatron_xorl.training.model import load_model

    loaded = load_model(tiny_dir, AdapterConfig(**ADAPTER))
    randomise(loaded)
    loaded.glm_config = replace(loaded.glm_config, eos_token_id=(loaded.vocab_size - 1,))
    return loaded.eval()


def _full(model: Any, row: Tensor) -> Tensor:
    """Full-forward logits ``[s, vocab]`` of one row."""
    from megatron_xorl.training.model import forward_logits

    with torch.no_grad():
        return forward_logits(model, row.unsqueeze(0))[0]


@torch.no_grad()
def _decoded(model: Any, rows: Tensor, lengths: tuple[int, ...], steps: int) -> Tensor:
    """Logits ``[steps + 1, b, vocab]``: after a prefill of ``lengths`` tokens of ``rows``, then after each next token."""
    from megatron_xorl.training.generation import cached_logits, new_cache

    cache = new_cache(rows.shape[1])
    ends = torch.tensor(lengths)
    width = max(lengths)
    places = torch.arange(width).expand(len(rows), width)
    found = [cached_logits(model, rows[:, :width], places, cache, ends - 1)]
    for step in range(steps):
        where = (ends + step).unsqueeze(1)
        found.append(
            cached_logits(model, rows.gather(1, where), where, cache, torch.zeros_like(ends))
        )
    return torch.stack(found)


def _worst(model: Any, found: Tensor, rows: Tensor, lengths: tuple[int, ...]) -> float:
    """Largest difference from the full forward of each row; where it is within the limit, the best tokens are the same."""
    worst = 0.0
    for index, length in enumerate(lengths):
        steps = found.shape[0]
        expected = _full(model, rows[index, : length + steps - 1])[length - 1 :]
        worst = max(worst, (found[:, index] - expected).abs().max().item())
        if worst <= LIMIT:
            assert torch.equal(found[:, index].argmax(-1), expected.argmax(-1))
    return worst


def test_prefill_and_decoding_of_unequal_prompts_equal_full_forwards(bare: Any) -> None:
    # 30 steps: the shorter prompts cross index_topk while they are decoded.
    rows = _ids(len(LENGTHS), max(LENGTHS) + 31)
    worst = _worst(bare, _decoded(bare, rows, LENGTHS, 30), rows, LENGTHS)
    print(f"prefill and 30 decoded tokens against full forwards: max-abs {worst:.1e}")
    assert worst <= LIMIT


def test_the_end_of_a_long_decoding_still_equals_the_full_forward(bare: Any) -> None:
    rows = _ids(1, 130)
    assert _worst(bare, _decoded(bare, rows, (3,), 120), rows, (3,)) <= LIMIT


def _the_future_in_sight(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.visible import VisibleKeys

    patch.setattr(
        VisibleKeys,
        "legal",
        lambda self, queries, row, begin, end: torch.ones(
            self.last[queries].shape[0], end - begin, dtype=torch.bool
        ),
    )


def _stale_index_keys(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.cache import LatentCache

    real = LatentCache.store

    def store(self: Any, layer: int, kind: str, value: Tensor) -> Tensor:
        if kind == "index_key" and value.shape[0] == 1:
            value = torch.zeros_like(value)
        return real(self, layer, kind, value)

    patch.setattr(LatentCache, "store", store)


def _positions_from_zero(patch: pytest.MonkeyPatch) -> None:
    from megatron_xorl.layers.visible import VisibleKeys

    patch.setattr(VisibleKeys, "positions", property(lambda self: self.last - self.last[:1]))


@pytest.mark.parametrize("fault", [_the_future_in_sight, _stale_index_keys, _positions_from_zero])
def test_a_fault_of_the_cache_is_seen_by_the_same_comparison(
    bare: Any, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    rows = _ids(len(LENGTHS), max(LENGTHS) + 31)
    with monkeypatch.context() as patch:
        fault(patch)
        found = _decoded(bare, rows, LENGTHS, 30)
    assert _worst(bare, found, rows, LENGTHS) > 100 * LIMIT


def test_generation_is_the_greedy_continuation_of_the_logits(model: Any) -> None:
    from megatron_xorl.training.generation import generate

    rows = _ids(len(LENGTHS), max(LENGTHS))
    out = generate(model, rows, max_new_tokens=6, prompt_lengths=torch.tensor(LENGTHS))
    assert out.shape == (len(LENGTHS), max(LENGTHS) + 6)
    pad = model.glm_config.pad_token_id
    for row, prompt, length in zip(out, rows, LENGTHS, strict=True):
        assert torch.equal(row[:length], prompt[:length])
        assert (row[length + 6 :] == pad).all()
        for end in range(length, length + 6):
            assert _full(model, row[:end])[-1].argmax() == row[end]


def test_each_row_ends_with_any_of_the_end_tokens_and_the_others_go_on(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.training.generation import generate

    rows, lengths = _ids(len(LENGTHS), max(LENGTHS)), torch.tensor(LENGTHS)
    free = generate(model, rows, max_new_tokens=6, prompt_lengths=lengths)
    new = [row[n : n + 6].tolist() for row, n in zip(free, LENGTHS, strict=True)]
    ends = (new[0][1], new[2][3])
    monkeypatch.setattr(model, "glm_config", replace(model.glm_config, eos_token_id=ends))
    cut = generate(model, rows, max_new_tokens=6, prompt_lengths=lengths)
    stops = []
    for row, length, free_row in zip(cut.tolist(), LENGTHS, new, strict=True):
        stop = min([free_row.index(end) + 1 for end in ends if end in free_row], default=6)
        stops.append(stop)
        assert row[length : length + stop] == free_row[:stop]
        assert set(row[length + stop :]) <= {model.glm_config.pad_token_id}
    assert stops[0] <= 2 and stops[2] <= 4 and max(stops) > min(stops)


def test_a_config_without_a_pad_token_pads_with_its_first_end_token(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron_xorl.training.generation import generate

    monkeypatch.setattr(model, "glm_config", replace(model.glm_config, pad_token_id=None))
    out = generate(model, _ids(2, 8), max_new_tokens=2, prompt_lengths=torch.tensor([8, 3]))
    assert out[1, 5:].tolist() == [model.glm_config.eos_token_id[0]] * 5


def test_generation_leaves_the_model_in_the_mode_it_was_in(model: Any) -> None:
    from megatron_xorl.training.generation import generate

    for mode in (True, False):
        model.train(mode)
        generate(model, _ids(1, 36), max_new_tokens=1)
        assert model.training is mode


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "floats": ({"input_ids": torch.zeros(1, 4)}, DataError, r"torch.float32 \[1, 4\].*int64"),
    "one dimension": ({"input_ids": torch.zeros(4, dtype=torch.int64)}, DataError, r"\[4\]"),
    "nothing": ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, DataError, r"\[1, 0\]"),
    "a token beyond the vocabulary": ({"input_ids": torch.tensor([[1, 99999]])}, DataError, "1 to 99999"),
    "a negative token": ({"input_ids": torch.tensor([[1, -100]])}, DataError, "-100 to 1"),
    "a list": ({"input_ids": [[1, 2]]}, DataError, "is a list"),
    "no new token": ({"max_new_tokens": 0}, DataError, "max_new_tokens is 0"),
    "half a token": ({"max_new_tokens": 1.5}, DataError, "max_new_tokens is 1.5"),
    "true": ({"max_new_tokens": True}, DataError, "max_new_tokens is True"),
    "broken lengths": ({"prompt_lengths": torch.tensor([3.5, 4.0])}, DataError, r"\[3.5, 4.0\]"),
    "a list of lengths": ({"prompt_lengths": [4, 4]}, DataError, "expected a tensor"),
    "rows too long": ({"input_ids": torch.zeros(1, 5000, dtype=torch.int64)}, ConfigError, "5000 tokens exceed"),
    "too long": ({"max_new_tokens": 10**7}, ConfigError, "max_position_embeddings"),
    "an empty prompt": ({"prompt_lengths": torch.tensor([4, 0])}, DataError, r"\[4, 0\].*1 to 4"),
    "a prompt longer than its row": ({"prompt_lengths": torch.tensor([5, 1])}, DataError, r"\[5, 1\]"),
    "lengths of another batch": ({"prompt_lengths": torch.tensor([4])}, DataError, "2 whole numbers"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_prompts_are_refused(model: Any, case: str) -> None:
    from megatron_xorl.training.generation import generate

    given, error, message = WRONG[case]
    with pytest.raises(error, match=message):
        generate(**({"model": model, "input_ids": _ids(2, 4), "max_new_tokens": 2} | given))


def _on_ranks(directory: str, layout: dict[str, int], prompts: list[Tensor]) -> tuple[Tensor, Any]:
    """What this rank generates from the prompts, and what it says to a prompt of its own."""
    import torch.distributed as dist

    from megatron_xorl.parallel.cpu import use_cpu
    from megatron_xorl.parallel.groups import initialize
    from megatron_xorl.training.generation import generate
    from megatron_xorl.training.model import load_model

    use_cpu()
    initialize(**layout)
    model = load_model(directory, AdapterConfig(**ADAPTER))
    randomise(model)
    model.glm_config = replace(model.glm_config, eos_token_id=(model.vocab_size - 1,))
    rows = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    out = generate(model, rows, max_new_tokens=9, prompt_lengths=lengths)
    said = []
    for wrong in (rows + dist.get_rank(), rows - 1000 * dist.get_rank()):
        try:
            generate(model, wrong, max_new_tokens=2)
        except (LayoutError, DataError) as error:
            said.append(str(error))
    return out, said


@pytest.mark.dist
@pytest.mark.parametrize("layout", [{"tp": 2}, {"ep": 2}], ids=str)
def test_two_ranks_generate_what_one_process_does(
    tiny_dir: Path, model: Any, layout: dict[str, int]
) -> None:
    from megatron_xorl.training.generation import generate

    prompts = [row[:n] for row, n in zip(_ids(2, 41), (41, 18), strict=True)]
    rows = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    expected = generate(model, rows, max_new_tokens=9, prompt_lengths=torch.tensor([41, 18]))
    for rank, (out, said) in enumerate(run_world(_on_ranks, 2, str(tiny_dir), layout, prompts)):
        assert torch.equal(out, expected)
        # Nobody waits: what one rank cannot read, the other refuses too.
        assert "different prompts" in said[0] and "input_ids holds tokens -" in said[1]
        assert ("rank 1 refused its prompts" in said[1]) == (rank == 0)
