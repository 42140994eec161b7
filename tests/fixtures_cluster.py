"""A cluster to speak to: the API server double over HTTP, our templates installed, our operator's Role bound."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cluster_runs import TEMPLATES, install_templates
from tests.doubles.kubernetes_api import KubernetesApi, served
from tests.doubles.kubernetes_rbac import role_rules
from workflows.cluster.client import Cluster, connect

Moerl = Callable[..., tuple[int, str, str]]
"""Arguments of `moerl` -> exit code, stdout, stderr."""


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with served(KubernetesApi()) as running:
        install_templates(running)
        yield running


@pytest.fixture
def kubeconfig(api: KubernetesApi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The operator's: whoever is bound to the Role moerl-operator of our manifests, and to nothing else."""
    token = api.add_user("operator", role_rules(TEMPLATES / "install" / "rbac.yaml", "moerl-operator"))
    path = api.kubeconfig(tmp_path / "kubeconfig", token)
    monkeypatch.setenv("KUBECONFIG", str(path))
    return path


@pytest.fixture
def cluster(kubeconfig: Path) -> Cluster:
    return connect()


@pytest.fixture
def moerl(
    kubeconfig: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Moerl:
    from workflows.cli import run_command_line

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command_line(list(arguments))
        return (code, *capsys.readouterr())

    return run


def cluster_of(kubeconfig: Path) -> Cluster:
    """The cluster of another kubeconfig than the operator's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(kubeconfig))
        return connect()
