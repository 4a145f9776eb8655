"""The real vLLM keeps the contract of a server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tests.servers.contract import PROMPT, Contract
from tests.servers.embedded_support import Served, assert_exact, make_request, teacher_forced

TAG = {
    "type": "tag",
    "begin": "<tool_call>",
    "content": {"type": "const_string", "value": "add"},
    "end": "</tool_call>",
}


@pytest.mark.vllm
class TestVllm(Contract):
    """See tests/servers/contract.py."""

    @pytest.mark.parametrize(
        ("form", "pattern"),
        [
            ({"choice": ["hello world", "the answer"]}, "hello world|the answer"),
            ({"regex": "[a-c]{4,6}!"}, "[a-c]{4,6}!"),
            ({"structural_tag": json.dumps({"type": "structural_tag", "format": TAG})}, "<tool_call>add</tool_call>"),
        ],
    )
    def test_structured_outputs_have_their_form_and_logprobs_of_what_it_leaves(
        self, server: Served, model_a: Any, version: int, tiny_model: Path, form: dict[str, Any], pattern: str
    ) -> None:
        tokenizer = AutoTokenizer.from_pretrained(tiny_model)
        free = make_request(PROMPT, seed=1, max_tokens=60)
        beside = server.pool.submit(server.generate, free)
        request = make_request(PROMPT, seed=2, max_tokens=200, structured_outputs=form, ignore_eos=False)
        output = server.generate(request)
        assert (output.finish_reason, output.token_ids[-1]) == ("stop", tokenizer.eos_token_id)
        assert re.fullmatch(pattern, tokenizer.decode(output.token_ids[:-1]))
        full = teacher_forced(model_a, PROMPT, output.token_ids).tolist()
        above = [mine - other for mine, other in zip(output.logprobs, full, strict=True)]
        assert min(above) > -server.tolerance  # what is left is divided by its probability
        assert max(above) > 0.5
        assert_exact(model_a, free, beside.result(60.0), version, server.tolerance)
        wrong = request.model_copy(update={"structured_outputs": {"regex": "("}})
        assert server.post("/rollout/generate", wrong.model_dump()).status_code == 400
