"""From samples to tensors: `plan` decides who computes what (pure), `pack` makes the tensors of one rank."""
