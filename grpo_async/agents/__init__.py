"""Agents as rollouts: an endpoint with the usual APIs, behind which the policy of the run answers.

agent -> endpoint (HTTP) -> Exchange -> session: history -> InferenceClient -> engine

endpoint.py    the HTTP server: keys, paths, hang-ups
apis.py        the APIs of OpenAI and Anthropic: JSON to `Call` (calls.py), `Answer` (history.py) to JSON and events
session.py     one rollout: its calls, budget, and what became of them
history.py     the tree of its calls: which recorded tokens a request continues
agent.py       what runs for a rollout: function.py, command.py, environments/
"""
