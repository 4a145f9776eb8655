"""Runs what users bring (rewards, tools, environments, rollout functions): found by name, off the event loop, with a time limit."""
