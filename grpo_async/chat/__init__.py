"""Between messages and token ids, at the two places where text is allowed: the prompt goes in, the final text comes out."""

from grpo_async.chat.renderer import ChatRenderer

__all__ = ["ChatRenderer"]
