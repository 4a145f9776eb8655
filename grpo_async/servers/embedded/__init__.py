"""The embedded inference engine: continuous batching over a Hugging Face model, for machines without vLLM.

HTTP (service) -> queue (worker thread) -> SlotEngine -> model over kv_slots -> sampler
weights arrive beside it (receiver) and are applied between two steps
"""
