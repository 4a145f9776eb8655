"""The inference servers of a run: the real vLLM (`vllm`) and a small engine on transformers (`embedded`)."""
