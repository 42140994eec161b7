"""Find the cluster that the kubeconfig names, or that we run in, and sign in to it."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import urllib3
import yaml
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from steps.errors import ConfigError

SERVICE_ACCOUNT_TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount/token"
FAULTY_FILE = (OSError, yaml.YAMLError, ValueError, TypeError, AttributeError)
"""What the kubernetes package meets, besides its own exception, in a file that is no kubeconfig: it checks little."""


def sign_in(context: str) -> tuple[Any, str, str]:
    """(the package's Configuration, name of the context, its namespace or ""); an empty `context` is the current one.

    NoCluster when there is no kubeconfig; ConfigError when it can't be used, or when the program that fetches the
    credentials fails.
    """
    configuration = kubernetes_client.Configuration()
    files = os.environ.get("KUBECONFIG") or "~/.kube/config"
    exists = any(os.path.exists(os.path.expanduser(file)) for file in files.split(os.pathsep))
    named, namespace = context, ""
    try:
        if not exists and os.path.exists(SERVICE_ACCOUNT_TOKEN) and "KUBERNETES_SERVICE_HOST" in os.environ:
            kubernetes_config.load_incluster_config(client_configuration=configuration)
            named = named or "in-cluster"
        else:
            contexts, active = kubernetes_config.list_kube_config_contexts(files)
            chosen = next((entry for entry in contexts if entry["name"] == context), active) or {}
            named, namespace = named or chosen.get("name", ""), chosen.get("context", {}).get("namespace", "")
            with _failures_raised():
                kubernetes_config.load_kube_config(files, context or None, configuration, persist_config=False)
            _raise_failures_of_renewal(configuration)
    except (kubernetes_config.ConfigException, *FAULTY_FILE) as error:
        mend = f"{'mend' if exists else 'create'} {files} with your cluster's tool"
        kind = ConfigError if exists else NoCluster
        raise kind(f"no cluster is configured ({_one_line(error)}): set KUBECONFIG, or {mend}") from None
    # A refused connection is told at once; what may be repeated is repeated by the caller.
    configuration.retries = urllib3.Retry(total=0)
    return configuration, named, namespace


class NoCluster(ConfigError):
    """Nothing says which cluster is meant."""


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(_one_line(record.getMessage()))


@contextmanager
def _failures_raised() -> Iterator[None]:
    """The package only logs that signing in failed, and goes on as nobody: raise it instead.

    It never logs what the program printed on stdout, where the token is.
    """
    collector, logger = _Collector(), logging.getLogger()
    logger.addHandler(collector)
    try:
        yield
    finally:
        logger.removeHandler(collector)
    if collector.messages:
        # On a terminal the program's stderr is the terminal, and the package stumbles over not having it.
        said = next((text for text in collector.messages if "NoneType" not in text), "it says why above")
        raise ConfigError(
            f"signing in to the cluster failed ({said}): sign in with your cluster's tool, or try the exec command of "
            "the user in your kubeconfig by hand"
        )


def _raise_failures_of_renewal(configuration: Any) -> None:
    """The same when a token has run out and is fetched anew, as in a watch that lasts longer than a token."""
    renew = configuration.refresh_api_key_hook
    if renew is None:
        return

    def renewed(current: Any) -> None:
        with _failures_raised():
            renew(current)
        _raise_failures_of_renewal(current)  # the package has put its own hook back

    configuration.refresh_api_key_hook = renewed


def _one_line(text: object) -> str:
    return " ".join(str(text).split())
