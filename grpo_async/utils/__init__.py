"""Small helpers that know nothing of a run."""
