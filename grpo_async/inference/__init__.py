"""Inference servers and the client that talks to them; `api` defines the HTTP API that both engines serve."""
