"""The chat renderer of a run, the same in the start-up check, the rollout thread and the exported model."""

from __future__ import annotations

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.config.experiment import ExperimentConfig


def load_renderer(config: ExperimentConfig) -> ChatRenderer:
    """Tokenizer, template, end-of-turn tokens and tool-call parser as the configuration says.

    Raises:
        ConfigError: one of them cannot be loaded.
    """
    model = config.model
    return ChatRenderer.load(
        model.path,
        chat_template=model.chat_template,
        template_arguments=model.chat_template_arguments,
        end_of_turn_tokens=model.end_of_turn_tokens,
        parser=config.tool_calling.parser,
        trust_remote_code=model.trust_remote_code,
    )
