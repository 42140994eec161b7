"""What a fault does to files: a locked database, a cache or a trainer's state that is not what was written."""

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from steps import paths

LOCK_WAIT_S = 30.0
NOTHING = "nothing was there to damage"


def lock_database(database: Path, seconds: float) -> None:
    """Keep every writer out of an SQLite file; readers go on."""
    with closing(sqlite3.connect(database, timeout=LOCK_WAIT_S, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        time.sleep(seconds)
        connection.execute("ROLLBACK")


def damage_cache(cache: Path, damage: str) -> str:
    """Delete all that is cached (`wipe`), or change one byte in the largest cached file; what was done."""
    if damage == "wipe":
        shutil.rmtree(cache, ignore_errors=True)
        return f"{cache.name} deleted"
    largest = _largest_file(cache)
    if largest is None:
        return NOTHING
    place = largest.stat().st_size // 2
    with largest.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 1]))
    return f"byte {place} of {largest.relative_to(cache)} changed"


def truncate_partial_checkpoint(store: Path, run_id: str, iteration: int) -> str:
    """Cut the largest file of the newest trainer state inside an update in half; what was done."""
    folder = store / paths.partial_checkpoints_prefix(run_id, iteration)
    newest = max(folder.iterdir(), default=None) if folder.is_dir() else None
    largest = _largest_file(newest) if newest is not None else None
    if largest is None:
        return NOTHING
    size_bytes = largest.stat().st_size // 2
    with largest.open("r+b") as file:
        file.truncate(size_bytes)
    return f"{largest.relative_to(store)} cut to {size_bytes} bytes"


def _largest_file(folder: Path) -> Path | None:
    files = [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size]
    return max(files, key=lambda path: (path.stat().st_size, path), default=None)
