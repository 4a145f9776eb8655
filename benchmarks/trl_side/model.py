"""The model and prompts of both sides: a Qwen3 with random weights, the quickstart's tokenizer, sums, and
Qwen3's chat template (TRL refuses templates that it does not know).

Random weights, because what is measured is speed: nearly every completion runs to its limit on both sides, however long they
train.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

NUM_PROMPTS = 512


SHAPES = {
    "0.3m": {"hidden_size": 96, "num_hidden_layers": 3, "head_dim": 32, "intermediate_size": 256},
    "6m": {"hidden_size": 256, "num_hidden_layers": 8, "head_dim": 64, "intermediate_size": 768},
}
"""Qwen3 of 0.3 (the quickstart's) and 6.4 million parameters; 4 heads, 2 of keys and values."""


def make_model(folder: Path, *, shape: str, seed: int, chat_template: str) -> None:
    """Write model and tokenizer to `folder`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from grpo_async.quickstart.model import train_tokenizer

    chance = random.Random(seed)
    texts = [f"user\n{_message(chance)}\nassistant\n" for _ in range(512)]  # the roles, too, become tokens
    tokenizer = train_tokenizer(texts)
    tokenizer.chat_template = chat_template
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer), num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048,
        tie_word_embeddings=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, bos_token_id=None,
        **SHAPES[shape],
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_prompts(path: Path, *, seed: int) -> None:
    """NUM_PROMPTS different sums as JSON lines of messages."""
    chance = random.Random(seed)
    messages: dict[str, None] = {}
    while len(messages) < NUM_PROMPTS:
        messages[_message(chance)] = None
    lines = [json.dumps({"prompt": [{"role": "user", "content": text}]}) for text in messages]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _message(chance: random.Random) -> str:
    """ "27 + 3 - 81 = ?", for one."""
    terms = " ".join(f"{chance.choice('+-')} {chance.randrange(100)}" for _ in range(3))
    return f"{chance.randrange(100)} {terms} = ?"


def main(arguments: list[str]) -> int:
    """SHAPE MODEL_FOLDER PROMPTS_FILE SEED CHAT_TEMPLATE_FILE."""
    shape, seed = arguments[0], int(arguments[3])
    folder, prompts, template = Path(arguments[1]), Path(arguments[2]), Path(arguments[4])
    make_model(folder, shape=shape, seed=seed, chat_template=template.read_text(encoding="utf-8"))
    write_prompts(prompts, seed=seed)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
