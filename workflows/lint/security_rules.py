"""Rules on privileges, identities, secrets and roles."""

import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from workflows.lint.model import Body, Manifest, Manifests, Place, Rule, listing, mapping, parameters_of, strings
from workflows.lint.pods import Pod, containers, pods
from workflows.lint.tags import TAG, texts

ALLOWED_CAPABILITIES = ("IPC_LOCK",)
"""libfabric locks the memory that it registers."""
EXECUTOR_VERBS = {("argoproj.io", "workflowtaskresults"): {"create", "patch"}}
_SECRET_NAME = re.compile(
    r"(?i)(password|passwd|secret|token|api_?key|access_?key|private_?key|database_?url|credential)"
)
_HARMLESS_NAME = re.compile(r"(?i)(tokens?[_-]per|max[_-]?tokens|tokenizer|num_tokens|.*_FILE$|.*_PATH$)")
_SECRET_TEXT = re.compile(
    r"\b(AKIA|ASIA)[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY-----|\bhf_[A-Za-z0-9]{30,}\b|\bghp_[A-Za-z0-9]{30,}\b"
)
_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^\s'\"]+")


def secret_value(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        for variable in listing(container.get("env")):
            name, value = str(variable.get("name")), variable.get("value")
            if value and _SECRET_NAME.search(name) and not _HARMLESS_NAME.search(name):
                yield Place(
                    manifest=pod.manifest, path=f"{path}.env[{name}]", problem="its value stands in the manifest"
                )
    for manifest in manifests.workflows():
        for parameter in parameters_of(manifest.spec.get("arguments")):
            name, value = str(parameter.get("name")), str(parameter.get("value") or "")
            named = _SECRET_NAME.fullmatch(name.replace("-", "_"))
            if value and named and name != "credentials":
                path = manifest.at(f"{manifest.spec_path}.arguments.parameters[{name}]")
                yield Place(
                    manifest=manifest, path=path, problem="a parameter's value shows in the UI and in the status"
                )


def secret_text(manifests: Manifests) -> Iterator[Place]:
    for manifest in manifests.documents:
        if manifest.holder is not None or manifest.kind == "Secret":
            continue
        for path, text in texts(manifest.body):
            if _SECRET_TEXT.search(text) or any(_has_password(url) for url in _URL.findall(text)):
                yield Place(manifest=manifest, path=path, problem="it holds a password or a key")
    for manifest in manifests.of_kind("Secret"):
        for field in ("data", "stringData"):
            if manifest.body.get(field):
                yield Place(manifest=manifest, path=field, problem="a Secret with its values among the manifests")


def _has_password(url: str) -> bool:
    try:
        password = urlsplit(url).password
    except ValueError:
        return False
    return bool(password) and not TAG.search(url) and not str(password).startswith("$")


def runs_as_root(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        for path, container in _contexts(pod):
            context = {**mapping(pod.spec.get("securityContext")), **mapping(container.get("securityContext"))}
            if context.get("runAsNonRoot") is not True or context.get("runAsUser") == 0:
                yield Place(manifest=pod.manifest, path=path, problem="it may run as root")


def _contexts(pod: Pod) -> Iterator[tuple[str, Body]]:
    """Each container with its path; of a watcher, whose container is Argo's, the pod alone."""
    if pod.is_watcher:
        yield pod.path, {}
        return
    for container in pod.containers:
        yield f"{pod.path}.{container.get('name')}", container


def privileged(manifests: Manifests) -> Iterator[Place]:
    for pod, path, container in containers(manifests):
        for problem in _privileges(mapping(container.get("securityContext"))):
            yield Place(manifest=pod.manifest, path=path, problem=problem)
    for pod in pods(manifests):
        for field in ("hostNetwork", "hostPID", "hostIPC"):
            if pod.spec.get(field):
                yield Place(manifest=pod.manifest, path=pod.path, problem=f"{field}: it sees the node's")
        for volume in listing(pod.spec.get("volumes")):
            if "hostPath" in volume:
                problem = f"the volume {volume.get('name')} is a path of the node"
                yield Place(manifest=pod.manifest, path=pod.path, problem=problem)


def _privileges(context: Body) -> Iterator[str]:
    if context.get("privileged"):
        yield "it is privileged"
    elif context.get("allowPrivilegeEscalation") is not False:
        yield "allowPrivilegeEscalation is not false"
    given = mapping(context.get("capabilities"))
    if "ALL" not in strings(given.get("drop")):
        yield "it keeps the runtime's capabilities"
    for name in strings(given.get("add")):
        if name not in ALLOWED_CAPABILITIES:
            yield f"it gets the capability {name}"


def no_service_account(manifests: Manifests) -> Iterator[Place]:
    for pod in pods(manifests):
        ours = pod.template is not None or pod.in_gang
        if ours and pod.spec.get("serviceAccountName") in (None, "", "default"):
            problem = "it runs under the namespace's default service account"
            yield Place(manifest=pod.manifest, path=pod.path, problem=problem)


def _rules(manifests: Manifests) -> Iterator[tuple[Manifest, str, Body]]:
    for manifest in manifests.of_kind("Role", "ClusterRole"):
        for index, rule in enumerate(listing(manifest.body.get("rules"))):
            yield manifest, f"rules[{index}]", rule


def wildcard_role(manifests: Manifests) -> Iterator[Place]:
    for manifest, path, rule in _rules(manifests):
        for field in ("apiGroups", "resources", "verbs"):
            if any("*" in item for item in strings(rule.get(field))):
                yield Place(manifest=manifest, path=f"{path}.{field}", problem="a wildcard")
        if "secrets" in strings(rule.get("resources")) and not rule.get("resourceNames"):
            yield Place(manifest=manifest, path=path, problem="it grants every Secret of the namespace")


def unbound_account(manifests: Manifests) -> Iterator[Place]:
    """Only where roles are among the manifests: whoever lints one template has them elsewhere."""
    granted = _granted(manifests)
    if not granted:
        return
    needed: dict[tuple[str, str, str], Pod] = {}
    for pod in pods(manifests):
        if pod.template is None:
            continue
        account = str(pod.spec.get("serviceAccountName"))
        for (group, resource), verbs in (EXECUTOR_VERBS | _object_verbs(manifests, pod)).items():
            for verb in sorted(verbs):
                if verb not in granted.get(account, {}).get((group, resource), set()):
                    needed.setdefault((account, f"{resource}.{group}", verb), pod)
    for (account, resource, verb), pod in needed.items():
        problem = f"the service account {account} may not {verb} {resource}"
        yield Place(manifest=pod.manifest, path=pod.path, problem=problem)


def _granted(manifests: Manifests) -> dict[str, dict[tuple[str, str], set[str]]]:
    """Service account -> (API group, resource) -> verbs."""
    roles = {(manifest.kind, manifest.name): listing(manifest.body.get("rules")) for manifest in manifests.documents}
    granted: dict[str, dict[tuple[str, str], set[str]]] = {}
    for binding in manifests.of_kind("RoleBinding", "ClusterRoleBinding"):
        reference = mapping(binding.body.get("roleRef"))
        for subject in listing(binding.body.get("subjects")):
            account = granted.setdefault(str(subject.get("name")), {})
            for rule in roles.get((str(reference.get("kind")), str(reference.get("name"))), []):
                for group in strings(rule.get("apiGroups")):
                    for resource in strings(rule.get("resources")):
                        account.setdefault((group, resource), set()).update(strings(rule.get("verbs")))
    return granted


def _object_verbs(manifests: Manifests, pod: Pod) -> dict[tuple[str, str], set[str]]:
    """What `kubectl` of a resource template does: apply reads, then creates or patches."""
    template = pod.template
    action = mapping(template.body.get("resource")).get("action") if template is not None else None
    if template is None or action is None:
        return {}
    verbs = {"apply": {"get", "create", "patch"}, "create": {"get", "create"}, "patch": {"get", "patch"}}
    verbs |= {"delete": {"get", "delete"}, "get": {"get"}}
    held = list(manifests.embedded_in(template))
    if held:
        return {_resource_of(manifest): verbs.get(str(action), set()) for manifest in held}
    flags = strings(mapping(template.body.get("resource")).get("flags"))
    by_label = any(flag.startswith(("--selector", "-l")) for flag in flags)
    return {kind: {"delete", "list" if by_label else "delete"} for kind in _deleted_kinds(flags)}


def _deleted_kinds(flags: list[str]) -> set[tuple[str, str]]:
    """(API group, resource) of `kubectl delete`: KIND/NAME KIND/NAME ..., or KIND before a name or a selector."""
    words = [flag for flag in flags if not flag.startswith("-")]
    kinds = [word.partition("/")[0] for word in words if "/" in word] or words[:1]
    return {(group, plural) for plural, _, group in (kind.partition(".") for kind in kinds)}


def _resource_of(manifest: Manifest) -> tuple[str, str]:
    version = str(manifest.body.get("apiVersion") or "")
    return version.rpartition("/")[0], f"{manifest.kind.lower()}s"


RULES = (
    Rule(
        name="secret-in-value",
        severity="error",
        advice="refer to a key of a Secret with valueFrom.secretKeyRef",
        check=secret_value,
    ),
    Rule(
        name="secret-in-text",
        severity="error",
        advice="take it out, and change it; create Secrets outside of the repository (templates/secret.example.yaml)",
        check=secret_text,
    ),
    Rule(name="run-as-root", severity="error", advice="set runAsNonRoot and a user above 0", check=runs_as_root),
    Rule(
        name="privileged",
        severity="error",
        advice="allowPrivilegeEscalation: false, drop ALL, add IPC_LOCK where EFA needs it, and nothing of the node",
        check=privileged,
    ),
    Rule(
        name="default-service-account",
        severity="error",
        advice="set serviceAccountName",
        check=no_service_account,
    ),
    Rule(
        name="rbac-wildcard",
        severity="error",
        advice="name what is used, Secrets in resourceNames",
        check=wildcard_role,
    ),
    Rule(name="rbac-missing", severity="error", advice="grant it in a Role and bind that", check=unbound_account),
)
