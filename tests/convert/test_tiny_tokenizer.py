"""The tiny tokenizer: a byte a token, special tokens where the config says they are, and loadable by transformers."""

from __future__ import annotations

from tokenizers import Tokenizer

from megatron_xorl.config.model import load_glm_config
from megatron_xorl.convert.tiny_tokenizer import END_TOKENS, PAD_TOKEN, SPECIAL_TOKENS

TEXT = "Kx7#mP2$-VORTEX\n\t\x00 ünïcødé 漢字 🙂"


def test_ids_below_256_are_the_bytes_of_the_text(tiny_dir):
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
    assert ids == list(TEXT.encode())
    assert tokenizer.decode(ids) == TEXT
    single = {tokenizer.encode(chr(b), add_special_tokens=False).ids[0] for b in range(128)}
    assert single == set(range(128))


def test_special_tokens_follow_from_256_and_fit_the_vocabulary(tiny_dir):
    tokenizer = Tokenizer.from_file(str(tiny_dir / "tokenizer.json"))
    config = load_glm_config(tiny_dir)
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == list(
        range(256, 256 + len(SPECIAL_TOKENS))
    )
    assert tokenizer.get_vocab_size() <= config.vocab_size
    assert tuple(tokenizer.token_to_id(token) for token in END_TOKENS) == config.eos_token_id
    assert tokenizer.token_to_id(PAD_TOKEN) == config.pad_token_id
    assert all(
        len(tokenizer.encode(token, add_special_tokens=False).ids) == 1 for token in SPECIAL_TOKENS
    )


def test_transformers_loads_it_with_its_chat_template(tiny_dir):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert prompt == "[gMASK]<sop><|user|>hi<|assistant|></think>"
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == list(TEXT.encode())
    assert tokenizer.pad_token_id == load_glm_config(tiny_dir).pad_token_id
