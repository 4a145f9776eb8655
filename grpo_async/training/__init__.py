"""Training, on every rank.

ranks                           the commands by which the other ranks follow rank 0 (trainer.loop)
step, loss, logprobs            one step; the loss; log-probabilities and entropies in chunks
model, attention, families      the sharded policy; attention within packed samples; the supported model families
context_parallel                several ranks compute a long sample together (Ulysses)
flash                           the newest flash attention that is installed and gives what version 2 gives
load, parameters, lora          loading Hugging Face files into shards; the tensors that a push sends; adapters
optimizer, schedule, loss_scale AdamW, AdamW with moments in 8 bits, Muon; the learning rate; the factor on the loss in float16
reference, verify               forwards without a gradient; their comparison with a server
checkpoint, export              checkpoints for a resume; Hugging Face folders
checkpoint_manifest             which checkpoint a name means, whether it is complete (without torch)
metrics, token_statistics       metrics of a step; statistics of each token
timing                          what the main thread is doing, and the peak memory
"""
