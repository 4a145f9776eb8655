"""What a configuration needs of the machine and of this Python: a GPU, packages, a place to write. Starts and writes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.processes import machine
from grpo_async.rundir import RunDir
from grpo_async.servers.engine_choice import EngineChoice

_TRACKERS = {
    "tensorboard": ("tensorboardX", "tensorboard"),
    "wandb": ("wandb", "wandb"),
    "trackio": ("trackio", "trackio"),
    "mlflow": ("mlflow", "mlflow"),
    "prometheus": ("prometheus_client", "prometheus"),
}
"""Type -> module, extra."""


def check_devices(config: ExperimentConfig, engine: EngineChoice, *, trains: bool) -> Iterator[str]:
    """A device that is asked for and is not there."""
    wanted = {"launch.device": config.launch.device} if trains else {}
    if engine.engine == "embedded":
        wanted["inference.embedded.device"] = config.inference.embedded.device
    keys = [key for key, device in wanted.items() if device == "cuda"]
    if keys and (reason := _no_cuda()):
        yield from (f"{key}: cuda, but {reason}; set cpu, or start the run where there is a GPU" for key in keys)


def _no_cuda() -> str:
    """Why torch cannot use a GPU here; empty: it can, as far as is known without starting it."""
    version = importlib.metadata.version("torch")
    if version.partition("+")[2].startswith("cpu"):
        return f"torch {version} is built for CPUs"
    if machine.inspect().gpus:
        return ""
    import torch  # here: it takes seconds; the driver may be one that is found by no file

    return "" if torch.cuda.is_available() else f"torch {version} sees no GPU"


def check_packages(config: ExperimentConfig, *, trains: bool) -> Iterator[str]:
    """Optional packages that the configuration needs and that are not installed."""
    model, sources = config.model, {"data.train": config.data.train}
    tracking = config.tracking if trains else ()
    if config.evaluation is not None and config.evaluation.data is not None:
        sources["evaluation.data"] = config.evaluation.data
    needed = [(f"tracking.{i}.type: {t.type}", *_TRACKERS[t.type]) for i, t in enumerate(tracking)]
    needed += [(f"{key}.type: hub", "datasets", "hub") for key, source in sources.items() if source.type == "hub"]
    if trains and model.lora is not None:
        needed.append(("model.lora", "peft", "lora"))
        if model.lora.quantization is not None:
            needed.append((f"model.lora.quantization: {model.lora.quantization}", "bitsandbytes", "quantization"))
    if trains and config.optimizer.type == "adamw_8bit":
        needed.append(("optimizer.type: adamw_8bit", "bitsandbytes", "quantization"))
    for key, module, extra in needed:
        if importlib.util.find_spec(module) is None:
            yield f"{key}: needs the package {module}, which is not installed; pip install 'grpo-async[{extra}]'"


def check_run_place(run_dir: RunDir) -> None:
    """The run directory, or the nearest folder above it that exists, can be written to.

    Raises:
        ConfigError: it cannot.
    """
    try:
        place = next(path for path in (run_dir.root, *run_dir.root.absolute().parents) if path.exists())
        fault = _fault_of(place)
    except OSError as error:
        place, fault = run_dir.root, str(error.strerror)
    if fault:
        raise ConfigError(f"run.dir: {run_dir.root} cannot be made: {place} {fault}; set run.dir to a folder of yours")


def _fault_of(place: Path) -> str:
    if not place.is_dir():
        return "is a file, not a folder"
    if os.statvfs(place).f_flag & os.ST_RDONLY:
        return "is on a disk that can only be read"
    return "" if os.access(place, os.W_OK | os.X_OK) else "is not yours to write to"
