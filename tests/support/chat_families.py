"""Small tokenizers with the special tokens, merges and chat templates of known model families, trained here in milliseconds.

The byte-level BPE has no pre-tokenization, so its merges cross every border of words and tags: "he" + "llo" -> "hello", and
a newline with the "<tool_response>" after it. `mistral` is of the sentencepiece kind instead: a blank before every piece of text.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

TEMPLATES = Path(__file__).parents[1] / "chat" / "templates"

_OF_TRL = {"qwen2_5": "qwen2_5", "qwen3": "qwen3", "llama3": "llama3_1", "gpt_oss": "gptoss"}

_TEXT = (
    "hello world, hello tool. what is the weather in Paris? it is sunny, 21 degrees. the answer is 42.",
    '<tool_call>\n{"name": "search", "arguments": {"query": "hello"}}\n</tool_call>\n',
    "\n<tool_response>\nhello\n</tool_response>\n\n<tool_response>\n",
    '{"name": "add", "parameters": {"a": 1, "b": 2}}; to=functions.search json commentary analysis final',
    "<think>\nlet me think\n</think>\n\nsystem user assistant tool ipython\n\n",
    "You are a helpful assistant. # Tools\n\nFunction signatures are within <tools></tools>:\n",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """`plain_tokens` are added tokens that are not special, as Qwen3 has <tool_call>. `end_tokens` are what the model's
    generation_config.json names beside the tokenizer's eos."""

    special_tokens: tuple[str, ...]
    eos: str
    bos: str | None = None
    plain_tokens: tuple[str, ...] = ()
    end_tokens: tuple[str, ...] = ()
    sentencepiece: bool = False


_CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_QWEN_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_HARMONY = (
    "<|endoftext|>",
    "<|return|>",
    "<|constrain|>",
    "<|channel|>",
    "<|start|>",
    "<|end|>",
    "<|message|>",
    "<|call|>",
)
_LLAMA = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>", "<|python_tag|>")
_MISTRAL = (
    "[INST]",
    "[/INST]",
    "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]",
    "[TOOL_CALLS]",
    "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)
_DEEPSEEK = ("User", "Assistant", "calls_begin", "calls_end", "call_begin", "call_end", "sep", "outputs_begin", "outputs_end",
             "output_begin", "output_end")  # fmt: skip

FAMILIES = {
    "qwen2_5": Family(special_tokens=_CHATML, eos="<|im_end|>", plain_tokens=_QWEN_TAGS[:2]),
    "qwen3": Family(special_tokens=_CHATML, eos="<|im_end|>", plain_tokens=_QWEN_TAGS),
    "llama3": Family(special_tokens=_LLAMA, eos="<|eot_id|>", bos="<|begin_of_text|>", end_tokens=("<|eom_id|>",)),
    "gpt_oss": Family(special_tokens=_HARMONY, eos="<|return|>", end_tokens=("<|call|>",)),
    "mistral": Family(special_tokens=("<unk>", "<s>", "</s>", *_MISTRAL), eos="</s>", bos="<s>", sentencepiece=True),
    "mistral_args": Family(
        special_tokens=("<s>", "</s>", *_MISTRAL, "[ARGS]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
        eos="</s>",
        bos="<s>",
    ),
    "deepseek": Family(
        special_tokens=("<|bos|>", "<|eos|>", *(f"<|{name}|>" for name in _DEEPSEEK)), eos="<|eos|>", bos="<|bos|>"
    ),
    "no_end_token": Family(special_tokens=("<|endoftext|>",), eos="<|endoftext|>"),
    "chatml": Family(special_tokens=_CHATML, eos="<|im_end|>"),
    "no_tool_role": Family(special_tokens=_CHATML, eos="<|im_end|>"),
}


@cache
def family(name: str) -> Any:
    """The tokenizer of a family, with its template. It is shared: copy it before changing it."""
    from tokenizers import AddedToken
    from transformers import PreTrainedTokenizerFast

    made = FAMILIES[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_sentencepiece(made) if made.sentencepiece else _byte_level(made),
        eos_token=made.eos,
        **({"bos_token": made.bos} if made.bos else {}),
        chat_template=template_source(name),
    )
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in made.plain_tokens])
    return tokenizer


def template_path(name: str) -> Path:
    """The model's own template, which TRL ships, or one of ours."""
    if name not in _OF_TRL:
        return TEMPLATES / f"{name}.jinja"
    spec = find_spec("trl")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "chat_templates" / f"{_OF_TRL[name]}.jinja"


def template_source(name: str) -> str:
    return template_path(name).read_text(encoding="utf-8")


def _byte_level(made: Family) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 400,
        special_tokens=list(made.special_tokens),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(["hello"] * 50 + ["llo"] * 200 + list(_TEXT) * 4, trainer)
    return core


def _sentencepiece(made: Family) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]  # spell what the vocabulary has no letter for
    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    core.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=False)
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 400,
        special_tokens=[*made.special_tokens, *bytes_],
        show_progress=False,
    )
    core.train_from_iterator(["hello"] * 50 + ["llo"] * 200 + list(_TEXT) * 4, trainer)
    written = json.loads(core.to_str())
    written["added_tokens"] = [token for token in written["added_tokens"] if token["content"] not in bytes_]
    return Tokenizer.from_str(json.dumps(written))
