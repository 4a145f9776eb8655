"""A manifest for Kubernetes from a configuration: an Indexed Job whose pods run `grpo-async train CONFIG`, and a headless Service.

Each pod is one machine of launch.nodes: the Job gives it its index, the Service a name by which the others find pod 0
(cluster.nodes). They share a volume, for run.dir, model and data. A pod that fails, fails the Job: apply it again with --resume.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from grpo_async.cluster.nodes import DEFAULT_PORT
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.errors import ConfigError

_MAX_NAME = 50  # a label has 63 characters, of which the index takes some
_MARGIN_S = 60  # after the trainer has saved: to end everything


def manifest(
    config: ExperimentConfig, config_path: Path, *, num_gpus: int, overrides: Sequence[str] = (), resume: bool = False
) -> str:
    """The Service and the Job, as YAML for `kubectl apply -f`.

    Args:
        config_path: as the pods see it, relative to launch.kubernetes.mount_path, or absolute.
        num_gpus: of each pod.
        overrides: values that were set on the command line, `section.key=value`.
        resume: continue from the newest checkpoint.

    Raises:
        ConfigError: launch.kubernetes lacks the image or the volume.
    """
    section, nodes = config.launch.kubernetes, config.launch.nodes
    missing = [key for key in ("image", "volume_claim") if getattr(section, key) is None]
    if missing:
        raise ConfigError("\n".join(f"launch.kubernetes.{key}: is needed for the manifest; set it" for key in missing))
    name = job_name(config.run.name)
    port = config.launch.rendezvous_address[1] if config.launch.rdzv is not None else DEFAULT_PORT
    labels = {"app.kubernetes.io/name": "grpo-async", "app.kubernetes.io/instance": name}
    container = {
        "name": "grpo-async",
        "image": section.image,
        "command": [
            *("grpo-async", "train", str(config_path)),
            *set_options(overrides),
            *(["--resume"] if resume else []),
        ],
        "workingDir": str(section.mount_path),
        "env": [
            {"name": "MASTER_ADDR", "value": f"{name}-0.{name}"},
            {"name": "MASTER_PORT", "value": str(port)},
        ],
        **({"resources": {"limits": {"nvidia.com/gpu": str(num_gpus)}}} if num_gpus else {}),
        "volumeMounts": [
            {"name": "shared", "mountPath": str(section.mount_path)},
            {"name": "memory", "mountPath": "/dev/shm"},  # NCCL and vLLM pass more through it than the 64 MB of a pod
        ],
    }
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": labels},
        # pods have to find each other before any of them could be called ready
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels},
    }
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": nodes.count,
            "parallelism": nodes.count,
            "backoffLimit": 0,
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "subdomain": name,
                    "restartPolicy": "Never",
                    "terminationGracePeriodSeconds": round(config.launch.stop_timeout_s) + _MARGIN_S,
                    "containers": [container],
                    "volumes": [
                        {"name": "shared", "persistentVolumeClaim": {"claimName": section.volume_claim}},
                        {"name": "memory", "emptyDir": {"medium": "Memory"}},
                    ],
                },
            },
        },
    }
    head = "# Made by: grpo-async launch kubernetes\n"
    return head + yaml.safe_dump_all(_plain([service, job]), sort_keys=False, width=120)


def job_name(run_name: str) -> str:
    """As Kubernetes takes names: "Math_7B.v2" -> "math-7b-v2"."""
    name = re.sub(r"[^a-z0-9]+", "-", run_name.lower())[:_MAX_NAME].strip("-")
    return name if name[:1].isalpha() else f"run-{name}".strip("-")


def _plain(value: Any) -> Any:
    """Copies, so that YAML writes no references."""
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    return [_plain(below) for below in value] if isinstance(value, list) else value
