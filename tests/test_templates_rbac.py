"""Roles: no more and no less than what the workflows' pods and the commands of `moerl` call, and no wildcard."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.doubles.kubectl_server import KubectlServer, kubectl_server
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_rbac import role_rules
from tests.fixtures_cluster import Moerl
from tests.kustomization import EKS, HAS_KUBECTL, INSTALL, LAPTOP, TEMPLATES, Document, build, documents_of, parse
from workflows.cluster.access import OPERATOR_RIGHTS

Grant = tuple[str, str]
"""(verb, "plural.group")."""

KUBECTL_CALLS = {
    "apply": {"get", "create", "patch"},
    "apply --server-side": {"get", "create", "patch"},
    "delete by name": {"delete"},
    "delete by selector": {"list", "delete"},
}
"""What kubectl asks of the server for each use that the manifests make of it (proven below with kubectl itself); `get`
is the executor's own where kubectl applies on the server's side: it watches what it applied."""
EXECUTOR = {("create", "workflowtaskresults.argoproj.io"), ("patch", "workflowtaskresults.argoproj.io")}
"""Argo's executor in every pod (docs/workflow-rbac.md of Argo Workflows)."""
PLURALS = {
    "Workflow": "workflows.argoproj.io",
    "JobSet": "jobsets.jobset.x-k8s.io",
    "StatefulSet": "statefulsets.apps",
    "Service": "services",
}
TAG = re.compile(r"\{\{[^{}]*\}\}")
FOLDERS = [TEMPLATES, LAPTOP, EKS]

Template = dict[str, Any]


def granted(account: str) -> set[Grant]:
    """What the Roles that are bound to a service account allow."""
    built = build(INSTALL)
    names = {
        binding["roleRef"]["name"]
        for binding in built.all("RoleBinding")
        if {"kind": "ServiceAccount", "name": account, "namespace": "moerl"} in binding["subjects"]
    }
    return {grant for name in names for grant in grants(built.one("Role", name))}


def grants(role: Document) -> set[Grant]:
    return {
        (verb, f"{resource}.{group}".rstrip("."))
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def pod_templates(folder: Path) -> Iterator[tuple[str, Template]]:
    """(service account, template) of every template that makes a pod."""
    for document in build(folder).all("WorkflowTemplate"):
        for template in document["spec"]["templates"]:
            if "container" in template or "resource" in template:
                yield template.get("serviceAccountName", document["spec"]["serviceAccountName"]), template


def called(resource: dict[str, Any]) -> set[Grant]:
    """What a resource template's kubectl asks."""
    if resource["action"] == "delete":
        flags = resource["flags"]
        use = "delete by selector" if any(flag.startswith("--selector") for flag in flags) else "delete by name"
        kinds = [flag.partition("/")[0] for flag in flags if re.match("[a-z.]+/", flag)] or flags[:1]
        return {(verb, kind) for verb in KUBECTL_CALLS[use] for kind in kinds}
    manifest = yaml.safe_load(TAG.sub("1", resource["manifest"]))
    use = " ".join([resource["action"], *resource.get("flags", [])])
    return {(verb, PLURALS[manifest["kind"]]) for verb in KUBECTL_CALLS[use]}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_each_account_may_do_exactly_what_its_pods_call(folder: Path) -> None:
    needed: dict[str, set[Grant]] = {}
    for account, template in pod_templates(folder):
        calls = needed.setdefault(account, set(EXECUTOR))
        if "resource" in template:
            calls |= called(template["resource"])
    accounts = {one["metadata"]["name"] for one in build(folder).all("ServiceAccount")}
    assert needed == {account: granted(account) for account in accounts}


def test_pods_of_the_gang_and_of_the_engines_get_no_token() -> None:
    for folder in FOLDERS:
        seen = set()
        for _, template in pod_templates(folder):
            if template.get("resource", {}).get("action") == "apply":
                made = yaml.safe_load(TAG.sub("1", template["resource"]["manifest"]))
                if made["kind"] == "JobSet":
                    spec = made["spec"]["replicatedJobs"][0]["template"]["spec"]
                elif made["kind"] == "StatefulSet":
                    spec = made["spec"]
                else:
                    continue
                seen.add(made["kind"])
                pod = spec["template"]["spec"]
                assert pod["automountServiceAccountToken"] is False
                assert granted(pod["serviceAccountName"]) == EXECUTOR
        assert seen == {"JobSet", "StatefulSet"}


def test_operator_may_do_exactly_what_the_commands_call() -> None:
    calls = {
        (
            right.verb,
            f"{right.resource.plural}{'/' + right.subresource if right.subresource else ''}"
            f".{right.resource.group}".rstrip("."),
        )
        for right in OPERATOR_RIGHTS
    }
    assert grants(build(INSTALL).one("Role", "moerl-operator")) == calls


def test_doctor_calls_everything_that_its_role_adds_to_the_operators(api: KubernetesApi, moerl: Moerl) -> None:
    added = grants(build(INSTALL).one("ClusterRole", "moerl-doctor"))
    api.authorizer.grant("operator", "", role_rules(INSTALL / "rbac.yaml", "moerl-doctor"))
    for account in build(INSTALL).all("ServiceAccount"):
        api.add("serviceaccounts", {"metadata": {"name": account["metadata"]["name"]}})
    moerl("doctor")
    made = {(one.verb, f"{one.full_resource}.{one.group}".rstrip(".")) for user, one in api.calls if user == "operator"}
    assert added <= made
    everybodys = {("create", "selfsubjectaccessreviews.authorization.k8s.io")}
    may = added | everybodys | grants(build(INSTALL).one("Role", "moerl-operator"))
    assert made - may == {("get", "secrets")}, "doctor looks at the Secret where that is allowed, and says so where not"


def test_no_role_has_a_wildcard_reads_secrets_or_changes_rights() -> None:
    for role in documents_of(INSTALL / "rbac.yaml"):
        for rule in role.get("rules", []):
            assert set(rule) == {"apiGroups", "resources", "verbs"}
            assert "*" not in json.dumps(rule)
            assert not {"secrets", "pods/exec", "roles", "rolebindings", "clusterroles"} & set(rule["resources"])
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"])
        assert role["kind"] != "ClusterRoleBinding"
    bound = {binding["roleRef"]["name"] for binding in build(INSTALL).all("RoleBinding")}
    assert not bound & {"moerl-operator", "moerl-doctor"}, "who operates is the cluster's owner to say"


# --- what kubectl really calls ----------------------------------------------------------------------------------------


def kubectl(server: KubectlServer, folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run kubectl as Argo's executor does, without the schema that this server does not have."""
    environment = {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "HOME": str(folder),
        "KUBECONFIG": str(server.kubeconfig(folder / "kubeconfig")),
    }
    server.calls.clear()
    done = subprocess.run(
        ["kubectl", *arguments], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return parse(done.stdout)


def resolved(resource: dict[str, Any], path: Path) -> Path:
    """The manifest as a pod gets it, after Argo replaced the tags."""
    path.write_text(TAG.sub("1", resource["manifest"]))
    return path


@pytest.mark.skipif(not HAS_KUBECTL, reason="kubectl is not installed")
def test_kubectl_calls_what_the_roles_were_made_for(tmp_path: Path) -> None:
    resources = {
        template["name"]: template["resource"] for _, template in pod_templates(TEMPLATES) if "resource" in template
    }
    assert {resource["action"] for resource in resources.values()} == {"apply", "delete"}
    with kubectl_server() as server:
        for name, resource in sorted(resources.items(), key=lambda one: one[1]["action"]):  # apply, then delete
            calls: set[Grant] = set()
            if resource["action"] == "apply":
                flags = resource.get("flags", [])
                manifest = resolved(resource, tmp_path / f"{name}.yaml")
                if flags:
                    calls |= {call for call in called(resource) if call[0] == "get"}
                # Made, then found again by a watcher that was started anew, then changed.
                for _ in range(2):
                    kubectl(server, tmp_path, "apply", "--validate=false", *flags, "-f", str(manifest), "-o", "json")
                    calls |= set(server.calls)
                manifest.write_text(manifest.read_text().replace("spec:", "spec:\n  added: true", 1))
                kubectl(server, tmp_path, "apply", "--validate=false", *flags, "-f", str(manifest), "-o", "json")
            else:
                flags = [TAG.sub("1", flag) for flag in resource["flags"]]
                kubectl(server, tmp_path, "delete", "--ignore-not-found", *flags, "-o", "name")
            calls |= set(server.calls)
            assert calls == called(resource), name
