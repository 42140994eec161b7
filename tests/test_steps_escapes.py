"""Names that others choose never lead out of where they belong: run ids, keys, paths in manifests, modules, links."""

import json
import os
import re
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steps import paths
from steps.adapters.local_store import LocalStore
from steps.adapters.publications import move_pointer, read_pointer, upload_folder
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import parse_manifest
from steps.adapters.store import validate_key
from steps.config import RewardConfig, TaskConfig
from steps.errors import ConfigError, DataError, StepError, UsageError
from steps.tasks.sandbox import Scorer

TRICKS = [
    "..",
    "../x",
    "a/../../x",
    "/etc/passwd",
    "//x",
    "a//b",
    "./a",
    "a/.",
    "a/",
    "",
    "\x00",
    "a\x00b",
    "a\nb",
    "a\\..\\b",
    "\\\\host\\share",
    "\u2025/x",
    "\uff0e\uff0e/x",
    "..\u2215x",
    "\u202e..",
    "a\x7f",
    "%2e%2e/x",
    "~root",
    "$(id)",
    "x" * 300,
    "\udcff",
    ".moerl/locks/x",
    "CON",
    "a:b",
]
NAMES = st.sampled_from(TRICKS) | st.text(max_size=60)
KEYS = st.lists(NAMES | st.sampled_from([".", "..", "a", ".moerl"]), min_size=1, max_size=5).map("/".join)


@given(NAMES | st.from_regex(r"[a-z0-9-]{0,45}\n?", fullmatch=True))
def test_an_accepted_run_id_is_one_plain_folder_and_a_kubernetes_name(run_id: str) -> None:
    try:
        accepted = paths.validate_run_id(run_id)
    except UsageError as error:
        assert len(str(error).splitlines()) == 1
        return
    assert accepted == run_id and len(run_id) <= 40
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", run_id)
    for key in (paths.latest_key(run_id), paths.publication_prefix(run_id, 3), paths.spool_prefix(run_id)):
        assert validate_key(key).startswith(f"runs/{run_id}/")


@given(KEYS)
def test_an_accepted_key_stays_below_the_root_however_it_is_read(key: str) -> None:
    try:
        validate_key(key)
    except (ValueError, UnicodeEncodeError) as error:
        assert type(error) is ValueError and len(str(error).splitlines()) == 1
        return
    assert os.path.normpath(f"/root/{key}") == f"/root/{key}"
    assert not PurePosixPath(key).is_absolute() and ".." not in key.split("/")
    assert not {"\x00", "\\", "\n"} & set(key)
    assert not key.startswith(".moerl/")


@given(path=KEYS, parent=KEYS, inherited=KEYS)
def test_a_manifest_with_a_path_that_leaves_its_folder_is_refused(path: str, parent: str, inherited: str) -> None:
    entry = {"path": path, "size_bytes": 1, "sha256": "0" * 64}
    delta = {"parent": parent, "parent_sha256": "0" * 64, "depth": 1, "overwrites": [entry], "inherited": [inherited]}
    for chain in (None, delta):
        raw = {"format": 2, "files": [entry], "extra": {}, "upload_id": "0" * 16, "delta": chain}
        try:
            manifest = parse_manifest(json.dumps(raw).encode(), "file:///manifest.json")
        except DataError as error:
            assert str(error).startswith("file:///manifest.json: not a manifest")
            continue
        for stored in manifest.stored:
            assert validate_key(manifest.key_of("runs/x/publications/00001", stored.path))
        if manifest.delta is not None:
            assert validate_key(manifest.delta.parent)


@pytest.mark.parametrize("upload_id", ["../../other/x", "", "0" * 15, "0" * 16 + "\n", "G" * 16, None, 5, ["0" * 16]])
def test_a_manifest_whose_upload_is_no_name_is_refused(upload_id: object) -> None:
    raw = {"format": 2, "files": [], "extra": {}, "upload_id": upload_id, "delta": None}
    with pytest.raises(DataError, match="not a manifest"):
        parse_manifest(json.dumps(raw).encode(), "file:///manifest.json")


def test_links_in_a_directory_store_do_not_lead_out_of_it(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    store = LocalStore(tmp_path / "store")
    store.put_bytes("runs/a/object", b"1")
    (tmp_path / "store/runs/folder").symlink_to(outside)
    (tmp_path / "store/runs/file").symlink_to(outside / "secret")
    for key in ("runs/folder/secret", "runs/file"):
        for use in (store.get_bytes, store.head, lambda key: store.put_bytes(key, b"2")):
            with pytest.raises(DataError, match="leads out of the store") as told:
                use(key)
            assert len(str(told.value).splitlines()) == 1
        with pytest.raises(DataError):
            store.delete([key])
        with pytest.raises(DataError):
            store.download_file(key, tmp_path / "copy")
        with pytest.raises(DataError):
            store.upload_file(outside / "secret", key)
        with pytest.raises(DataError):
            move_pointer(store, key, 1, {})
    assert [info.key for info in store.list("")] == ["runs/a/object"]
    assert (outside / "secret").read_text() == "secret"


def published(tmp_path: Path) -> LocalStore:
    store = LocalStore(tmp_path / "store")
    folder = tmp_path / "folder"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "file").write_text("content")
    upload_folder(store, folder, "runs/x/publications/00000", {})
    return store


def test_links_in_the_cache_are_never_written_through(tmp_path: Path) -> None:
    store = published(tmp_path)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "victim").write_text("kept")
    (outside / "file").write_text("kept")
    copy = fetch_folder(store, "runs/x/publications/00000", tmp_path / "cache")
    (copy / "config.json").unlink()
    (copy / "config.json").symlink_to(outside / "victim")
    (copy / "sub" / "file").unlink()
    (copy / "sub").rmdir()
    (copy / "sub").symlink_to(outside)
    try:
        copy = fetch_folder(store, "runs/x/publications/00000", tmp_path / "cache")
    except StepError as error:
        assert len(str(error).splitlines()) == 1
    else:
        assert (copy / "config.json").read_text() == "{}" and not (copy / "config.json").is_symlink()
        assert (copy / "sub" / "file").read_text() == "content"
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"victim": "kept", "file": "kept"}


@pytest.mark.parametrize(
    "name", ["../x:f", "/tmp/x.py:f", "a b:f", "os;import sys:f", ":f", "os:", "os:path.join", "..:f"]
)
def test_a_verifiers_name_is_a_module_or_refused(name: str) -> None:
    with Scorer(TaskConfig(verifier=name), RewardConfig()) as scorer, pytest.raises(ConfigError) as told:
        scorer.load()
    assert len(str(told.value).splitlines()) == 1
    assert "task.verifier" in str(told.value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b"\xff",
        b'{"version": "1"}',
        b'{"version": true}',
        b"[" * 100_000,
        b'{"version": 1e5}',
    ],
)
def test_a_pointer_that_is_none_is_refused_in_one_line(tmp_path: Path, data: bytes) -> None:
    store = LocalStore(tmp_path / "store")
    store.put_bytes("runs/x/latest.json", data)
    for use in (
        lambda: read_pointer(store, "runs/x/latest.json"),
        lambda: move_pointer(store, "runs/x/latest.json", 1, {}),
    ):
        with pytest.raises(DataError, match="not a pointer") as told:
            use()
        assert len(str(told.value).splitlines()) == 1
