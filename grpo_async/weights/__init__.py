"""How weights travel from trainer to server: `buckets` cuts, `gloo`, `nccl` or `ipc` carries, `push` puts the phases in order."""
