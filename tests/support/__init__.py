"""Builders and fakes that several tests share."""
