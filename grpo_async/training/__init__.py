"""Training, on every rank.

ranks                           the commands by which the other ranks follow rank 0 (trainer.lead)
step, loss, logprobs            one step; the loss; log-probabilities and entropies in chunks
model, attention, families      the sharded policy; attention within packed samples; the supported model families
load, parameters, lora          loading Hugging Face files into shards; the tensors that a push sends; adapters
optimizer, reference            AdamW and Muon; forwards without a gradient
checkpoint, export              checkpoints for a resume; Hugging Face folders
checkpoint_manifest             which checkpoint a name means, whether it is complete (without torch)
metrics, token_statistics, timing            metrics of a step, of each token; clocks
"""
