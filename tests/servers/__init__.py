"""Tests of the inference servers."""
