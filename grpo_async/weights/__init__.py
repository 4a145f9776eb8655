"""How weights travel from trainer to server: `buckets` cuts, `gloo`, `nccl` or `ipc` carries, `push` puts the phases in order.

`trainer.weight_sync` calls it between two steps, and says when.
"""
