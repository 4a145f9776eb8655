"""A random Qwen3 with a byte-level BPE tokenizer and ChatML template, small enough to build in a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build_tiny_model(folder: Path, *, seed: int = 0, tie_word_embeddings: bool = True, **shape: Any) -> Path:
    """Write model and tokenizer to `folder` and return it. head_dim is 32: vLLM's CPU attention refuses 16. `shape`: of the config
    of a model that is not so tiny."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(
        ["hello world, what is one and one? the answer is two.", "user assistant system"] * 4, trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=CHATML
    )
    shape |= {"tie_word_embeddings": tie_word_embeddings}
    return _save(folder, tokenizer, seed=seed, vocab_size=len(tokenizer), **shape)


def build_tool_model(folder: Path) -> Path:
    """A random Qwen3 with a tokenizer and template of the Qwen2.5 family, which knows tools."""
    from tests.support.chat_families import family

    tokenizer = family("qwen2_5")
    return _save(folder, tokenizer, seed=3, vocab_size=-(-len(tokenizer) // 64) * 64)


def _save(folder: Path, tokenizer: Any, *, seed: int, **shape: Any) -> Path:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    tiny = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "initializer_range": 0.08}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    config = Qwen3Config(**{**tiny, **heads, **shape}, max_position_embeddings=2048, **ends)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
