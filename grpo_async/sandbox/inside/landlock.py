"""Landlock: kernel rules that limit which files this process may access.

It does not hide the names, sizes and times of files. Operations that it covers only in later versions (truncate by
path) or never (chmod, chown, times) are denied by the system call filter.
"""

from __future__ import annotations

import ctypes
import os

from grpo_async.sandbox.inside import DEVICES
from grpo_async.utils.kernel import PR_SET_NO_NEW_PRIVS, prctl, syscall

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE, _IOCTL_DEVICE = 1 << 14, 1 << 15
_ON_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEVICE
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # by version; 16 since 5
_TCP = 0b11  # bind, connect; since version 4
_SCOPES = 0b11  # abstract unix sockets, signals; since version 6


def restrict(read_paths: list[str], base: str) -> None:
    """Allow this process and its children only to read `read_paths` and use `base`. OSError if the kernel refuses."""
    version = syscall("landlock", _CREATE, None, 0, 1)
    rights = (1 << _NUM_RIGHTS.get(version, 16)) - 1
    attributes = (ctypes.c_uint64 * 3)(rights, _TCP if version >= 4 else 0, _SCOPES if version >= 6 else 0)
    size = 8 if version < 4 else 16 if version < 6 else 24
    rules = syscall("landlock_create_ruleset", _CREATE, attributes, size, 0)
    for path in read_paths:
        _allow(rules, path, _READ & rights)
    for path in DEVICES:
        _allow(rules, path, (_READ_FILE | _WRITE_FILE) & rights)
    _allow(rules, base, rights)
    prctl("no_new_privs", PR_SET_NO_NEW_PRIVS, 1)
    syscall("landlock_restrict_self", _RESTRICT, rules, 0)
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    if not os.path.exists(path):
        return
    descriptor = os.open(path, os.O_PATH)
    try:
        granted = rights if os.path.isdir(path) else rights & _ON_FILES
        rule = granted.to_bytes(8, "little") + descriptor.to_bytes(4, "little")  # struct landlock_path_beneath_attr
        syscall(f"landlock_add_rule {path}", _ADD, rules, 1, ctypes.create_string_buffer(rule, len(rule)), 0)
    finally:
        os.close(descriptor)
