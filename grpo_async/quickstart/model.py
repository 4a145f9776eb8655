"""The quickstart's model and tokenizer: a Qwen3 of 0.37 million parameters, small enough to train on a laptop's CPU;
byte-level BPE trained on the task's own text, every digit its own token, ChatML.

`<think>`, `</think>` and the tool tags are tokens of their own but not "special": decoding with `skip_special_tokens` keeps
them, as with Qwen3, so that reward functions see where the thinking ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


MAX_VOCABULARY = 384
END_OF_TEXT, TURN_STARTS, TURN_ENDS = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
CHAT_TEMPLATE = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
"""ChatML with Hermes tool calls, as Qwen writes them. Without tools, system and user turns stand as they are. It never looks at
what comes later, so a longer conversation begins with exactly the text of the shorter one. A tool is listed in the form of its
call, types in place of values: {"name": "calculator", "arguments": {"expression": "string"}}. The whole JSON schema is five times
as long, which a tiny model would read before every conversation and could make nothing of."""


def train_tokenizer(texts: Iterable[str], *, num_tokens: int = MAX_VOCABULARY) -> PreTrainedTokenizerFast:
    """A tokenizer of at most `num_tokens`: 256 bytes, 9 specials and tags, and merges learned from `texts`. The eos ends a turn."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens - len(TAGS),
        special_tokens=[END_OF_TEXT, TURN_STARTS, TURN_ENDS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=TURN_ENDS,
        pad_token=END_OF_TEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,  # decoding must give back the exact text
    )


MAX_POSITIONS = 2048


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A freshly initialized float32 model; draws from torch's global generator."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,  # not 96 / 4 = 24: vLLM's CPU attention has no kernel for that
        intermediate_size=256,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        initializer_range=0.08,  # larger than usual: at this width the default 0.02 learns slowly
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)
