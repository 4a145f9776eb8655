"""How weights get from trainer to server: `push` is the trainer's end and has the phases in order, `receiver` the server's end.
`backends` transfers the buckets that `buckets` makes.

`trainer.weight_sync` decides when to push, and calls `push` between two steps.
"""
