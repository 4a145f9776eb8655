"""Looks at runs: their rollouts, metrics, evaluations, events, logs and settings. Reads the files of run directories, and changes
none; `report.write` adds the report, and `trace` a file for Perfetto."""
