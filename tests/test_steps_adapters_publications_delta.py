"""Publications stored as deltas: what a reader gets, and what it gets when something is broken or killed."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from steps.adapters import publications_chain, publications_delta
from steps.adapters.cache_eviction import stamps_file
from steps.adapters.publications import upload_folder
from steps.adapters.publications_cache import fetch_files, fetch_folder
from steps.adapters.publications_delta import Parent, upload_delta
from steps.adapters.publications_manifest import MANIFEST_NAME, read_manifest
from steps.adapters.store import NotFound, Store, open_store
from steps.errors import DataError
from tests import forked

torch.set_num_threads(1)
EXTRA = {"v": 1}


def prefix(version: int) -> str:
    return f"runs/r/publications/{version:05d}"


def contents(path: Path) -> dict[str, bytes]:
    files = (file for file in path.rglob("*") if file.is_file() and file.name != MANIFEST_NAME)
    return {file.relative_to(path).as_posix(): file.read_bytes() for file in files}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Folders of four policy versions: 2 % of the weights change each time, the settings never."""
    folders = []
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(300, 500, generator=generator).bfloat16() for name in ("a", "b")}
    for version in range(4):
        folder = tmp_path / f"version-{version}"
        folder.mkdir()
        (folder / "config.json").write_text('{"layers": 2}')
        (folder / "probe.json").write_text(json.dumps({"version": version}))
        for number, (name, weight) in enumerate(weights.items(), 1):
            save_file({name: weight}, folder / f"model-{number:05d}-of-00002.safetensors")
            weights[name] = torch.where(torch.rand(weight.shape, generator=generator) < 0.02, -weight, weight)
        folders.append(folder)
    return folders


def publish(store: Store, folders: list[Path]) -> None:
    upload_folder(store, folders[0], prefix(0), EXTRA)
    for version, folder in enumerate(folders[1:], 1):
        upload_delta(store, folder, prefix(version), EXTRA, Parent(prefix(version - 1), folders[version - 1]))


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.unlink()
    path.write_bytes(bytes(data))


def object_of(store: Store, version: int, path: str) -> Path:
    key = read_manifest(store, prefix(version)).key_of(prefix(version), path)
    return Path(store.uri_of(key).removeprefix("file://"))


WEIGHTS = "model-00001-of-00002.safetensors"


def test_a_reader_gets_the_bytes_of_the_full_publication(store_uri: str, versions: list[Path], tmp_path: Path) -> None:
    store = open_store(store_uri)
    publish(store, versions)
    for version in (3, 1, 0, 2):  # a late joiner, then versions whose parents or children are there
        fetched = fetch_folder(store, prefix(version), tmp_path / "cache")
        assert contents(fetched) == contents(versions[version])
        full = upload_folder(store, versions[version], f"full/{version}", EXTRA)
        manifest = read_manifest(store, prefix(version))
        assert (manifest.files, manifest.sha256, manifest.depth) == (full.files, full.sha256, version)
        assert {info.key for info in store.list(prefix(version))} == {
            f"{prefix(version)}/{MANIFEST_NAME}",
            *(manifest.key_of(prefix(version), entry.path) for entry in manifest.stored),
        }


def test_only_what_changed_is_stored(store: Store, versions: list[Path]) -> None:
    publish(store, versions)
    manifest = read_manifest(store, prefix(1))
    assert [entry.path for entry in manifest.stored] == [
        "probe.json",
        "model-00001-of-00002.safetensors.delta",
        "model-00002-of-00002.safetensors.delta",
    ]
    assert manifest.stored_bytes < 0.05 * manifest.size_bytes


def test_a_worker_that_has_the_parent_reads_the_delta_only(store: Store, versions: list[Path], tmp_path: Path) -> None:
    publish(store, versions)
    fetch_folder(store, prefix(2), tmp_path / "cache")
    for version in (0, 1, 2):
        object_of(store, version, "probe.json").unlink()
    object_of(store, 0, WEIGHTS).unlink()
    assert contents(fetch_folder(store, prefix(3), tmp_path / "cache")) == contents(versions[3])


def test_settings_come_without_the_weights(store: Store, versions: list[Path], tmp_path: Path) -> None:
    publish(store, versions)
    fetched = fetch_files(store, prefix(3), tmp_path / "cache", ["config.json", "probe.json"])
    assert contents(fetched) == {name: (versions[3] / name).read_bytes() for name in ("config.json", "probe.json")}
    assert contents(fetch_folder(store, prefix(3), tmp_path / "cache")) == contents(versions[3])


def test_publishing_a_delta_again_or_whole_is_harmless(store: Store, versions: list[Path]) -> None:
    publish(store, versions)
    before = store.list("")
    first = read_manifest(store, prefix(1))
    parent = Parent(prefix(0), versions[0])
    assert upload_delta(store, versions[1], prefix(1), EXTRA, parent) == first
    assert upload_folder(store, versions[1], prefix(1), EXTRA) == first
    assert store.list("") == before
    with pytest.raises(DataError, match="holds another content already"):
        upload_delta(store, versions[2], prefix(1), EXTRA, parent)
    assert store.list("") == before


@pytest.mark.parametrize("change", ["all elements", "other tensors", "no safetensors"])
def test_weights_without_a_small_delta_are_stored_whole(
    store: Store, versions: list[Path], tmp_path: Path, change: str
) -> None:
    upload_folder(store, versions[0], prefix(0), EXTRA)
    for file in versions[1].glob("*.safetensors"):
        tensors = load_file(file)
        if change == "all elements":
            tensors = {name: torch.randn(tensor.shape).bfloat16() for name, tensor in tensors.items()}
        if change == "other tensors":
            tensors = {name: tensor[:-1].clone() for name, tensor in tensors.items()}
        save_file(tensors, file)
        if change == "no safetensors":
            file.write_bytes(b"no tensors")
    manifest = upload_delta(store, versions[1], prefix(1), EXTRA, Parent(prefix(0), versions[0]))
    assert manifest.delta is None and manifest.depth == 0
    assert contents(fetch_folder(store, prefix(1), tmp_path / "cache")) == contents(versions[1])


@pytest.mark.parametrize("version", [0, 2, 3])
def test_a_damaged_link_of_the_chain_is_refused_by_name(
    store: Store, versions: list[Path], tmp_path: Path, version: int
) -> None:
    publish(store, versions)
    name = WEIGHTS if version == 0 else f"{WEIGHTS}.delta"
    damage(object_of(store, version, name))
    with pytest.raises(DataError, match=f"{prefix(version)}/[0-9a-f]+/{name}: expected sha256"):
        fetch_folder(store, prefix(3), tmp_path / "cache")
    if version > 1:
        assert contents(fetch_folder(store, prefix(1), tmp_path / "cache")) == contents(versions[1])


def test_a_missing_or_exchanged_parent_is_refused_by_name(store: Store, versions: list[Path], tmp_path: Path) -> None:
    publish(store, versions)
    key = f"{prefix(1)}/{MANIFEST_NAME}"
    text = store.get_bytes(key)
    store.delete([key])
    with pytest.raises(NotFound, match=f"{prefix(1)}/{MANIFEST_NAME}"):
        fetch_folder(store, prefix(3), tmp_path / "cache")
    store.put_bytes(key, store.get_bytes(f"{prefix(0)}/{MANIFEST_NAME}"))
    with pytest.raises(DataError, match=rf"{prefix(2)}: is a delta to manifest .* but its parent {prefix(1)} has"):
        fetch_folder(store, prefix(3), tmp_path / "cache")
    store.put_bytes(key, text)
    assert contents(fetch_folder(store, prefix(3), tmp_path / "cache")) == contents(versions[3])


def test_a_delta_of_other_weights_under_a_right_checksum_is_refused(
    store: Store, versions: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, versions[:2])
    monkeypatch.setattr(publications_chain, "apply_delta", lambda delta, target: None)  # as one that misses a change
    with pytest.raises(DataError, match=f"{prefix(1)}/{WEIGHTS[:5]}.*: expected sha256"):
        fetch_folder(store, prefix(1), tmp_path / "cache")


def test_a_copy_that_rotted_on_the_disk_does_not_rot_the_next_version(
    store: Store, versions: list[Path], tmp_path: Path
) -> None:
    publish(store, versions)
    copy = fetch_folder(store, prefix(2), tmp_path / "cache")
    damage(copy / WEIGHTS)
    stamps = json.loads(stamps_file(copy).read_text())
    status = (copy / WEIGHTS).stat()
    stamps[WEIGHTS] = [status.st_size, status.st_mtime_ns, status.st_ctime_ns]  # nobody saw it happen
    stamps_file(copy).write_text(json.dumps(stamps))
    assert contents(fetch_folder(store, prefix(3), tmp_path / "cache")) == contents(versions[3])


def test_no_delta_is_published_to_a_parent_that_rotted(store: Store, versions: list[Path], tmp_path: Path) -> None:
    upload_folder(store, versions[0], prefix(0), EXTRA)
    shutil.copytree(versions[0], tmp_path / "rotten")
    damage(tmp_path / "rotten" / WEIGHTS)
    with pytest.raises(DataError, match=f"rotten/{WEIGHTS}: expected sha256"):
        upload_delta(store, versions[1], prefix(1), EXTRA, Parent(prefix(0), tmp_path / "rotten"))
    assert store.list(prefix(1)) == []


def killed_in(owner: object, name: str, action: Callable[[], object]) -> None:
    """Run `action` in a process that is killed when the function `name` of `owner` has returned for the first time."""
    original: Callable[..., object] = getattr(owner, name)

    def fatal(*arguments: object, **options: object) -> object:
        original(*arguments, **options)
        os.kill(os.getpid(), signal.SIGKILL)
        return None

    def main() -> None:
        setattr(owner, name, fatal)
        action()

    code, output = forked.start(main).finish()
    assert code == -signal.SIGKILL, output


@pytest.mark.parametrize("name", ["read_chain", "fetch_file", "apply_delta"])
def test_a_reader_that_was_killed_leaves_the_old_version_and_no_half_of_the_new_one(
    store: Store, versions: list[Path], tmp_path: Path, name: str
) -> None:
    from steps.adapters import publications_cache

    publish(store, versions)
    cache = tmp_path / "cache"
    old = fetch_folder(store, prefix(1), cache)
    owner = publications_chain if name == "apply_delta" else publications_cache
    killed_in(owner, name, lambda: fetch_folder(store, prefix(3), cache))
    assert contents(old) == contents(versions[1])
    assert not (cache / read_manifest(store, prefix(3)).sha256).exists()
    assert contents(fetch_folder(store, prefix(3), cache)) == contents(versions[3])


@pytest.mark.parametrize("name", ["write_delta", "upload_files", "finish_manifest"])
def test_a_writer_that_was_killed_has_published_all_or_nothing(
    store: Store, versions: list[Path], tmp_path: Path, name: str
) -> None:
    publish(store, versions[:2])
    parent = Parent(prefix(1), versions[1])
    killed_in(publications_delta, name, lambda: upload_delta(store, versions[2], prefix(2), EXTRA, parent))
    assert (store.head(f"{prefix(2)}/{MANIFEST_NAME}") is not None) == (name == "finish_manifest")
    assert contents(fetch_folder(store, prefix(1), tmp_path / "cache")) == contents(versions[1])
    manifest = upload_delta(store, versions[2], prefix(2), EXTRA, parent)
    assert len(store.list(prefix(2))) == 1 + len(manifest.stored)
    assert contents(fetch_folder(store, prefix(2), tmp_path / "cache")) == contents(versions[2])


@pytest.mark.parametrize(
    "change",
    [
        {"parent": "../elsewhere"},
        {"parent_sha256": "0"},
        {"depth": 0},
        {"depth": "1"},
        {"inherited": ["config.json", "config.json"]},
        {"inherited": ["not there"]},
        {"inherited": [WEIGHTS]},
        {"overwrites": [{"path": "../../escape", "size_bytes": 1, "sha256": "0" * 64}]},
        {"unknown": 1},
    ],
)
def test_a_malformed_delta_in_a_manifest_is_refused(
    store: Store, versions: list[Path], tmp_path: Path, change: dict[str, object]
) -> None:
    publish(store, versions[:2])
    key = f"{prefix(1)}/{MANIFEST_NAME}"
    raw = json.loads(store.get_bytes(key))
    raw["delta"] |= change
    store.put_bytes(key, json.dumps(raw).encode())
    with pytest.raises(DataError, match=r"manifest\.json: not a manifest"):
        fetch_folder(store, prefix(1), tmp_path / "cache")
