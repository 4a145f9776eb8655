"""How weights get from trainer to server: `push` is the trainer's end and has the phases in order, `receiver` the server's end.
`backends` transfers the buckets that `buckets` makes.

`trainer.publish` decides when to push, always between two steps; `trainer.weight_sync` selects the servers and calls `push`.
"""
