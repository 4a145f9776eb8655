"""`inspect-rollouts` without a screen of its own: tables and pages that are printed, and JSON lines."""
