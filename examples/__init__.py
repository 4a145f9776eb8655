"""Whole runs to read and copy: what is learned, its data, its config. Run them from the root of the repository."""
