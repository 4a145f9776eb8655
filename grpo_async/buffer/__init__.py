"""Between generator and trainer: `ledger` accounts for every group and admits new ones, `sample_buffer` hands groups over, and
`resume` is the part of a checkpoint that restores both.
"""
