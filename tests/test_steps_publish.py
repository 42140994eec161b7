"""Publishing: versions stored as deltas, and attempts that meet each other's work."""

import json
from pathlib import Path

from sqlalchemy import delete

from steps import paths
from steps.adapters import ledger
from steps.adapters.publications_cache import fetch_folder
from steps.adapters.publications_manifest import MANIFEST_NAME, manifest_key, read_manifest
from steps.adapters.store import sha256_of_bytes
from steps.adapters.tables import publications
from tests.fixtures_steps import RUN, STAGES, TINY_CONFIG, StepRunner
from workflows.local.warm_client import WarmServer

SLOW = TINY_CONFIG.replace("[model]", '[model]\ndtype = "bfloat16"').replace("1e-2", "1e-5")
"""bfloat16 absorbs most of such small steps, as in a real run."""


def run(runner: StepRunner, config: str) -> None:
    started = runner.init(config)
    assert started.code == 0, started.log
    for iteration in (1, 2):
        runner.iterate(iteration)


def published(runner: StepRunner, cache: Path) -> list[dict[str, bytes]]:
    folders = [fetch_folder(runner.store, paths.publication_prefix(RUN, version), cache) for version in range(3)]
    return [
        {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_NAME} for folder in folders
    ]


def test_versions_stored_as_deltas_are_those_stored_whole(
    steps: StepRunner, warm_server: WarmServer, tmp_path: Path
) -> None:
    whole = StepRunner(warm_server, tmp_path / "whole", f"{tmp_path}/whole/store", f"sqlite:///{tmp_path}/whole.sqlite")
    run(whole, SLOW)
    run(steps, f"{SLOW}\n[publish]\nfull_every = 2\n")
    manifests = [read_manifest(steps.store, paths.publication_prefix(RUN, version)) for version in range(3)]
    assert [manifest.depth for manifest in manifests] == [0, 1, 0]
    assert manifests[1].stored_bytes < 0.5 * manifests[1].size_bytes
    rows, rows_whole = (ledger.list_publications(runner.database, RUN) for runner in (steps, whole))
    assert [row.weights_sha256 for row in rows] == [row.weights_sha256 for row in rows_whole]
    assert len({row.weights_sha256 for row in rows}) == 3
    assert published(steps, tmp_path / "cache-1") == published(whole, tmp_path / "cache-2")


def until_published(steps: StepRunner) -> None:
    steps.init()
    for stage in STAGES[: STAGES.index("publish") + 1]:
        result = steps.step(stage)
        assert result.code == 0, result.log


def publish_another(steps: StepRunner, changed: str, data: bytes) -> None:
    """Make version 1 that of another attempt, which was killed before the ledger knew, with other bytes in one file."""
    prefix = paths.publication_prefix(RUN, 1)
    manifest = read_manifest(steps.store, prefix)
    steps.store.put_bytes(manifest.key_of(prefix, changed), data)
    raw = json.loads(manifest.to_bytes())
    for entry in raw["files"]:
        if entry["path"] == changed:
            entry |= {"size_bytes": len(data), "sha256": sha256_of_bytes(data)}
    steps.store.put_bytes(manifest_key(prefix), json.dumps(raw).encode())
    with steps.database.transaction() as connection:
        connection.execute(delete(publications).where(publications.c.policy_version == 1))


def test_an_attempt_agrees_with_another_of_equal_weights(steps: StepRunner) -> None:
    until_published(steps)
    publish_another(steps, "generation_config.json", b"{}")
    standing = read_manifest(steps.store, paths.publication_prefix(RUN, 1))
    again = steps.step("publish")
    assert again.code == 0, again.log
    assert ledger.get_publication(steps.database, RUN, 1).manifest_sha256 == standing.sha256
    assert read_manifest(steps.store, paths.publication_prefix(RUN, 1)) == standing


def test_an_attempt_of_another_history_is_refused(steps: StepRunner) -> None:
    until_published(steps)
    publish_another(steps, "generation_config.json", b"{}")
    key = manifest_key(paths.publication_prefix(RUN, 1))
    steps.store.put_bytes(key, steps.store.get_bytes(key).replace(b'"weights_sha256": "', b'"weights_sha256": "0'))
    again = steps.step("publish")
    assert again.code == 65 and "holds another content already" in again.log
