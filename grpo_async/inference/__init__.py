"""Inference servers and the client that talks to them; see `surface` for the HTTP contract both engines serve."""
