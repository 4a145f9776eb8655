"""How weights travel from trainer to server: `buckets` cuts, `gloo` carries, `push` puts the phases in order."""
