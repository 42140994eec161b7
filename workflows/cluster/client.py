"""The Kubernetes API as the cluster commands need it: plain objects, and every failure as one line.

The kubernetes package finds the cluster and signs in (kubeconfig, exec plugins, a pod's service account); objects stay
dicts, since Argo's, JobSet's and Kueue's have no models there.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import urllib3
from kubernetes import client as kubernetes_client
from kubernetes.client.exceptions import ApiException

from steps.errors import ConfigError, DataError, ServiceUnavailable, UsageError
from workflows.cluster.sign_in import sign_in

Object = dict[str, Any]
DEFAULT_NAMESPACE = "moerl"
CONNECT_TIMEOUT_S = 5.0
READ_TIMEOUT_S = 30.0
WATCH_TIMEOUT_S = 300
"""The server ends a watch after this; the next one goes on where it ended."""
PAUSES_S = (1.0, 2.0, 4.0, 8.0, 15.0)
"""Before each new try after the cluster broke off; after the last one the error is the caller's."""
PAGE_SIZE = 100
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
MERGE_PATCH = "application/merge-patch+json"
NOT_SERVED = "404 page not found"
"""What a kube-apiserver says of a path that no kind of object has."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resource:
    """One kind of object by its address."""

    group: str
    version: str
    plural: str
    namespaced: bool = True
    product: str = "Kubernetes"
    """Who serves it, for the message when nobody does."""

    def __str__(self) -> str:
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}{scope}/{self.plural}" + (f"/{name}" if name else "")


def _argo(plural: str) -> Resource:
    return Resource(group="argoproj.io", version="v1alpha1", plural=plural, product="Argo Workflows")


WORKFLOWS = _argo("workflows")
WORKFLOW_TEMPLATES = _argo("workflowtemplates")
CRON_WORKFLOWS = _argo("cronworkflows")
PODS = Resource(group="", version="v1", plural="pods")


class NotFound(DataError):
    """There is no such object."""


class NotInstalled(ConfigError):
    """The cluster does not serve this kind of object."""


class Forbidden(ConfigError):
    """The cluster knows us, and we may not."""


class Refused(ConfigError):
    """The cluster finds the request itself at fault, as one for the log of a container that has not started."""


class Conflict(UsageError):
    """The object exists already, or somebody else changed it meanwhile."""


class Expired(ServiceUnavailable):
    """410: the version to watch from is forgotten; list again."""


class ConnectionLost(ServiceUnavailable):
    """The cluster was not reached, can't answer now, or went away in the middle of an answer."""


class Cluster:
    """One namespace of one cluster."""

    def __init__(self, api: Any, *, namespace: str, context: str) -> None:
        self._api = api
        self.namespace = namespace
        self.context = context

    def get(self, resource: Resource, name: str) -> Object:
        """The object; NotFound when there is none of this name."""
        return self.call("GET", resource.path(self.namespace, name), resource=resource)

    def select(
        self, resource: Resource, selector: str = "", *, metadata_only: bool = False
    ) -> tuple[list[Object], str]:
        """All objects that match the label selector, and the version to watch from.

        `metadata_only` leaves out all but the metadata: a Workflow with its nodes may take a megabyte.
        """
        try:
            return self._select(resource, selector, metadata_only)
        except Expired:  # the pages took so long that the server forgot the version of the first one
            return self._select(resource, selector, metadata_only)

    def _select(self, resource: Resource, selector: str, metadata_only: bool) -> tuple[list[Object], str]:
        items: list[Object] = []
        query = {"labelSelector": selector, "limit": str(PAGE_SIZE)}
        accept = METADATA_ONLY if metadata_only else "application/json"
        while True:
            page = self.call("GET", resource.path(self.namespace), resource=resource, query=query, accept=accept)
            items += page["items"] or []  # a list of metadata alone is null where it is empty
            metadata = page["metadata"]
            if not metadata.get("continue"):
                return items, metadata["resourceVersion"]
            query = query | {"continue": metadata["continue"]}

    def create(self, resource: Resource, body: Object) -> Object:
        """The object as the cluster stored it; Conflict when the name is taken."""
        return self.call("POST", resource.path(self.namespace), resource=resource, body=body)

    def merge_patch(self, resource: Resource, name: str, patch: Object) -> Object:
        """RFC 7386; custom resources take no strategic merge patch."""
        path = resource.path(self.namespace, name)
        return self.call("PATCH", path, resource=resource, body=patch, content_type=MERGE_PATCH)

    def watch(self, resource: Resource, selector: str, version: str) -> Iterator[Object]:
        """Events from `version` on, until the server ends the watch; Expired when it has forgotten that version."""
        query = {
            "labelSelector": selector,
            "resourceVersion": version,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(WATCH_TIMEOUT_S),
        }
        path = resource.path(self.namespace)
        for line in self._stream(path, query, what=str(resource), idle_timeout_s=WATCH_TIMEOUT_S + READ_TIMEOUT_S):
            try:
                event = cast(Object, json.loads(line))
            except ValueError:  # cut off in the middle, or not from Kubernetes
                raise ConnectionLost(f"watching {resource}: {line[:60]!r} is no event") from None
            if event["type"] == "ERROR":
                raise _refusal(event["object"], f"watching {resource}", resource)
            yield event

    def pod_log(self, pod: str, container: str, *, follow: bool, tail: int | None, since: str = "") -> Iterator[str]:
        """Lines of a container's log, each after its time; with `follow` until the container ends.

        Of those of the second of `since` (RFC 3339) on, if it is given, otherwise of the last `tail`.
        """
        query = {"container": container, "timestamps": "true"}
        query |= {"follow": "true"} if follow else {}
        if since:
            query["sinceTime"] = since
        elif tail is not None:
            query["tailLines"] = str(tail)
        path = f"{PODS.path(self.namespace, pod)}/log"
        return self._stream(path, query, what=f"pods/log of {pod}", idle_timeout_s=None if follow else READ_TIMEOUT_S)

    def call(
        self,
        method: str,
        path: str,
        *,
        resource: Resource | None = None,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Object:
        """One request and its JSON answer; any failure as an error of this module."""
        with self._explained(str(resource or path), resource):
            headers = {"Accept": accept, "Content-Type": content_type}
            response = self._request(method, path, query or {}, body, headers, READ_TIMEOUT_S)
            text = response.data
        try:
            document = json.loads(text)
        except ValueError:
            document = None
        if isinstance(document, dict) and ("kind" in document or "gitVersion" in document):
            return document
        raise ServiceUnavailable(
            f"{self._api.configuration.host}{path} answers {text[:60]!r}, which is no Kubernetes API: "
            "look at `server` in your kubeconfig"
        )

    def _stream(self, path: str, query: Mapping[str, str], *, what: str, idle_timeout_s: float | None) -> Iterator[str]:
        with self._explained(what, None):
            response = self._request("GET", path, query, None, {"Accept": "application/json"}, idle_timeout_s)
            try:
                yield from _lines(response)
            finally:
                response.close()

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str],
        body: Object | None,
        headers: dict[str, str],
        read_timeout_s: float | None,
    ) -> Any:
        return self._api.call_api(
            path,
            method,
            query_params=[(name, value) for name, value in query.items() if value],
            header_params=headers,
            body=body,
            auth_settings=["BearerToken"],
            _preload_content=False,
            _return_http_data_only=True,
            _request_timeout=(CONNECT_TIMEOUT_S, read_timeout_s),
        )

    @contextmanager
    def _explained(self, what: str, resource: Resource | None) -> Iterator[None]:
        host = self._api.configuration.host
        try:
            yield
        except ApiException as error:
            if not error.status:  # the package's wrapper of a TLS failure
                raise ConnectionLost(_tls_line(host, error.reason)) from None
            raise _refusal(_status_of(error), what, resource) from None
        except (urllib3.exceptions.SSLError, urllib3.exceptions.MaxRetryError) as error:
            cause = getattr(error, "reason", None) or error
            if isinstance(cause, urllib3.exceptions.SSLError):
                raise ConnectionLost(_tls_line(host, str(cause))) from None
            raise ConnectionLost(
                f"the cluster at {host} can't be reached ({_short(cause)}): is it up, and is "
                f"context {self.context!r} the right one?"
            ) from None
        except urllib3.exceptions.LocationValueError as error:
            raise ConfigError(f"{host!r} is no address ({error}): mend `server` in your kubeconfig") from None
        except urllib3.exceptions.HTTPError as error:
            raise ConnectionLost(f"the cluster at {host} broke off ({_short(error)}): run the command again") from None


def connect(*, context: str = "", namespace: str = "") -> Cluster:
    """The cluster of the current context of the kubeconfig, or of the pod that we run in.

    The namespace is the one given, else the context's, else moerl. ConfigError when no cluster is configured.
    """
    configuration, named, in_context = sign_in(context)
    api = kubernetes_client.ApiClient(configuration)
    return Cluster(api, namespace=namespace or in_context or DEFAULT_NAMESPACE, context=named)


def _lines(response: Any) -> Iterator[str]:
    """Lines of a chunked answer as they come; a character or a line may arrive in pieces."""
    rest = b""
    for chunk in response.stream(amt=None, decode_content=False):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from (line.decode("utf-8", "replace") for line in lines if line)
    if rest:
        yield rest.decode("utf-8", "replace")


def _status_of(error: ApiException) -> Object:
    """The Status object of a refusal; some refusals (an unknown path, a proxy in between) are only text."""
    body = error.body if isinstance(error.body, str | bytes) else ""
    try:
        status = json.loads(body)
    except ValueError:
        status = None
    if isinstance(status, dict) and status.get("kind") == "Status":
        return cast(Object, status)
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    return {"code": error.status, "message": error.reason, "text": text or "nothing"}


def _refusal(status: Object, what: str, resource: Resource | None) -> Exception:
    code, message = status.get("code", 0), " ".join(str(status.get("message", "")).split())
    text = status.get("text", "")
    if code == 404 and text.startswith(NOT_SERVED) and resource is not None:
        return NotInstalled(
            f"this cluster has no {resource}: install {resource.product} (docs/install-eks.md, docs/install-laptop.md)"
        )
    if code == 401 or (code == 403 and "system:anonymous" in message):
        return ConfigError(
            f"the cluster does not accept our credentials ({code}): sign in again with your cluster's tool"
        )
    if code in (403, 404) and text and not text.startswith(NOT_SERVED):
        return ConfigError(
            f"{what}: {code} {message} from something that is no Kubernetes API ({text[:60]!r}): look at `server` and "
            "the proxy in your kubeconfig and environment"
        )
    if code == 403:
        return Forbidden(f"{message or what}: ask for the Role moerl-operator (templates/install/rbac.yaml)")
    if code == 404:
        return NotFound(message or f"{what}: not found")
    if code == 409:
        return Conflict(message)
    if code == 410:
        return Expired(f"{what}: {message}")
    if code in (400, 415, 422):
        return Refused(f"{what}: the cluster refuses the request: {message}")
    return ConnectionLost(f"{what}: the cluster answers {code} {message}; run the command again")


def _short(error: object) -> str:
    """The end of urllib3's nested messages, without the address of an object in memory."""
    text = re.sub(r"\s*\(_ssl\.c:\d+\)", "", str(error))
    return text.rsplit(": ", 1)[-1].strip("()'\", ") or type(error).__name__


def _tls_line(host: str, reason: object) -> str:
    text = " ".join(str(reason).split())
    return (
        f"no secure connection to the cluster at {host} ({_short(text)}): look at `server` and "
        "`certificate-authority-data` in your kubeconfig"
    )
