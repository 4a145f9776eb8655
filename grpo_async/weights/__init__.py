"""How weights travel from trainer to server: `push` is the trainer's end and has the phases in order, `receiver` the server's end;
`backends` carries the buckets that `buckets` cuts.

`trainer.weight_sync` calls it between two steps, and says when.
"""
