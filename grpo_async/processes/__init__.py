"""What the processes of a run say to each other: the launcher's assignment, the control channel, heartbeats, failure reports."""
