"""Between generator and trainer: `ledger` accounts for every group and admits new ones, `sample_buffer` hands over, and
`resume` is what a checkpoint keeps of them.
"""
