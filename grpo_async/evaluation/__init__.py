"""Evaluation during training and by `grpo-async eval`.

`evaluations` decides when a run evaluates, `evaluator` makes and scores the rollouts of held-out prompts, `metrics` computes the
numbers, `target` is what `grpo-async eval` evaluates.
"""
