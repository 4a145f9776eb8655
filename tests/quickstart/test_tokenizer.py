"""The quickstart's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.quickstart.task import held_out_sums, training_sums
from grpo_async.quickstart.tokenizer import MAX_VOCABULARY, TAGS, train_tokenizer
from grpo_async.quickstart.warmup import thinking


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(f"system\nuser\n{item.prompt}\nassistant\n{thinking(item)}\n" for item in training_sums())


def test_every_digit_is_a_token_of_its_own_however_often_digits_stand_together() -> None:
    tokenizer = train_tokenizer(["12 + 12 = 24\n"] * 100)
    for text in ("1234567890", " 12", "<think>10 - 25 = -15</think>-15"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if any(c.isdigit() for c in piece) and len(piece) > 1] == []


@pytest.mark.parametrize(
    "text", ["<think>3 + 4 = 7\n7 - 2 = 5</think>5", "  two  spaces\n\n", "äöü 漢字 🙂", "a , b ."]
)
def test_decoding_gives_back_the_exact_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_tags_are_single_tokens_that_survive_skipping_special_tokens(tokenizer: Any) -> None:
    for tag in TAGS:
        assert len(tokenizer.encode(tag)) == 1
    ids = tokenizer.encode("<think>1</think>1<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>1</think>1"


def test_the_template_is_chatml_and_ends_where_the_assistant_begins(tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "1 + 1 ="}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\n1 + 1 =<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_the_vocabulary_is_small_and_a_whole_sample_fits_the_limits_of_the_config(tokenizer: Any) -> None:
    assert len(tokenizer) <= MAX_VOCABULARY
    longest = max(len(tokenizer.encode(thinking(item))) for item in held_out_sums()) + 1  # and the end of the turn
    assert longest <= 40  # of max_completion_tokens: 48
