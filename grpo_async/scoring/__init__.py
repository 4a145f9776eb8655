"""Turns a finished group into trainable samples: rewards, then advantages, then rows."""
