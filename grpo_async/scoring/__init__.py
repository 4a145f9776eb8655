"""Turns a finished group into trainable samples: rewards, advantages, rows."""
