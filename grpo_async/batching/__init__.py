"""From samples to tensors: `plan` decides which rank computes what (pure), `pack` divides the columns by rank and makes the tensors
of one rank.
"""
