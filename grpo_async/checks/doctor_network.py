"""Doctor: loopback, names, the variables that change behaviour, and what the sandbox can hold."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack

from grpo_async.checks.report import Check, failed, passed, warned

_NUM_PORTS = 16
_TIMEOUT_S = 3.0
_SLOW_LOOKUP_S = 1.0
_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|CREDENTIAL", re.IGNORECASE)
_NAMED = re.compile(
    r"^(CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|PYTORCH_(CUDA_)?ALLOC_CONF|LD_PRELOAD|PYTHONHASHSEED|PYTHONPATH"
    r"|OMP_\w+|MKL_\w+|NCCL_\w+|GLOO_\w+|TORCH_\w+|TORCHINDUCTOR_\w+|VLLM_\w+|HF_\w+|TRANSFORMERS_\w+|TOKENIZERS_PARALLELISM"
    r"|GRPO_\w+|TMPDIR|WANDB_\w+|SSL_CERT_\w+|(https?|no|all)_proxy)$",
    re.IGNORECASE,
)


def check_loopback() -> list[Check]:
    """Processes of a run meet on 127.0.0.1, on ports that the system gives out."""
    with ExitStack() as held:
        servers = []
        try:
            for _ in range(_NUM_PORTS):
                servers.append(held.enter_context(socket.create_server(("127.0.0.1", 0))))
        except OSError as error:
            return [failed("loopback", f"only {len(servers)} of {_NUM_PORTS} ports of 127.0.0.1 can be bound: {error}")]
        port = servers[0].getsockname()[1]
        try:
            client = held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=_TIMEOUT_S))
            servers[0].settimeout(_TIMEOUT_S)
            accepted = held.enter_context(servers[0].accept()[0])  # within the listener's time limit, set above
            accepted.settimeout(_TIMEOUT_S)
            client.sendall(b"x")  # within the time limit it was connected with
            if accepted.recv(1) != b"x":  # within its time limit, set above
                raise OSError("another answer came back")
        except OSError as error:
            return [
                failed(
                    "loopback", f"127.0.0.1:{port} is bound but cannot be reached ({error}); a firewall on loopback?"
                )
            ]
    return [passed("loopback", f"127.0.0.1 works, {_NUM_PORTS} free ports; {_ipv6()}")]


def _ipv6() -> str:
    if not socket.has_ipv6:
        return "no IPv6 (not needed)"
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            return "::1 works too"
    except OSError:
        return "no ::1 (not needed)"


def check_names() -> list[Check]:
    """`localhost`, and this machine's own name."""
    return [_localhost(), _own_name()]


def _localhost() -> Check:
    try:
        found = list(
            dict.fromkeys(str(entry[4][0]) for entry in socket.getaddrinfo("localhost", 80, type=socket.SOCK_STREAM))
        )
    except OSError as error:
        return warned(
            "names", f"localhost does not resolve ({error}); write 127.0.0.1 in configs, or repair /etc/hosts"
        )
    words = f"localhost is {', '.join(found)}"
    strange = [address for address in found if address not in ("127.0.0.1", "::1")]
    if strange or "127.0.0.1" not in found:
        return warned("names", f"{words}: write 127.0.0.1 in configs, or repair /etc/hosts")
    if found[0] != "127.0.0.1":
        return passed(
            "names", f"{words}: IPv6 comes first, so inference.host: localhost and 127.0.0.1 may differ; use the latter"
        )
    return passed("names", words)


def _own_name() -> Check:
    name = socket.gethostname()
    began = time.monotonic()
    try:
        address = socket.gethostbyname(name)
    except OSError as error:
        return warned(
            "names",
            f"the host's name {name} does not resolve ({error}); torch looks it up now and then: put it into /etc/hosts",
        )
    took_s = time.monotonic() - began
    if took_s > _SLOW_LOOKUP_S:
        return warned(
            "names",
            f"looking up the host's name {name} took {took_s:.1f} s: each process waits for it; put it into /etc/hosts",
        )
    return passed("names", f"{name} is {address}")


def check_environment() -> list[Check]:
    """Variables that change what a run does."""
    return environment_checks(os.environ)


def environment_checks(environment: Mapping[str, str]) -> list[Check]:
    """See `check_environment`. Values of secrets are never shown."""
    checks = [warned("environment", warning) for warning in _warnings(environment)]
    shown = [f"{name}={_shown(name, value)}" for name, value in sorted(environment.items()) if _NAMED.match(name)]
    if shown or not checks:
        checks.insert(0, passed("environment", ", ".join(shown) or "nothing that changes a run is set"))
    return checks


def _warnings(environment: Mapping[str, str]) -> list[str]:
    found = []
    if environment.get("VLLM_ALLOW_INSECURE_SERIALIZATION", "0") not in ("", "0"):
        found.append(
            "VLLM_ALLOW_INSECURE_SERIALIZATION is set: whoever reaches vLLM's sockets runs code as this user; unset it, nothing "
            "here needs it"
        )
    if environment.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        found.append(
            "CUDA_VISIBLE_DEVICES is set and empty: every GPU is hidden, the run uses the CPU; unset it to use GPUs"
        )
    allocation = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" in allocation.replace(" ", "").lower():
        found.append(
            "PYTORCH_CUDA_ALLOC_CONF turns expandable segments on, which vLLM's sleep mode (inference.vllm.sleep_while_training) "
            "refuses, and which weights.transport: ipc may not be able to share; leave it out for one-GPU runs"
        )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found.append("CUDA_LAUNCH_BLOCKING is set: good for finding errors, several times slower; unset it")
    if environment.get("LD_PRELOAD"):
        found.append("LD_PRELOAD is set: its library is loaded into every process, the sandbox's too")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "OFF").upper() == "DETAIL":
        found.append("TORCH_DISTRIBUTED_DEBUG=DETAIL checks each collective with another one: slow; unset it")
    return found


def _shown(name: str, value: str) -> str:
    if _SECRET.search(name):
        return "(set)" if value else "(empty)"
    without_login = re.sub(r"//[^/@\s]+@", "//...@", value)
    return repr(without_login) if len(without_login) <= 80 else repr(without_login[:77] + "...")


def check_sandbox() -> list[Check]:
    """What holds code that a model wrote: needed by the Python tool and the code reward only."""
    from grpo_async.sandbox import REQUIRED, SandboxError, capabilities

    try:
        found = capabilities()
    except SandboxError as error:
        return [
            warned("sandbox", f"it cannot run at all ({error}): the Python tool and the code reward do not work here")
        ]
    held = ", ".join(capability.name for capability in found if capability.is_available)
    checks = [passed("sandbox", f"holds {held}")] if held else []
    for capability in found:
        if not capability.is_available:
            refused = (
                " The Python tool and the code reward refuse to work without it." if capability.name in REQUIRED else ""
            )
            checks.append(
                warned(
                    "sandbox",
                    f"does not hold {capability.name}: {capability.consequence} (tried: {capability.how}).{refused}",
                )
            )
    return checks
