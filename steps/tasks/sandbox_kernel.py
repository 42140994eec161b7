"""What the kernel enforces on a process that runs reward code: applied once, by the process itself, without privileges.

Each measure is tried by itself, and what the kernel refuses is told. Landlock (Linux 5.13) restricts files and, from
6.7, TCP: Documentation/userspace-api/landlock.rst. This module imports the standard library only.
"""

import ctypes
import errno
import os
import resource
import stat
import struct
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from steps.tasks.sandbox_seccomp import install_filter

MEASURES = ("limits", "no_new_privs", "landlock", "seccomp")
"""In the order in which they are applied: Landlock opens files, and its calls are allowed by the filter anyway."""

MAX_FILE_BYTES = 64 << 20
MAX_OPEN_FILES = 256

_PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION_3 = 0x20080522
_KEPT_CAPABILITIES = 1 << 1 | 1 << 2  # DAC_OVERRIDE, DAC_READ_SEARCH: root reads its modules whoever owns them

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same numbers on every architecture
_CREATE_RULESET_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_TRUNCATE, _IOCTL_DEV = 1 << 14, 1 << 15
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV
_NUM_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}  # of later versions: 16
_BIND_AND_CONNECT_TCP = 0b11  # from version 4
_SCOPE_SOCKETS_AND_SIGNALS = 0b11  # from version 6
_SPECIAL = 1 << 6 | 1 << 9 | 1 << 10 | 1 << 11  # devices, sockets and pipes: never made in the scratch folder
_DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def restrict(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Apply every measure to this process, for good.

    `settings`: `memory_bytes` of address space, `readable` files and folders, folders of which only the names of
    files may be `listed`, the `scratch` folder or None.

    Returns {measure: True, or Landlock's version, or why it is not in effect}.
    """
    readable, listed, scratch = settings["readable"], settings["listed"], settings["scratch"]
    apply: dict[str, Callable[[], bool | int]] = {
        "limits": lambda: _limit(settings["memory_bytes"]),
        "no_new_privs": _give_up_privileges,
        "landlock": lambda: _restrict_files(readable, listed, scratch),
        "seccomp": _restrict_calls,
    }
    effective: dict[str, Any] = {}
    for measure in MEASURES:
        try:
            effective[measure] = apply[measure]()
        except (OSError, ValueError, AttributeError) as error:  # AttributeError: a C library without the call
            effective[measure] = getattr(error, "strerror", None) or str(error)
    if effective["seccomp"] is not True:
        # Coarser: no threads either, and root is not bound by it.
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    return effective


def _limit(memory_bytes: int) -> bool:
    limits = {
        resource.RLIMIT_AS: memory_bytes,
        resource.RLIMIT_FSIZE: MAX_FILE_BYTES,
        resource.RLIMIT_NOFILE: MAX_OPEN_FILES,
        resource.RLIMIT_CORE: 0,
    }
    for number, wanted in limits.items():
        _, hard = resource.getrlimit(number)
        value = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(number, (value, value))
    return True


def _give_up_privileges() -> bool:
    _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    data = bytearray(24)
    _check(_libc().capget(header, (ctypes.c_char * 24).from_buffer(data)))
    effective, permitted = struct.unpack_from("=II", data)
    kept = struct.pack("=6I", effective & _KEPT_CAPABILITIES, permitted & _KEPT_CAPABILITIES, 0, 0, 0, 0)
    _check(_libc().capset(header, kept))
    return True


def _restrict_calls() -> bool:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    install_filter()
    return True


def _restrict_files(readable: Sequence[str], listed: Sequence[str], scratch: str | None) -> int:
    """Only these files from now on; returns the version of Landlock."""
    version = _check(_libc().syscall(_CREATE_RULESET, None, 0, _CREATE_RULESET_VERSION))
    handled = (1 << _NUM_FILE_RIGHTS.get(version, 16)) - 1
    tcp = _BIND_AND_CONNECT_TCP if version >= 4 else 0
    scopes = _SCOPE_SOCKETS_AND_SIGNALS if version >= 6 else 0
    size_bytes = 8 if version < 4 else 16 if version < 6 else 24
    rules = struct.pack("=QQQ", handled, tcp, scopes)[:size_bytes]
    ruleset = _check(_libc().syscall(_CREATE_RULESET, rules, size_bytes, 0))
    try:
        for path in readable:
            _allow(ruleset, path, (_EXECUTE | _READ_FILE | _READ_DIR) & handled)
        for path in listed:
            _allow(ruleset, path, _READ_DIR)
        for path in _DEVICES:
            _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
        if scratch is not None:
            _allow(ruleset, scratch, handled & ~_SPECIAL)
        _check(_libc().syscall(_RESTRICT_SELF, ruleset, 0))
    finally:
        os.close(ruleset)
    return version


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return  # not there, or not for this user: nothing to allow
    try:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            rights &= _FILE_RIGHTS
        rule = struct.pack("=Qi", rights, descriptor)
        _check(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0))
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result
