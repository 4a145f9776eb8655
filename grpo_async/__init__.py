"""grpo-async"""
