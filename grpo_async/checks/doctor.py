"""The doctor: what of this machine matters to a run, as a table. Needs no configuration, and neither torch nor transformers.

    doctor_hardware   OS, CPUs, memory, disk, limits, GPUs, clock
    doctor_software   Python, packages against the ranges of this package, torch, vLLM
    doctor_network    loopback, ports, names, proxies; variables that change behaviour; sandbox

Each check runs alone, all at once: one that breaks or hangs is a failed line, the others stand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from grpo_async.checks import doctor_hardware, doctor_network, doctor_software
from grpo_async.checks.report import Check, run_check

_LIMIT_S = 30.0  # importing torch takes two seconds, on a busy machine or a slow disk far more
_FULL_LIMIT_S = 120.0  # vLLM's import takes half a minute on a busy machine

_CHECKS: tuple[tuple[str, Callable[[], Check | Sequence[Check]]], ...] = (
    ("python", doctor_software.check_python),
    ("system", doctor_hardware.check_system),
    ("cpus", doctor_hardware.check_cpus),
    ("memory", doctor_hardware.check_memory),
    ("gpus", doctor_hardware.check_gpus),
    ("packages", doctor_software.check_packages),
    ("torch", doctor_software.check_torch),
    ("vllm", doctor_software.check_vllm),
    ("limits", doctor_hardware.check_limits),
    ("shared memory", doctor_hardware.check_shared_memory),
    ("disk", doctor_hardware.check_disk),
    ("clock", doctor_hardware.check_clock),
    ("loopback", doctor_network.check_loopback),
    ("names", doctor_network.check_names),
    ("environment", doctor_network.check_environment),
    ("sandbox", doctor_network.check_sandbox),
)


def run_doctor(*, full: bool = False) -> list[Check]:
    """Look at this machine; the checks in the order of the table.

    Args:
        full: also import vLLM, which takes long.
    """
    checks = list(_CHECKS)
    if full:
        checks.append(("vllm import", doctor_software.check_vllm_import))
    with ThreadPoolExecutor(max_workers=4) as pool:  # run_check leaves each check after its limit
        limit_s = _FULL_LIMIT_S if full else _LIMIT_S
        results = pool.map(lambda entry: run_check(entry[0], entry[1], limit_s=limit_s), checks)
        return [check for found in results for check in found]
