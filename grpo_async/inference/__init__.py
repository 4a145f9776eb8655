"""Inference servers and the client that talks to them; see `api` for the HTTP contract both engines serve."""
