"""The life of a group, between generator and trainer: `group_table` has every open group and admits new ones, `sample_buffer` hands
them to the trainer, `ledger` counts them, and `resume` is the part of a checkpoint that restores them.
"""
