"""Where the steps find their services, and whether these answer, as far as that can be seen from here."""

import base64
import binascii
import http.client
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from workflows.cluster.access import CONFIG_MAPS, SECRETS
from workflows.cluster.client import Cluster
from workflows.cluster.findings import Finding, fail, ok, skip, warn

TIMEOUT_S = 3.0
DEFAULT_PORTS = {"http": 80, "https": 443, "postgresql": 5432}
EXAMPLE_BUCKET = "example-bucket"


def environment_findings(cluster: Cluster, name: str) -> Iterator[Finding]:
    """The ConfigMap: the store and MLflow."""
    data = cluster.get(CONFIG_MAPS, name).get("data") or {}
    yield from _store_findings(cluster, name, data)
    tracking = _without_password(data.get("mlflow-tracking-uri", ""))
    if tracking:
        yield _mlflow_finding(tracking)
    else:
        mend = f"set mlflow-tracking-uri in the ConfigMap {name}"
        yield warn("MLflow", "none is configured: metrics wait in the store's spool", mend)


def _store_findings(cluster: Cluster, name: str, data: Mapping[str, str]) -> Iterator[Finding]:
    store = data.get("store", "")
    mend = f"set store in the ConfigMap {name} to s3://BUCKET/PREFIX (templates/install/environment.yaml)"
    bucket = urlsplit(store).netloc
    if not store.startswith("s3://") or not bucket:
        yield fail("store", f"{name} says store = {store!r}, which pods on several nodes can't share", mend)
        return
    if bucket == EXAMPLE_BUCKET:
        yield fail("store", f"{name} still says {store}, the example", mend)
        return
    endpoint = _without_password(data.get("s3-endpoint-url", ""))
    url = endpoint or f"https://{bucket}.s3.amazonaws.com"
    yield _reachable("store", f"{store} at {url}", url, "is the bucket's region reachable, the S3 server up?")


def secret_findings(cluster: Cluster, name: str) -> Iterator[Finding]:
    """The Secret's keys, and whether the database that it names can be reached. No value is ever shown."""
    data = cluster.get(SECRETS, name).get("data") or {}
    example = "templates/secret.example.yaml"
    if "database-url" not in data:
        yield fail("credentials", f"Secret {name} has no key database-url", f"add it as {example} says")
        return
    pair = [key for key in ("aws-access-key-id", "aws-secret-access-key") if key in data]
    if len(pair) == 1:
        yield fail("credentials", f"Secret {name} has {pair[0]} but not its partner", f"add both, or none ({example})")
    else:
        keys = "static keys of the store" if pair else "no static keys: pods use Pod Identity, IRSA or the node's role"
        yield ok("credentials", f"Secret {name} has database-url and {keys}")
    yield _database_finding(name, data["database-url"])


def _database_finding(name: str, encoded: str) -> Finding:
    mend = f"set database-url in the Secret {name} to postgresql+psycopg://USER:PASSWORD@HOST:5432/DATABASE"
    try:
        address = urlsplit(base64.b64decode(encoded, validate=True).decode().strip())
        host, port = address.hostname, address.port or DEFAULT_PORTS["postgresql"]
    except (binascii.Error, ValueError):
        return fail("database", "database-url is not an address", mend)
    if address.scheme != "postgresql+psycopg" or not host:
        return fail("database", "database-url is no postgresql+psycopg:// address: pods share a PostgreSQL", mend)
    return _reachable("database", f"PostgreSQL at {host}", f"postgresql://{host}:{port}", "is the database up?")


def _mlflow_finding(uri: str) -> Finding:
    """MLflow is a mirror: a run goes on without it."""
    if urlsplit(uri).scheme not in ("http", "https"):
        return warn("MLflow", f"{uri} is no server that pods can share", "give the address of an MLflow server")
    reached = _reachable("MLflow", uri, uri, "is the server up? metrics wait in the store's spool meanwhile")
    if reached.state != "ok":
        return reached if reached.state == "skip" else warn("MLflow", reached.detail, reached.mend)
    try:
        with urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=TIMEOUT_S) as answer:
            answer.read()
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        what = " ".join(str(error).split()) or type(error).__name__
        return warn("MLflow", f"{uri}/health: {what}", "is this an MLflow server? look at its log")
    return ok("MLflow", f"{uri} answers")


def _without_password(uri: str) -> str:
    """Neither shown nor sent: connecting needs none."""
    return re.sub(r"(?<=//)[^/@]*@", "", uri)


def _reachable(check: str, what: str, url: str, mend: str) -> Finding:
    """Whether a TCP connection can be made; names that only the cluster resolves say nothing about the pods' view."""
    try:
        address = urlsplit(url)
        host, port = address.hostname or "", address.port or DEFAULT_PORTS[address.scheme]
    except (ValueError, KeyError):
        return fail(check, f"{url} is not an address", mend)
    try:
        socket.getaddrinfo(host, port)
    except OSError:
        return skip(check, f"{what}: {host} can't be resolved from here, as a name inside the cluster can't")
    try:
        socket.create_connection((host, port), timeout=TIMEOUT_S).close()
    except OSError as error:
        return warn(check, f"{what} can't be reached from here: {error.strerror or error}", mend)
    return ok(check, f"{what} can be reached from here")
