"""Between messages and token ids, at the two places where text is allowed: messages go in, what the policy wrote comes out."""

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.chat.turn import ChatError, PolicyTurn

__all__ = ["ChatError", "ChatRenderer", "PolicyTurn"]
