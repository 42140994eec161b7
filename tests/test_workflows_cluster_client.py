"""The client: finding the cluster, and one line for whatever it refuses or fails to answer."""

import socket
import ssl
import threading
from pathlib import Path

import pytest

from steps.errors import ConfigError, ServiceUnavailable, StepError
from tests.cluster_runs import campaign, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_store import ApiError
from tests.fixtures_cluster import cluster_of
from workflows.cluster.client import (
    WORKFLOWS,
    Cluster,
    Conflict,
    ConnectionLost,
    Expired,
    Forbidden,
    NotFound,
    NotInstalled,
    connect,
)


def refusal(cluster: Cluster, kind: type[StepError], **call: str) -> str:
    with pytest.raises(kind) as caught:
        cluster.select(WORKFLOWS, **call)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_the_namespace_is_the_contexts_unless_another_is_named(kubeconfig: Path) -> None:
    assert connect().namespace == "moerl"
    assert connect(namespace="other").namespace == "other"
    kubeconfig.write_text(kubeconfig.read_text().replace("namespace: moerl", "namespace: training"))
    assert connect().namespace == "training"
    assert connect().context == "double"


def test_a_context_without_a_namespace_means_moerl(kubeconfig: Path) -> None:
    kubeconfig.write_text(kubeconfig.read_text().replace("    namespace: moerl\n", ""))
    assert connect().namespace == "moerl"


@pytest.mark.parametrize("content", [None, "", "{", "apiVersion: v1\nkind: Config\n"])
def test_a_missing_or_damaged_kubeconfig_is_a_configuration_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    path = tmp_path / "kubeconfig"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ConfigError, match="no cluster is configured .*: set KUBECONFIG") as caught:
        connect()
    assert "\n" not in str(caught.value)


def test_an_unknown_context_is_named(kubeconfig: Path) -> None:
    with pytest.raises(ConfigError, match="no-such-context"):
        connect(context="no-such-context")


def test_a_cluster_that_is_down_is_named_with_its_context(api: KubernetesApi, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
    api.kubeconfig(tmp_path / "down", server=address)
    text = refusal(cluster_of(tmp_path / "down"), ConnectionLost)
    assert address in text and "Connection refused" in text and "'double'" in text


def test_a_host_that_does_not_exist_is_said_so(api: KubernetesApi, tmp_path: Path) -> None:
    api.kubeconfig(tmp_path / "nowhere", server="http://no-such-host.invalid:6443")
    assert "no-such-host.invalid" in refusal(cluster_of(tmp_path / "nowhere"), ConnectionLost)


def test_a_server_that_does_not_speak_tls_is_a_connection_that_is_not_secure(
    api: KubernetesApi, tmp_path: Path
) -> None:
    api.kubeconfig(tmp_path / "tls", server=api.url.replace("http:", "https:"))
    text = refusal(cluster_of(tmp_path / "tls"), ConnectionLost)
    assert text.startswith("no secure connection to the cluster at https://") and "certificate-authority-data" in text


def test_a_certificate_that_nobody_vouches_for_is_refused(
    api: KubernetesApi, tmp_path: Path, self_signed: ssl.SSLContext
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(10)
        api.kubeconfig(tmp_path / "tls", server=f"https://127.0.0.1:{listener.getsockname()[1]}")

        def shake_hands() -> None:
            connection, _ = listener.accept()
            with pytest.raises(ssl.SSLError):
                self_signed.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=shake_hands)
        thread.start()
        text = refusal(cluster_of(tmp_path / "tls"), ConnectionLost)
        thread.join()
    assert "(self-signed certificate)" in text and text.startswith("no secure connection")


def test_a_wrong_token_asks_to_sign_in_again(api: KubernetesApi, tmp_path: Path) -> None:
    api.kubeconfig(tmp_path / "stale", token="expired")
    assert "sign in again" in refusal(cluster_of(tmp_path / "stale"), ConfigError)


def test_what_is_forbidden_says_who_may_not_do_what(api: KubernetesApi, tmp_path: Path) -> None:
    token = api.add_user("guest", [])
    api.kubeconfig(tmp_path / "guest", token=token)
    text = refusal(cluster_of(tmp_path / "guest"), Forbidden)
    assert 'User "guest" cannot list resource "workflows"' in text and "moerl-operator" in text


def test_a_cluster_without_argo_is_told_from_a_workflow_that_is_missing(api: KubernetesApi, cluster: Cluster) -> None:
    with pytest.raises(NotFound, match='workflows.argoproj.io "absent" not found'):
        cluster.get(WORKFLOWS, "absent")
    api.remove_group("argoproj.io")
    with pytest.raises(NotInstalled, match="no workflows.argoproj.io: install Argo Workflows"):
        cluster.get(WORKFLOWS, "absent")


def test_a_server_that_is_no_cluster_is_said_so(api: KubernetesApi, cluster: Cluster) -> None:
    api.remove_group("argoproj.io")
    with pytest.raises(NotInstalled):
        cluster.call("GET", "/healthz-of-something-else", resource=WORKFLOWS)


@pytest.mark.parametrize("code", [429, 500, 503])
def test_a_server_in_trouble_is_unavailable(api: KubernetesApi, cluster: Cluster, code: int) -> None:
    api.refuse("GET", ApiError(code, "InternalError", "etcdserver: request timed out"))
    assert f"{code} etcdserver: request timed out" in refusal(cluster, ServiceUnavailable)


@pytest.mark.parametrize("text", ["<html>Log in</html>", '["a"]', '{"hello": 1}', ""])
def test_an_answer_that_is_not_kubernetes_is_said_so(api: KubernetesApi, cluster: Cluster, text: str) -> None:
    api.answer("GET", 200, text)
    assert "which is no Kubernetes API: look at `server`" in refusal(cluster, ServiceUnavailable)


@pytest.mark.parametrize("code", [403, 404])
def test_a_refusal_of_a_proxy_is_told_from_one_of_the_cluster(api: KubernetesApi, cluster: Cluster, code: int) -> None:
    api.answer("GET", code, "<html>no</html>")
    text = refusal(cluster, ConfigError)
    assert f"{code} " in text and "no Kubernetes API ('<html>no</html>')" in text and "moerl-operator" not in text


def test_whoever_is_not_signed_in_is_not_sent_for_rights(api: KubernetesApi, cluster: Cluster) -> None:
    api.refuse("GET", ApiError(403, "Forbidden", 'User "system:anonymous" cannot list resource "workflows"'))
    assert "does not accept our credentials (403): sign in again" in refusal(cluster, ConfigError)


def test_a_connection_that_is_cut_is_lost(api: KubernetesApi, cluster: Cluster) -> None:
    api.refuse("GET")
    assert api.url in refusal(cluster, ConnectionLost)


def test_a_long_list_is_read_page_after_page(api: KubernetesApi, cluster: Cluster) -> None:
    for number in range(230):
        api.add("workflows", campaign(f"run-{number:03d}", status("Succeeded")))
    items, _ = cluster.select(WORKFLOWS)
    assert [item["metadata"]["name"] for item in items] == [f"run-{number:03d}" for number in range(230)]
    assert len([request for _, request in api.calls if request.verb == "list"]) == 3


def test_a_list_whose_pages_expire_is_read_again(api: KubernetesApi, cluster: Cluster) -> None:
    for number in range(150):
        api.add("workflows", campaign(f"run-{number:03d}", status("Succeeded")))
    api.refuse("continue=", ApiError(410, "Expired", "The provided continue parameter is too old"))
    assert len(cluster.select(WORKFLOWS)[0]) == 150


def test_a_list_of_metadata_that_is_empty(api: KubernetesApi, cluster: Cluster) -> None:
    assert cluster.select(WORKFLOWS, metadata_only=True)[0] == []


def test_metadata_alone_can_be_asked_for(api: KubernetesApi, cluster: Cluster) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    items, _ = cluster.select(WORKFLOWS, metadata_only=True)
    assert [set(item) for item in items] == [{"metadata"}]


def test_a_name_that_is_taken_is_a_conflict(api: KubernetesApi, cluster: Cluster) -> None:
    body = campaign("digits", status("Running"))
    cluster.create(WORKFLOWS, body)
    with pytest.raises(Conflict, match='"digits" already exists'):
        cluster.create(WORKFLOWS, body)


def test_a_change_of_an_old_version_is_a_conflict(api: KubernetesApi, cluster: Cluster) -> None:
    old = api.add("workflows", campaign("digits", status("Running")))["metadata"]["resourceVersion"]
    cluster.merge_patch(WORKFLOWS, "digits", {"spec": {"suspend": True}})
    with pytest.raises(Conflict, match="has been modified"):
        cluster.merge_patch(WORKFLOWS, "digits", {"metadata": {"resourceVersion": old}})


def test_a_watch_streams_what_changes_and_ends_at_the_servers_limit(api: KubernetesApi, cluster: Cluster) -> None:
    _, version = cluster.select(WORKFLOWS)
    api.watch_limit_s = 0.2
    api.add("workflows", campaign("digits", status("Running")))
    api.patch("workflows", "digits", {"metadata": {"labels": {"moerl/run": "other"}}})
    events = list(cluster.watch(WORKFLOWS, "moerl/run=digits", version))
    assert [event["type"] for event in events] == ["ADDED", "DELETED", "BOOKMARK"]


def test_a_watch_from_a_forgotten_version_has_expired(api: KubernetesApi, cluster: Cluster) -> None:
    _, version = cluster.select(WORKFLOWS)
    api.add("workflows", campaign("digits", status("Running")))
    api.store.forget_history()
    with pytest.raises(Expired, match="too old resource version"):
        list(cluster.watch(WORKFLOWS, "", version))


def test_a_watch_that_is_refused_at_once_has_expired_as_well(api: KubernetesApi, cluster: Cluster) -> None:
    api.refuse("watch=true", ApiError(410, "Gone", "too old resource version: 1 (1000)"))
    with pytest.raises(Expired, match="too old resource version"):
        list(cluster.watch(WORKFLOWS, "", "1"))


def test_a_watch_that_is_cut_is_a_lost_connection(api: KubernetesApi, cluster: Cluster) -> None:
    _, version = cluster.select(WORKFLOWS)
    api.refuse("WATCH workflows")
    with pytest.raises(ConnectionLost):
        list(cluster.watch(WORKFLOWS, "", version))


@pytest.fixture
def self_signed(tmp_path: Path) -> ssl.SSLContext:
    """A server's TLS with a certificate of its own making."""
    from datetime import UTC, datetime, timedelta

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.now(UTC)
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    builder = builder.serial_number(1).not_valid_before(now).not_valid_after(now + timedelta(days=1))
    pem = tmp_path / "server.pem"
    pem.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    return context
