"""Agents as rollouts: an endpoint with the usual APIs, where the run's policy answers.

agent -> endpoint (HTTP) -> Exchange -> session: history -> InferenceClient -> engine

endpoint.py    the HTTP server: keys, paths, disconnects
apis.py        the APIs of OpenAI and Anthropic: JSON to `Call` (calls.py), `Answer` (history.py) to JSON and events
session.py     one rollout: its calls, budget, and completion
history.py     the tree of its calls: which recorded tokens a request continues
agent.py       the agents: function.py, command.py, environments/
"""
