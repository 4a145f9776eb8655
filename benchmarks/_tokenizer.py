"""A tokenizer that every machine can make: byte-level BPE with 16,384 tokens, trained on Python's own library."""

from __future__ import annotations

import functools
import sysconfig
from pathlib import Path
from typing import Any

_CHATML = """{%- if tools %}<|im_start|>system
# Tools
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for message in messages %}{%- if message.role == 'tool' %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}{% for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{%- endfor %}{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@functools.cache
def load_tokenizer(folder: Path | None = None) -> Any:
    """That of `folder`, or the one described above (which takes seconds)."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if folder is not None:
        return AutoTokenizer.from_pretrained(folder)
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    core.train([str(file) for file in library], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>", chat_template=_CHATML
    )
