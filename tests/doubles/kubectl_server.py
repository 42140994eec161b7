"""An API server for kubectl itself, which Argo's executor runs for resource templates: it records what kubectl asks.

Discovery (the old form, which every kubectl reads), and objects of the kinds that our resource templates name. No
users, no schemas, no versions: `calls` is what a test holds against a Role.
"""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

KINDS = {
    ("argoproj.io", "v1alpha1"): ("workflows", "Workflow"),
    ("jobset.x-k8s.io", "v1alpha2"): ("jobsets", "JobSet"),
    ("apps", "v1"): ("statefulsets", "StatefulSet"),
    ("", "v1"): ("services", "Service"),
}


@dataclass
class KubectlServer:
    """Objects by (plural, name), and every call as (verb, "plural.group")."""

    objects: dict[tuple[str, str], dict[str, Any]] = field(default_factory=dict)
    calls: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""

    def kubeconfig(self, path: Path) -> Path:
        context = {"cluster": "double", "user": "double", "namespace": "moerl"}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "double",
            "clusters": [{"name": "double", "cluster": {"server": self.url}}],
            "contexts": [{"name": "double", "context": context}],
            "users": [{"name": "double", "user": {"token": "t"}}],
        }
        path.write_text(yaml.safe_dump(config))
        return path


@contextmanager
def kubectl_server() -> Iterator[KubectlServer]:
    """Serve on a free port of the loopback interface."""
    state = KubectlServer()
    handler = type("Handler", (_Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    state: KubectlServer
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        return

    def do_GET(self) -> None:
        discovered = _discovery(urlsplit(self.path).path)
        if discovered is not None:
            self._send(200, discovered)
        else:
            self._object("get")

    def do_POST(self) -> None:
        self._object("create")

    def do_PATCH(self) -> None:
        self._object("patch")

    def do_DELETE(self) -> None:
        self._object("delete")

    def _object(self, verb: str) -> None:
        parts = urlsplit(self.path).path.strip("/").split("/")
        if parts[0] == "api":
            parts = ["apis", "", *parts[1:]]  # Kubernetes' first group has no name
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if len(parts) not in (6, 7) or (parts[1], parts[2]) not in KINDS or parts[:1] + parts[3:5] != ["apis", *SCOPE]:
            self._send(404, _status(404, "NotFound"))
            return
        group, version, plural, name = parts[1], parts[2], parts[5], "".join(parts[6:])
        if verb == "get" and not name:
            verb = "watch" if "watch" in parse_qs(urlsplit(self.path).query) else "list"
        self.state.calls.append((verb, f"{plural}.{group}".rstrip(".")))
        if (
            verb == "patch"
            and (plural, name) not in self.state.objects
            and "apply-patch" in self.headers["Content-Type"]
        ):
            verb = "create"  # the server asks for this right as well
            self.state.calls.append((verb, f"{plural}.{group}".rstrip(".")))
        self._answer(verb, (plural, name), json.loads(body) if body else {}, f"{group}/{version}".lstrip("/"))

    def _answer(self, verb: str, key: tuple[str, str], body: dict[str, Any], api_version: str) -> None:
        objects, plural = self.state.objects, key[0]
        if verb == "list":
            items = [one for (kind, _), one in objects.items() if kind == plural]
            self._send(200, {"apiVersion": api_version, "kind": f"{plural}List", "metadata": {}, "items": items})
        elif verb == "create":
            name = body["metadata"]["name"]
            objects[plural, name] = body | {"metadata": body["metadata"] | {"namespace": "moerl", "uid": "1"}}
            self._send(201, objects[plural, name])
        elif key not in objects:
            self._send(404, _status(404, "NotFound"))
        elif verb == "delete":
            self._send(200, objects.pop(key))
        else:
            if verb == "patch":
                _merge(objects[key], body)
            self._send(200, objects[key])

    def _send(self, code: int, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


SCOPE = ["namespaces", "moerl"]


def _discovery(path: str) -> dict[str, Any] | None:
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
    if path == "/apis":
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group(*names) for names in KINDS if names[0]]}
    for (group, version), (plural, kind) in KINDS.items():
        if path == (f"/apis/{group}/{version}" if group else f"/api/{version}"):
            verbs = ["create", "delete", "get", "list", "patch", "watch"]
            resource = {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            return {
                "kind": "APIResourceList",
                "apiVersion": "v1",
                "groupVersion": f"{group}/{version}".lstrip("/"),
                "resources": [resource],
            }
    return None


def _group(group: str, version: str) -> dict[str, Any]:
    names = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [names], "preferredVersion": names}


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    """RFC 7386."""
    for key, value in patch.items():
        if value is None:
            target.pop(key, None)
        elif isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


def _status(code: int, reason: str) -> dict[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": reason, "code": code}
