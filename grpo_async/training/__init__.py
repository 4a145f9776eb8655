"""Training, on every rank.

ranks                           the commands by which the other ranks follow rank 0, which is trainer.lead
step, loss, logprobs            one step; what is minimized; the model's head in chunks
model, attention, families      the sharded policy; packed samples apart; which model families it computes right
load, parameters, lora          from Hugging Face files into shards; what a push sends; adapters
optimizer, reference            what moves the weights; forwards without a gradient
checkpoint, export              for a resume; Hugging Face folders
checkpoint_manifest             which one a name means, whether it is whole (without torch)
metrics, token_statistics, timing            of a step, of each token; clocks
"""
