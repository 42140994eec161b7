"""What reward code may read: Python, the installed packages and the user's modules, and nothing that holds a secret."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT_ROOT = Path(__file__).resolve().parents[2]

_SYSTEM = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/usr/local/lib64", "/usr/share/zoneinfo")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/localtime", "/usr/local/nvidia/lib64")
_SECRET = ("/proc", "/run", "/var/run/secrets", "/etc", "/dev", "/sys")


@dataclass(frozen=True, kw_only=True, slots=True)
class VisiblePaths:
    """`readable` files and whole folders, and folders of which only the names are `listed`, as imports need it."""

    readable: list[str]
    listed: list[str]


def visible_paths(private: Iterable[Path]) -> VisiblePaths:
    """From this process's `sys.path` and working directory.

    Of folders that are no Python installation, the working directory among them, entries whose name begins with a dot
    stay out of reach, and so does every folder that holds a `private` path, the user's home or the system's secrets.
    """
    barred = [_resolved(path) for path in (*private, *map(Path, _SECRET), Path.home())]
    readable = {Path(path) for path in (*_SYSTEM, *_SYSTEM_FILES, *_library_path())}
    readable |= {PROJECT_ROOT / name for name in ("steps", "moe")}
    for prefix in {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix}:
        readable |= {_resolved(Path(prefix, name)) for name in ("lib", "lib64", "share", "pyvenv.cfg")}
    listed = {PROJECT_ROOT}
    for entry in (*sys.path, os.getcwd()):
        folder = _resolved(Path(entry or os.curdir))
        if any(tree in readable for tree in folder.parents):
            continue
        if folder.name in ("site-packages", "dist-packages") or folder.is_file():
            readable.add(folder)
        elif folder.is_dir():
            listed.add(folder)
            readable.update(_entries(folder, barred))
    return VisiblePaths(readable=sorted(map(str, readable)), listed=sorted(map(str, listed)))


def _entries(folder: Path, barred: Sequence[Path]) -> Iterator[Path]:
    try:
        names = [entry for entry in os.listdir(folder) if not entry.startswith(".")]
    except PermissionError:
        return
    for name in names:
        path = _resolved(folder / name)  # a link may lead to what is barred
        if not any(path == secret or path in secret.parents for secret in barred):
            yield path


def _library_path() -> list[str]:
    return [entry for entry in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if entry]


def _resolved(path: Path) -> Path:
    return Path(os.path.realpath(path))
