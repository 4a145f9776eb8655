"""The trainer. `loop` is rank 0's main loop, `workplace.follow` that of the others; `ranks` carries the commands between them.

`policy` is the sharded model, `logprobs` its head in chunks, `losses` and `objective` what is minimised, `step` one step,
`parameters` gathers for the push, `meter` measures who waited for whom. `checkpoint` is what a resume needs and loads it,
`checkpoint_write` writes it beside training, `checkpoint_manifest` says whether it is whole, `keeping` which ones stay, `export`
makes Hugging Face folders.
"""
