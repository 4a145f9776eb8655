"""The embedded inference engine: continuous batching over a Hugging Face model, for machines without vLLM.

main (process) -> server.EmbeddedEngine (event loop) -> server.EngineThread -> engine.SlotEngine -> model over kv_slots -> sampler
weights arrive beside it (server.EmbeddedReceiver) and are applied between two steps
"""
