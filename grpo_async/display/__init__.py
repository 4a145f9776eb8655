"""What a terminal shows of a run while it goes and when it ended: dashboard, lines, JSON, status, summary."""
