"""A reader beside a running campaign: `python -m tests.publication_reader STORE RUN CACHE STOP`.

It follows the pointer `latest` until the file STOP exists, loads each version whole and anew, and prints the versions
that it saw. It ends with 1 and a line when the pointer went back, or a file wasn't what the manifest says.
"""

import sys
import time
from pathlib import Path

from steps import paths
from steps.adapters.publications import read_pointer
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import read_manifest
from steps.adapters.store import Store, open_store


def look(store: Store, run_id: str, cache: Path) -> int | None:
    """The version that `latest` names, once it was loaded; None before there is one."""
    pointer = read_pointer(store, paths.latest_key(run_id))
    if pointer is None:
        return None
    version = int(pointer["version"])
    prefix = paths.publication_prefix(run_id, version)
    if read_manifest(store, prefix).sha256 != pointer["manifest_sha256"]:
        raise SystemExit(f"version {version}: its manifest is not the one that latest names")
    fetch_folder(store, prefix, cache)  # checks each file's SHA-256
    return version


def main() -> None:
    uri, run_id, cache, stop = sys.argv[1:]
    store, versions, number = open_store(uri), [], 0
    while True:
        is_last = Path(stop).exists()
        version = look(store, run_id, Path(cache) / str(number))
        number += 1
        if version is not None:
            if versions and version < versions[-1]:
                raise SystemExit(f"latest went back from {versions[-1]} to {version}")
            versions.append(version)
        if is_last:
            break
        time.sleep(0.05)
    print(*versions)


if __name__ == "__main__":
    main()
