"""Runs user code (rewards, tools, environments, rollout functions, agents) off the event loop, with a time limit."""
