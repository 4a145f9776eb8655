"""What a run leaves to look at: rollouts, timeline, report, advice (`record`), and where its metrics go (`tracking`)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_async.config.base import Host, StrictModel


class RolloutRecordSection(StrictModel):
    """Which rollouts are kept, and how much room they may take."""

    sample_rate: float = Field(default=1.0, ge=0.0, le=1.0)
    """Fraction of the groups that are stored; which ones follows from the group's id. Failed and stale groups are always stored.
    Metrics and the ledger count all groups, stored or not."""
    token_stats: bool = True
    """Store what the trainer found for each token: its log-probability, the proximal one, the importance ratio, the entropy, and
    why a token was clipped or left out."""
    max_gb: float = Field(default=20.0, gt=0.0)
    """Room for the rollouts of training. Above it the oldest blocks are deleted, and readers say so. Each evaluation has
    a folder of its own, evaluations/step_N, with as much room again."""
    block_mb: int = Field(default=16, ge=1, le=1024)
    """A block of JSON lines that has reached this size is rewritten as one Parquet file."""


class RecordSection(StrictModel):
    rollouts: RolloutRecordSection = RolloutRecordSection()
    """Every rollout, for `grpo-async inspect-rollouts` and `grpo-async export`."""
    report: bool = True
    """Write report.html at the end of the run, also of one that failed."""
    advise_every_steps: int = Field(default=20, ge=0)
    """Say in one sentence every N steps what bounds the run and which setting to change; 0 = only in the report."""


class TensorboardTracker(StrictModel):
    type: Literal["tensorboard"]
    """Event files in the run directory (extra `tensorboard`)."""


class WandbTracker(StrictModel):
    type: Literal["wandb"]
    """Weights & Biases (extra `wandb`)."""
    project: str
    """Name of the project."""
    entity: str | None = None
    """User or team; null = the default of the login."""
    mode: Literal["online", "offline"] = "online"
    """offline: written to the run directory, for `wandb sync` later."""


class TrackioTracker(StrictModel):
    type: Literal["trackio"]
    """trackio (extra `trackio`): a local database, and a page by `trackio show`."""
    project: str
    """Name of the project."""
    space_id: str | None = None
    """A Hugging Face space to send to; null = this machine only."""


class MlflowTracker(StrictModel):
    type: Literal["mlflow"]
    """MLflow (extra `mlflow`)."""
    experiment: str
    """Name of the experiment; made where it does not exist."""
    uri: str | None = None
    """Tracking server (http://...) or folder; null = the environment's MLFLOW_TRACKING_URI, else the run directory."""


class PrometheusTracker(StrictModel):
    type: Literal["prometheus"]
    """An endpoint that Prometheus scrapes (extra `prometheus`): GET /metrics with the newest value of every metric."""
    port: int = Field(default=9464, ge=0, le=65535)
    """Port; 0 = any free port; it is printed at startup."""
    host: Host = "127.0.0.1"
    """Address to listen on. There is no token: anybody who reaches the address reads the metrics."""


TrackerSection = Annotated[
    TensorboardTracker | WandbTracker | TrackioTracker | MlflowTracker | PrometheusTracker, Field(discriminator="type")
]
