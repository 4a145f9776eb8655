"""Preflight, machine: addresses, memory and disk, against what the run will need of them."""

from __future__ import annotations

import ipaddress
import math
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from grpo_async.checks.doctor_hardware import machine_memory
from grpo_async.checks.memory import estimate_server, estimate_trainer, format_bytes
from grpo_async.checks.preflight_context import CheckedServer, PreflightContext
from grpo_async.checks.preflight_http import ProbeClient
from grpo_async.checks.report import Check, failed, passed, warned
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TOKEN_VARIABLE
from grpo_async.processes.addresses import weights_host
from grpo_async.processes.machine import free_ports
from grpo_async.utils.loopback import is_loopback

_TIGHT = 0.9  # of what is there; estimates are good to a fifth, so they warn and never refuse
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def check_addresses(context: PreflightContext) -> list[Check]:
    """The trainer can be met where `weights.host` says, and no server can be used by strangers."""
    return [_weights_host(context), *(_address_of(context, server) for server in context.servers)]


def _weights_host(context: PreflightContext) -> Check:
    name = "addresses"
    host = weights_host(context.config)
    try:
        free_ports(host, 1)
    except ConfigError:
        return failed(
            name, f"weights.host: {host} cannot be bound on this machine, so no server could join again; use 127.0.0.1, or one "
            "of its own addresses"
        )  # fmt: skip
    try:
        is_wildcard = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        is_wildcard = False
    if is_wildcard:
        return warned(name, f"weights.host: {host} listens on every network; name the one that the servers are in")
    if not is_loopback(host):
        return warned(
            name,
            f"weights.host: {host} can be reached from other machines, and what meets there asks for no token; use 127.0.0.1 "
            "where the servers are on this machine, else a network of your own",
        )
    return passed(name, f"weights.host: {host} can be bound and is not reached from outside")


def _address_of(context: PreflightContext, server: CheckedServer) -> Check:
    name = "addresses"
    url = urlsplit(server.url)
    local = is_loopback(url.hostname or "")
    if context.token is None:
        if local:
            return warned(
                name, f"{server.name} asks for no token: everyone on this machine can use it (${TOKEN_VARIABLE})"
            )
        return failed(name, f"{server.name} is on a network and asks for no token; start it with ${TOKEN_VARIABLE} set")
    with ProbeClient(
        server.url, token=None, timeout_s=context.config.weights.timeout_s, authority=context.authority
    ) as client:
        status = client.status_without_token()
    if status != 401:
        open_to_all = f"{server.name} answers {status} without a token although this run has one (${TOKEN_VARIABLE})"
        make = warned if local else failed
        return make(name, f"{open_to_all}; start it with the same token in its environment")
    if not local and url.scheme != "https":
        return warned(
            name,
            f"{server.name} is reached over a network without TLS, the token in clear; see inference.tls, or use a tunnel",
        )
    return passed(name, f"{server.name} {'is on loopback' if local else 'is encrypted'} and wants the token")


def check_memory(context: PreflightContext) -> list[Check]:
    """What training will still allocate, by estimate, against what is free now (models are loaded, nothing was trained yet). The
    peak is measured after the first step (launch.peak_memory)."""
    config = context.config
    number = sum(math.prod(shape) for shape in context.parameter_shapes.values())
    trainer = estimate_trainer(config, number, on_gpu=context.device == "cuda")
    coming = trainer.total - trainer.weights
    checks = []
    host_bytes = 0
    host_words = []
    if context.device == "cuda":
        checks.append(_verdict("memory", f"GPU of rank 0: trainer {trainer.describe()}", coming, _free_gpu_bytes()))
    else:
        ranks = config.launch.num_trainer_ranks
        host_bytes += ranks * coming
        host_words.append(f"{ranks} trainer rank(s): {trainer.describe()} each")
    if not config.inference.urls:
        engines = {server.info.engine for server in context.servers if server.info}
        if engines == {"embedded"} and config.inference.embedded.device == "cpu":
            server = estimate_server(config, number, engine="embedded")
            host_bytes += config.inference.replicas * server.kv_cache
            host_words.append(f"{config.inference.replicas} server(s): {server.describe()} each")
    if host_words:
        checks.append(_verdict("memory", "; ".join(host_words), host_bytes, machine_memory().available))
    return checks or [passed("memory", "servers and trainer have their own; nothing to add up here")]


def _verdict(name: str, words: str, coming: int, available: int) -> Check:
    figures = f"{words}. Still to come about {format_bytes(coming)}, available {format_bytes(available)}"
    advice = (
        "set model.activation_checkpointing: full, lower training.micro_batch_tokens or training.logprob_chunk_tokens, or use "
        "more trainer ranks on more machines or GPUs"
    )
    if coming > _TIGHT * available:
        return warned(
            name, f"{figures}: {'too little' if coming > available else 'tight'}; if memory runs out, {advice}"
        )
    return passed(name, figures)


def _free_gpu_bytes() -> int:
    """Of the current GPU: what nobody has, and what torch holds without using it."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    return int(free) + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()


def check_disk(context: PreflightContext) -> Check:
    """The run directory's disk holds the checkpoints and the exported model.

    A checkpoint holds the master weights and AdamW's two moments: 3 N m bytes. `checkpoint.keep_last` of them stay, one more is
    there while it is written; what is there already (a resume) counts. The export is N m.
    """
    config = context.config
    number = sum(math.prod(shape) for shape in context.parameter_shapes.values())
    model = number * _ITEM_BYTES[config.model.dtype]
    still = max(0, config.checkpoint.keep_last + 1 - len(context.rundir.checkpoint_steps()))
    needed = still * 3 * model + model
    free = shutil.disk_usage(context.rundir.root).free
    return _disk_verdict(
        f"{still} checkpoint(s) of {format_bytes(3 * model)} and the model of {format_bytes(model)}",
        needed,
        free,
        context.rundir.root,
    )


def _disk_verdict(words: str, needed: int, free: int, where: Path) -> Check:
    """Compare bytes; rollouts and logs come on top, so 90 % full is a warning."""
    figures = f"{words} need {format_bytes(needed)}; {where} has {format_bytes(free)} free"
    advice = "free space, lower checkpoint.keep_last, or set run.dir to another disk"
    if needed > free:
        return failed("disk", f"{figures}: not enough; {advice}")
    if needed > _TIGHT * free:
        return warned("disk", f"{figures}, and rollouts are written too; {advice}")
    return passed("disk", figures)
