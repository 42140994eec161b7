"""The API server double refuses what a kube-apiserver refuses: a test against it can't pass by accident."""

from pathlib import Path
from typing import Any

import pytest

from steps.errors import ConfigError, StepError
from tests.cluster_runs import campaign, status
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_rbac import Authorizer, Request
from tests.doubles.kubernetes_store import ApiError, matches, merged
from tests.fixtures_cluster import cluster_of
from workflows.cluster.client import WORKFLOWS, Cluster, Conflict, Forbidden, NotInstalled, Resource

LABELS = {"metadata": {"labels": {"moerl/run": "digits", "phase": "Running"}}}


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("", True),
        ("moerl/run=digits", True),
        ("moerl/run==digits,phase=Running", True),
        ("moerl/run=other", False),
        ("phase!=Succeeded", True),
        ("phase!=Running", False),
        ("absent!=anything", True),
        ("absent=anything", False),
        ("phase in (Pending,Running)", True),
        ("phase in (Pending, Failed),moerl/run=digits", False),
        ("phase notin (Pending)", True),
        ("moerl/run", True),
        ("!moerl/run", False),
        ("!absent", True),
    ],
)
def test_label_selectors(selector: str, expected: bool) -> None:
    assert matches(LABELS, selector) is expected


def test_a_selector_that_is_no_selector_is_refused() -> None:
    with pytest.raises(ApiError, match="unable to parse requirement"):
        matches(LABELS, "moerl/run ~ digits")


def test_a_merge_patch_removes_what_is_null() -> None:
    assert merged({"a": {"b": 1, "c": 2}, "d": 3}, {"a": {"b": None}, "d": [4]}) == {"a": {"c": 2}, "d": [4]}


@pytest.mark.parametrize(
    ("rule", "allowed"),
    [
        ({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]}, True),
        ({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["mine"]}, True),
        ({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"], "resourceNames": ["other"]}, False),
        ({"apiGroups": ["apps"], "resources": ["secrets"], "verbs": ["get"]}, False),
        ({"apiGroups": [""], "resources": ["secrets/status"], "verbs": ["get"]}, False),
        ({"apiGroups": [""], "resources": ["secrets"], "verbs": ["list"]}, False),
    ],
)
def test_a_rule_covers_what_it_names(rule: dict[str, Any], allowed: bool) -> None:
    authorizer = Authorizer()
    authorizer.grant("user", "moerl", [rule])
    request = Request(verb="get", group="", resource="secrets", namespace="moerl", name="mine")
    assert authorizer.allows("user", request) is allowed


def test_a_role_gives_nothing_in_another_namespace_or_for_the_whole_cluster() -> None:
    authorizer = Authorizer()
    authorizer.grant("user", "moerl", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}])
    for namespace, allowed in (("moerl", True), ("other", False), ("", False)):
        request = Request(verb="list", group="", resource="pods", namespace=namespace)
        assert authorizer.allows("user", request) is allowed


def test_a_strategic_merge_patch_of_a_custom_resource_is_refused(api: KubernetesApi, cluster: Cluster) -> None:
    api.add("workflows", campaign("digits", status("Running")))
    with pytest.raises(ConfigError, match="strategic-merge-patch"):
        cluster.call(
            "PATCH",
            WORKFLOWS.path("moerl", "digits"),
            body={"spec": {}},
            content_type="application/strategic-merge-patch+json",
        )


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"apiVersion": "v1", "kind": "Workflow", "metadata": {"name": "x"}}, "no argoproj.io/v1alpha1 Workflow"),
        ({"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "X_"}}, "is invalid"),
        ({"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {}}, "is invalid"),
    ],
)
def test_an_object_of_another_kind_or_without_a_proper_name_is_refused(
    cluster: Cluster, body: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        cluster.create(WORKFLOWS, body)


def test_a_generated_name_is_made_where_none_is_given(cluster: Cluster) -> None:
    body = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"generateName": "policy-"}}
    assert cluster.create(WORKFLOWS, body)["metadata"]["name"].startswith("policy-")


def test_a_query_that_is_not_known_is_refused(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="query parameters"):
        cluster.call("GET", WORKFLOWS.path("moerl"), query={"labelSelektor": "x"})


def test_a_kind_or_version_that_is_not_served_is_no_object_that_is_missing(cluster: Cluster) -> None:
    other = Resource(group="argoproj.io", version="v1", plural="workflows", product="Argo Workflows")
    with pytest.raises(NotInstalled):
        cluster.get(other, "digits")


def test_who_may_not_is_told_so_before_whether_there_is_such_a_kind(cluster: Cluster) -> None:
    with pytest.raises(Forbidden):
        cluster.get(Resource(group="example.com", version="v1", plural="things"), "mine")


WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": "x"}}


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"resourceVersion": "5"}, "resourceVersion should not be set"),
        ({"namespace": "other"}, "does not match the namespace"),
        ({"labels": {"moerl/run": "two words"}}, "metadata.labels"),
        ({"labels": {"moerl/run": "x" * 64}}, "metadata.labels"),
    ],
)
def test_metadata_that_a_server_refuses(cluster: Cluster, metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(StepError, match=words):
        cluster.create(WORKFLOWS, WORKFLOW | {"metadata": {"name": "x"} | metadata})


def test_an_update_of_a_custom_resource_names_the_version_that_it_changes(api: KubernetesApi, tmp_path: Path) -> None:
    api.add("workflows", campaign("x", status("Running")))
    api.kubeconfig(tmp_path / "admin")
    cluster = cluster_of(tmp_path / "admin")
    path = WORKFLOWS.path("moerl", "x")
    with pytest.raises(ConfigError, match="must be specified for an update"):
        cluster.call("PUT", path, body=WORKFLOW)
    with pytest.raises(Conflict, match="has been modified"):
        cluster.call("PUT", path, body=WORKFLOW | {"metadata": {"name": "x", "resourceVersion": "7"}})


@pytest.mark.parametrize("method", ["POST", "PATCH"])
def test_a_body_of_another_content_type_is_refused(api: KubernetesApi, cluster: Cluster, method: str) -> None:
    api.add("workflows", campaign("x", status("Running")))
    path = WORKFLOWS.path("moerl", "x" if method == "PATCH" else "")
    with pytest.raises(ConfigError, match="unknown format - text/json"):
        cluster.call(method, path, body=WORKFLOW, content_type="text/json")
