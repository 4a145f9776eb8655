"""Evaluation beside training and by `grpo-async eval`: what is evaluated, when, and its log."""
