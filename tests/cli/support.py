"""The smallest configuration."""

from __future__ import annotations

MINIMAL = """\
run: {name: demo}
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
inference: {engine: embedded}
"""
