"""How tool calls are read from what the policy wrote."""

from grpo_async.chat.parsers.choose import ChosenParser, choose_parser

__all__ = ["ChosenParser", "choose_parser"]
