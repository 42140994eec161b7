"""A Kubernetes API server for tests: real HTTP, the paths, verbs and answers of a kube-apiserver, and its refusals.

It knows the kinds that the cluster commands touch, signs users in by bearer token, enforces RBAC rules, keeps versions,
answers conflicts, streams watches (with bookmarks, time limits, 410 for a forgotten version) and logs. What it does not
know it refuses: an unknown path, query parameter or patch type. It has no admission, no defaulting and no schemas.
"""

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

import yaml

from tests.doubles.kubernetes_rbac import ADMIN, Authorizer, Request
from tests.doubles.kubernetes_store import BUILT_IN, KINDS, ApiError, Kind, Object, ObjectStore, event_of

PATH = re.compile(
    r"/(?:api|apis/(?P<group>[^/]+))/(?P<version>v[^/]+)(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<plural>[^/]+)(?:/(?P<name>[^/]+))?(?:/(?P<subresource>[^/]+))?"
)
LIST_QUERY = {"labelSelector", "limit", "continue"}
WATCH_QUERY = {"labelSelector", "watch", "resourceVersion", "allowWatchBookmarks", "timeoutSeconds"}
LOG_QUERY = {"container", "follow", "sinceTime", "tailLines", "timestamps"}
POLL_S = 0.02


@dataclass(kw_only=True)
class Log:
    """What a container wrote, with its times; a follower waits until it has `ended`."""

    lines: list[str] = field(default_factory=list)
    ended: bool = True


@dataclass(kw_only=True)
class Fault:
    """What befalls the next requests whose "METHOD path" matches: a refusal, a text, or a connection that is cut."""

    pattern: str
    times: int
    error: ApiError | None = None
    text: tuple[int, str] | None = None


class KubernetesApi:
    """The server's state, for a test to look at and to change; `served()` runs it."""

    def __init__(self) -> None:
        self.store = ObjectStore()
        self.authorizer = Authorizer()
        self.kinds = list(KINDS)
        self.namespaces = {"moerl"}
        self.tokens = {"admin-token": ADMIN}
        self.logs: dict[tuple[str, str], Log] = {}
        """(pod, container) -> its log."""
        self.calls: list[tuple[str, Request]] = []
        """(user, what was asked), in order, refused requests too."""
        self.faults: list[Fault] = []
        self.watch_limit_s = 30.0
        self.stopping = threading.Event()
        self.url = ""

    def kind(self, plural: str) -> Kind:
        return next(kind for kind in self.kinds if kind.plural == plural)

    def remove_group(self, group: str) -> None:
        """As if its CustomResourceDefinitions were not installed."""
        self.kinds = [kind for kind in self.kinds if kind.group != group]

    def add(self, plural: str, body: Object, namespace: str = "moerl") -> Object:
        kind = self.kind(plural)
        return self.store.create(kind, namespace if kind.namespaced else "", body)

    def get(self, plural: str, name: str) -> Object:
        return self.store.get(self.kind(plural), "moerl", name)

    def names(self, plural: str) -> list[str]:
        return [one["metadata"]["name"] for one in self.store.select(self.kind(plural), "moerl", "")[0]]

    def patch(self, plural: str, name: str, patch: Object) -> Object:
        """As a controller would; nobody's rights are asked."""
        return self.store.merge_patch(self.kind(plural), "moerl", name, patch)

    def refuse(self, pattern: str, error: ApiError | None = None, times: int = 1) -> None:
        """Answer the next `times` requests that match with an error; None cuts the connection."""
        self.faults.append(Fault(pattern=pattern, times=times, error=error))

    def answer(self, pattern: str, code: int, text: str, times: int = 1) -> None:
        """Answer them with a code and a text, as something in front of the server would."""
        self.faults.append(Fault(pattern=pattern, times=times, text=(code, text)))

    def add_user(self, name: str, rules: list[dict[str, Any]], namespace: str = "moerl") -> str:
        """A user with these rules; returns the token."""
        self.tokens[f"{name}-token"] = name
        self.authorizer.grant(name, namespace, rules)
        return f"{name}-token"

    def kubeconfig(self, path: Path, token: str = "admin-token", **cluster: Any) -> Path:
        """A kubeconfig for the server; `cluster` adds fields, or replaces `server`."""
        context = {"cluster": "double", "user": "user", "namespace": "moerl"}
        config = {
            **{"apiVersion": "v1", "kind": "Config"},
            "current-context": "double",
            "contexts": [{"name": "double", "context": context}],
            "clusters": [{"name": "double", "cluster": {"server": self.url} | cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def take_fault(self, line: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and re.search(fault.pattern, line):
                fault.times -= 1
                return fault
        return None


@contextmanager
def served(api: KubernetesApi) -> Iterator[KubernetesApi]:
    """Serve on a free port of the loopback interface."""
    handler = type("Handler", (_Handler,), {"api": api})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    api.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield api
    finally:
        api.stopping.set()
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    api: KubernetesApi
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # headers and body are two writes: the second would wait for the client's ACK

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_PATCH(self) -> None:
        self._answer("PATCH")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        address = urlsplit(self.path)
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if fault := self.api.take_fault(f"{method} {self.path}"):
                if fault.error:
                    raise fault.error
                self._send_text(*fault.text) if fault.text else self._cut()
                return
            self._route(method, address.path, dict(parse_qsl(address.query, keep_blank_values=True)), body)
        except ApiError as error:
            self._send(error.code, error.status)
        except (BrokenPipeError, ConnectionResetError):  # the client went away
            self.close_connection = True

    def _route(self, method: str, path: str, query: dict[str, str], body: bytes) -> None:
        user = self._user()
        if path == "/version":
            self._send(200, {"major": "1", "minor": "34", "gitVersion": "v1.34.1"})
        elif document := self._discovery(method, path):
            self._send(200, document)
        elif (found := PATH.fullmatch(path)) is None:
            self._not_served()
        elif found["group"] == "authorization.k8s.io":
            self._review(user, found["plural"], json.loads(body))
        else:
            self._resource(method, found, user, query, body)

    def _user(self) -> str:
        scheme, _, token = self.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.api.tokens:
            raise ApiError(401, "Unauthorized", "Unauthorized")
        return self.api.tokens[token]

    def _kind(self, group: str, version: str, plural: str) -> Kind | None:
        wanted = (group, version, plural)
        return next((kind for kind in self.api.kinds if (kind.group, kind.version, kind.plural) == wanted), None)

    def _discovery(self, method: str, path: str) -> Object | None:
        found = re.fullmatch(r"/apis/([^/]+)/(v[^/]+)", path)
        if found is None or method != "GET":
            return None
        served_kinds = [kind for kind in self.api.kinds if (kind.group, kind.version) == found.groups()]
        resources = [{"name": kind.plural, "kind": kind.kind, "namespaced": kind.namespaced} for kind in served_kinds]
        return {"kind": "APIResourceList", "resources": resources} if resources else None

    def _review(self, user: str, plural: str, review: Object) -> None:
        self._check(user, Request(verb="create", group="authorization.k8s.io", resource=plural))
        asked = review["spec"]["resourceAttributes"]
        request = Request(
            verb=asked["verb"],
            group=asked["group"],
            resource=asked["resource"],
            subresource=asked.get("subresource", ""),
            namespace=asked.get("namespace", ""),
            name=asked.get("name", ""),
        )
        subject = review["spec"]["user"] if plural == "subjectaccessreviews" else user
        self._send(201, review | {"status": {"allowed": self.api.authorizer.allows(subject, request)}})

    def _resource(self, method: str, found: re.Match[str], user: str, query: dict[str, str], body: bytes) -> None:
        """Who may not do it is told so whether or not there is such a kind or object."""
        group, namespace, name = (found[part] or "" for part in ("group", "namespace", "name"))
        verb = self._verb(method, name, query)
        subresource = found["subresource"] or ""
        place = {"namespace": namespace, "name": name}
        self._check(user, Request(verb=verb, group=group, resource=found["plural"], subresource=subresource, **place))
        kind = self._kind(group, found["version"], found["plural"])
        if kind is None or (namespace and not kind.namespaced):
            self._not_served()
            return
        if found["subresource"]:
            if (kind.plural, found["subresource"], method) != ("pods", "log", "GET"):
                self._not_served()
                return
            self._log(kind, namespace, name, query)
        elif verb in ("list", "watch"):
            self._require(query, WATCH_QUERY if verb == "watch" else LIST_QUERY)
            list_or_watch = self._watch if verb == "watch" else self._list
            list_or_watch(kind, namespace, query)
        else:
            self._require(query, set())
            self._object(verb, kind, namespace, name, body)

    @staticmethod
    def _verb(method: str, name: str, query: dict[str, str]) -> str:
        if method == "GET" and not name:
            return "watch" if query.get("watch") in ("true", "1") else "list"
        return {"GET": "get", "POST": "create", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}[method]

    def _check(self, user: str, request: Request) -> None:
        self.api.calls.append((user, request))
        self.api.authorizer.check(user, request)

    @staticmethod
    def _require(query: dict[str, str], known: set[str]) -> None:
        if unknown := set(query) - known:
            raise ApiError(400, "BadRequest", f"the double does not know the query parameters {sorted(unknown)}")

    def _object(self, verb: str, kind: Kind, namespace: str, name: str, body: bytes) -> None:
        store = self.api.store
        if verb == "get":
            self._send(200, self._typed(kind, store.get(kind, namespace, name)))
        elif verb == "delete":
            self._send(200, store.delete(kind, namespace, name))
        elif verb == "patch":
            self._check_patch_type(kind)
            self._send(200, self._typed(kind, store.merge_patch(kind, namespace, name, json.loads(body))))
        else:
            self._check_type("application/json")
            document = json.loads(body)
            if (document.get("apiVersion"), document.get("kind")) != (kind.api_version, kind.kind):
                raise ApiError(400, "BadRequest", f"the object is no {kind.api_version} {kind.kind}")
            if document["metadata"].get("namespace", namespace) != namespace:
                message = "the namespace of the provided object does not match the namespace sent on the request"
                raise ApiError(400, "BadRequest", message)
            if kind.namespaced and namespace not in self.api.namespaces:
                raise ApiError(404, "NotFound", f'namespaces "{namespace}" not found')
            if verb == "update":
                self._send(200, store.replace(kind, namespace, name, document))
            else:
                self._send(201, store.create(kind, namespace, document))

    def _check_patch_type(self, kind: Kind) -> None:
        if kind.group in BUILT_IN and self.headers.get("Content-Type") == "application/strategic-merge-patch+json":
            raise ApiError(415, "UnsupportedMediaType", "the double has only merge patches")
        self._check_type("application/merge-patch+json")

    def _check_type(self, wanted: str) -> None:
        given = self.headers.get("Content-Type", "")
        if given != wanted:
            raise ApiError(415, "UnsupportedMediaType", f"the body of the request was in an unknown format - {given}")

    @staticmethod
    def _typed(kind: Kind, one: Object) -> Object:
        return {"apiVersion": kind.api_version, "kind": kind.kind} | one

    def _list(self, kind: Kind, namespace: str, query: dict[str, str]) -> None:
        items, version = self.api.store.select(kind, namespace, query.get("labelSelector", ""))
        start, limit = int(query.get("continue") or 0), int(query.get("limit") or 0) or len(items)
        page: list[Object] | None = [self._typed(kind, one) for one in items[start : start + limit]]
        if "as=PartialObjectMetadataList" in self.headers.get("Accept", ""):
            # null for none, as Go writes an empty list (asPartialObjectMetadataList in apiserver's response.go)
            page = [{"metadata": one["metadata"]} for one in page or ()] or None
        metadata = {"resourceVersion": str(version)}
        if start + limit < len(items):
            metadata["continue"] = str(start + limit)
        self._send(
            200, {"kind": f"{kind.kind}List", "apiVersion": kind.api_version, "metadata": metadata, "items": page}
        )

    def _watch(self, kind: Kind, namespace: str, query: dict[str, str]) -> None:
        """Events until the time limit; a forgotten version is an ERROR event in a stream that is otherwise well."""
        self._start_stream("application/json")
        store, selector = self.api.store, query.get("labelSelector", "")
        seen = int(query["resourceVersion"])
        end = time.monotonic() + min(float(query["timeoutSeconds"]), self.api.watch_limit_s)
        try:
            while time.monotonic() < end and not self.api.stopping.is_set():
                if self.api.take_fault(f"WATCH {kind.plural}"):
                    self._cut()
                    return
                for change in store.changes_after(seen):
                    seen = change.version
                    if event := event_of(change, kind, namespace, selector):
                        self._chunk(json.dumps(event | {"object": self._typed(kind, event["object"])}) + "\n")
                with store.changed:
                    if store.version == seen:
                        store.changed.wait(POLL_S)
            if query.get("allowWatchBookmarks") == "true":
                mark = self._typed(kind, {"metadata": {"resourceVersion": str(seen)}})
                self._chunk(json.dumps({"type": "BOOKMARK", "object": mark}) + "\n")
        except ApiError as error:
            self._chunk(json.dumps({"type": "ERROR", "object": error.status}) + "\n")
        self._chunk("")

    def _log(self, kind: Kind, namespace: str, pod: str, query: dict[str, str]) -> None:
        self._require(query, LOG_QUERY)
        self.api.store.get(kind, namespace, pod)
        container = query.get("container", "")
        log = self.api.logs.get((pod, container))
        if log is None:
            raise ApiError(400, "BadRequest", f"container {container} is not valid for pod {pod}")
        self._start_stream("text/plain")
        sent = max(len(log.lines) - int(query["tailLines"]), 0) if "tailLines" in query else 0
        if since := query.get("sinceTime", "")[: len("2026-01-01T10:00:00")]:  # whole seconds, as the kubelet counts
            sent = sum(line < since for line in log.lines)
        while not self.api.take_fault(f"LOG {pod}"):
            ended, available = log.ended, list(log.lines)
            for line in available[sent:]:
                self._chunk((line if query.get("timestamps") == "true" else line.partition(" ")[2]) + "\n")
            sent = len(available)
            if ended or query.get("follow") != "true" or self.api.stopping.wait(POLL_S):
                self._chunk("")
                return
        self._cut()

    def _start_stream(self, content_type: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def _chunk(self, text: str) -> None:
        """One chunk; an empty one ends the answer."""
        data = text.encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def _cut(self) -> None:
        """End the connection in the middle of whatever it was."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def _not_served(self) -> None:
        self._send_text(404, "404 page not found\n")

    def _send(self, code: int, document: Object) -> None:
        self._send_bytes(code, "application/json", json.dumps(document).encode())

    def _send_text(self, code: int, text: str) -> None:
        self._send_bytes(code, "text/plain", text.encode())

    def _send_bytes(self, code: int, content_type: str, data: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
