"""The inference servers of a run: vLLM (`vllm`) and a small engine on transformers (`embedded`).

HTTP -> TokenGuard -> app.RolloutApp (routes, order of pauses and updates) -> app.Engine: EmbeddedEngine or VllmEngine
"""
