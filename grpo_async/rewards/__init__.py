"""Reward functions, in TRL's signature: `function` finds, checks and calls them, the rest are built in.

    config section -> load_rewards -> RewardFunction.score(...) -> RewardOutcome

`grpo_async.user_code.calls` decides where the function runs and how a call that takes too long is ended.

Built in, as `grpo_async.rewards.MODULE:FUNCTION`: math:math_answer, text:exact_match, text:regex_match,
text:number_match, format:think_format, length:soft_overlong, code:code_tests.
In place of a function, `model: NAME` is model:model_reward, and `model: http://...` is served_model:served_model_reward.
"""

from __future__ import annotations

from grpo_async.rewards.call import RewardError, RewardOutcome, TrainerState
from grpo_async.rewards.function import RewardFunction, load_rewards

__all__ = ["RewardError", "RewardFunction", "RewardOutcome", "TrainerState", "load_rewards"]
