"""From samples to tensors: `minibatch` divides the groups of a step into updates and weights their tokens, `plan` decides which
rank computes what (pure), and `pack` divides the columns by rank and makes the tensors of one rank.
"""
