"""The embedded inference engine: continuous batching over a Hugging Face model, for machines without vLLM.

main (process) -> server.EmbeddedEngine (event loop, and the engine's thread) -> engine.SlotEngine -> model over kv_slots -> sampler
the thread receives weights (weights.receiver) between two steps
"""
