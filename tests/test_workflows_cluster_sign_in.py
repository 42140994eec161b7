"""Signing in: kubeconfigs that are none, and programs that fetch credentials and fail."""

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from steps.errors import ConfigError
from tests.doubles.kubernetes_api import KubernetesApi
from tests.fixtures_cluster import Moerl
from workflows.cluster.client import WORKFLOWS, connect

CREDENTIAL = (
    '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", '
    '"status": {"token": "%s", "expirationTimestamp": "%s"}}'
)


def use_program(kubeconfig: Path, script: str) -> None:
    """Let `script`, a shell's, fetch the credentials, as `aws eks get-token` does."""
    config: dict[str, Any] = yaml.safe_load(kubeconfig.read_text())
    program = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sh", "args": ["-c", script]}
    config["users"][0]["user"] = {"exec": program | {"interactiveMode": "IfAvailable"}}
    kubeconfig.write_text(yaml.safe_dump(config))


def credential(token: str, lasts: timedelta) -> str:
    return CREDENTIAL % (token, (datetime.now(UTC) + lasts).strftime("%Y-%m-%dT%H:%M:%SZ"))


@pytest.mark.parametrize("content", ["hello", "[]", "contexts: 3\ncurrent-context: x\n", "\x00"])
def test_a_file_that_is_no_kubeconfig_is_to_be_mended(kubeconfig: Path, moerl: Moerl, content: str) -> None:
    kubeconfig.write_text(content)
    code, out, err = moerl("status", "digits")
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert err.startswith("moerl: no cluster is configured (") and f"or mend {kubeconfig}" in err


def test_a_server_that_is_no_address_is_to_be_mended(kubeconfig: Path, api: KubernetesApi, moerl: Moerl) -> None:
    api.kubeconfig(kubeconfig, server="not a url")
    code, _, err = moerl("status", "digits")
    assert code == 78 and "'not a url' is no address" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo Unable to locate credentials >&2; exit 255", "process returned 255. Unable to locate credentials"),
        ("echo a-secret-token", "failed to decode process output"),
        ('echo \'{"apiVersion": "client.authentication.k8s.io/v1", "kind": "x", "status": {}}\'', "missing token"),
    ],
)
def test_a_program_that_fetches_no_credentials_is_told_in_one_line(
    kubeconfig: Path, moerl: Moerl, script: str, words: str
) -> None:
    use_program(kubeconfig, script)
    code, out, err = moerl("status", "digits")
    assert (code, out, err.count("\n")) == (78, "", 1)
    assert err.startswith("moerl: signing in to the cluster failed (") and words in err
    assert "a-secret-token" not in err


def test_a_program_that_is_not_there_is_named(kubeconfig: Path, moerl: Moerl) -> None:
    use_program(kubeconfig, "")
    kubeconfig.write_text(kubeconfig.read_text().replace("command: sh", "command: no-such-program"))
    code, _, err = moerl("status", "digits")
    assert code == 78 and "'no-such-program'" in err and err.count("\n") == 1


def test_resume_tells_that_signing_in_failed_and_not_only_that_no_run_is_here(kubeconfig: Path, moerl: Moerl) -> None:
    use_program(kubeconfig, "exit 1")
    code, _, err = moerl("resume", "digits")
    assert code == 78 and "no run 'digits' in runs" in err and "signing in to the cluster failed" in err


@pytest.mark.parametrize(("content", "told"), [("hello", True), (None, False)])
def test_resume_tells_of_a_kubeconfig_that_is_damaged_and_not_of_one_that_is_not_there(
    kubeconfig: Path, moerl: Moerl, content: str | None, told: bool
) -> None:
    kubeconfig.unlink() if content is None else kubeconfig.write_text(content)
    _, _, err = moerl("resume", "digits")
    assert "no run 'digits' in runs" in err and ("no cluster is configured" in err) is told


def test_a_token_that_runs_out_is_fetched_anew(kubeconfig: Path, api: KubernetesApi, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    answer.write_text(credential("stale", timedelta(hours=-1)))
    use_program(kubeconfig, f"cat {answer}")
    cluster = connect()
    answer.write_text(credential("operator-token", timedelta(hours=-1)))
    for _ in range(2):
        assert cluster.select(WORKFLOWS)[0] == []
    answer.unlink()
    with pytest.raises(ConfigError, match="signing in to the cluster failed .*No such file"):
        cluster.select(WORKFLOWS)
