"""`moerl doctor`: a sound cluster passes every check, and each thing that is wrong is found with its remedy."""

import base64
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster_runs import TEMPLATES, add_pod
from tests.doubles.kubernetes_api import KubernetesApi
from tests.doubles.kubernetes_rbac import documents_of, role_rules
from tests.fixtures_cluster import Moerl, cluster_of
from workflows.cluster.access import ACCOUNT_RIGHTS, OPERATOR_RIGHTS
from workflows.cluster.doctor import examine
from workflows.cluster.findings import Finding
from workflows.cluster.installation import CRON_NAME
from workflows.parameters import IMAGE
from workflows.platform import load_profile

RBAC = TEMPLATES / "install" / "rbac.yaml"
LAPTOP = {"cpu": "8", "memory": "16Gi"}
P5EN = {
    "cpu": "191450m",
    "memory": "1937332Mi",
    "nvidia.com/gpu": "8",
    "vpc.amazonaws.com/efa": "16",
    "hugepages-2Mi": "10256Mi",
}


@pytest.fixture
def listener() -> Iterator[int]:
    """A port on which something listens and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.fixture
def mlflow() -> Iterator[str]:
    """A server whose /health answers, as MLflow's does."""

    class Health(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 404)
            self.end_headers()
            self.wfile.write(b"OK")

    with ThreadingHTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture
def sound(api: KubernetesApi, listener: int, mlflow: str) -> KubernetesApi:
    """A cluster on which everything is as it should be."""
    store = {"store": "s3://bucket/moerl", "s3-endpoint-url": f"http://127.0.0.1:{listener}"}
    api.add("configmaps", {"metadata": {"name": "moerl-environment"}, "data": store | {"mlflow-tracking-uri": mlflow}})
    set_secret(api, {"database-url": f"postgresql+psycopg://moerl:hidden-word@127.0.0.1:{listener}/moerl"})
    for account in ACCOUNT_RIGHTS:
        api.add("serviceaccounts", {"metadata": {"name": account}})
        api.authorizer.grant(f"system:serviceaccount:moerl:{account}", "moerl", bound_rules(account))
    api.add("nodes", node("node-1", LAPTOP, IMAGE.value or ""))
    controller = {"image": "quay.io/argoproj/workflow-controller:v4.1.2"}
    api.add(
        "deployments",
        {
            "metadata": {"name": "workflow-controller", "labels": {"app": "workflow-controller"}},
            "spec": {"template": {"spec": {"containers": [controller]}}},
            "status": {"availableReplicas": 1},
        },
        namespace="argo",
    )
    return api


def bound_rules(account: str) -> list[dict[str, Any]]:
    """What the RoleBindings of our manifests give to a service account."""
    bindings = [one for one in documents_of(RBAC) if one["kind"] == "RoleBinding"]
    roles = [
        one["roleRef"]["name"]
        for one in bindings
        if account in [subject["name"] for subject in one["subjects"] if subject["kind"] == "ServiceAccount"]
    ]
    return [rule for role in roles for rule in role_rules(RBAC, role)]


def node(name: str, allocatable: dict[str, str], image: str = "", **labels: str) -> dict[str, Any]:
    images = [{"names": [f"docker.io/library/{image}"]}] if image else []
    return {
        "metadata": {"name": name, "labels": {key.replace("__", "/"): value for key, value in labels.items()}},
        "spec": {},
        "status": {"allocatable": allocatable, "images": images},
    }


def set_secret(api: KubernetesApi, values: dict[str, str]) -> None:
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    if "moerl-credentials" in api.names("secrets"):
        api.store.delete(api.kind("secrets"), "moerl", "moerl-credentials")
    api.add("secrets", {"metadata": {"name": "moerl-credentials"}, "data": data})


@pytest.fixture
def diagnose(api: KubernetesApi, tmp_path: Path) -> Callable[..., list[Finding]]:
    """All findings, as an administrator sees them."""

    def look(profile: str = "cpu") -> list[Finding]:
        return list(examine(cluster_of(api.kubeconfig(tmp_path / "admin")), load_profile(profile)))

    return look


Diagnose = Callable[..., list[Finding]]


def of(findings: list[Finding], check: str) -> Finding:
    found = [finding for finding in findings if finding.check == check]
    assert found, f"no finding about {check}: {[finding.check for finding in findings]}"
    return max(found, key=lambda finding: ("ok", "skip", "warn", "fail").index(finding.state))


def test_a_sound_cluster_passes_every_check(sound: KubernetesApi, diagnose: Diagnose) -> None:
    assert [finding for finding in diagnose() if finding.state != "ok"] == []


def test_values_of_secrets_are_never_shown(sound: KubernetesApi, diagnose: Diagnose) -> None:
    assert "hidden-word" not in repr(diagnose())
    set_secret(sound, {"database-url": "hidden-word"})
    assert "hidden-word" not in repr(diagnose())


def test_an_operator_without_more_rights_gets_skips_and_no_failures(sound: KubernetesApi, moerl: Moerl) -> None:
    code, out, err = moerl("doctor", "--json")
    findings = [Finding(**entry) for entry in json.loads(out)]
    assert code == 0, err
    skipped = {finding.check for finding in findings if finding.state == "skip"}
    assert {"credentials", "nodes", "controller"} <= skipped
    assert [finding for finding in findings if finding.state in ("warn", "fail")] == []


def test_the_report_is_a_line_for_each_finding_and_one_for_each_remedy(api: KubernetesApi, moerl: Moerl) -> None:
    api.add("configmaps", {"metadata": {"name": "moerl-environment"}, "data": {"store": "s3://example-bucket/moerl"}})
    code, out, err = moerl("doctor")
    assert code == 78
    assert err.startswith("moerl: ") and err.count("\n") == 1 and "checks failed: mend them" in err
    lines = out.splitlines()
    assert "ok    cluster: context double, Kubernetes v1.34.1" in lines
    place = lines.index("fail  store: moerl-environment still says s3://example-bucket/moerl, the example")
    assert lines[place + 1].startswith("      mend: set store in the ConfigMap moerl-environment")


def test_a_cluster_without_argo(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.remove_group("argoproj.io")
    findings = diagnose()
    assert of(findings, "Argo Workflows").state == "fail"
    assert "workflows.argoproj.io" in of(findings, "Argo Workflows").detail
    assert of(findings, "templates").state == "fail"


def test_a_cluster_without_jobset_trains_on_one_node(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.remove_group("jobset.x-k8s.io")
    finding = of(diagnose(), "JobSet")
    assert (finding.state, finding.mend) == ("warn", "install JobSet (docs/install-eks.md)")


@pytest.mark.parametrize(
    ("image", "replicas", "state", "words"),
    [
        ("quay.io/argoproj/workflow-controller:v3.7.1", 1, "fail", "need 4.0 or newer"),
        ("quay.io/argoproj/workflow-controller:latest", 1, "warn", "version is not known"),
        ("quay.io/argoproj/workflow-controller:v4.1.2", 0, "fail", "no pod that is ready"),
    ],
)
def test_a_controller_that_is_old_or_does_not_run(
    sound: KubernetesApi, diagnose: Diagnose, image: str, replicas: int, state: str, words: str
) -> None:
    kind = sound.kind("deployments")
    deployment = sound.store.get(kind, "argo", "workflow-controller")
    deployment["spec"]["template"]["spec"]["containers"][0]["image"] = image
    deployment["status"]["availableReplicas"] = replicas
    sound.store.replace(kind, "argo", "workflow-controller", deployment)
    finding = of(diagnose(), "controller")
    assert finding.state == state and words in finding.detail


def test_no_controller_at_all(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.store.delete(sound.kind("deployments"), "argo", "workflow-controller")
    assert of(diagnose(), "controller").state == "fail"


def test_templates_of_another_version_are_told_by_what_differs(sound: KubernetesApi, diagnose: Diagnose) -> None:
    assert [one.detail for one in diagnose() if one.check == "templates"] == [
        "WorkflowTemplate policy-iteration, as rendered for profile cpu",
        "WorkflowTemplate policy-campaign, as rendered for profile cpu",
    ]
    templates = sound.get("workflowtemplates", "policy-campaign")["spec"]["templates"]
    next(one for one in templates if one["name"] == "init")["retryStrategy"]["limit"] = "9"
    sound.patch("workflowtemplates", "policy-campaign", {"spec": {"templates": templates}})
    finding = of(diagnose(), "templates")
    assert finding.state == "warn" and finding.detail.endswith("profile cpu: templates.init.retryStrategy.limit")


def test_templates_of_another_profile_are_told(sound: KubernetesApi, diagnose: Diagnose) -> None:
    finding = of(diagnose("p5en"), "templates")
    assert "is that of profile cpu, not of p5en" in finding.detail and "--profile cpu" in finding.mend


def test_templates_with_other_defaults_or_empty_fields_are_the_same(sound: KubernetesApi, diagnose: Diagnose) -> None:
    spec = sound.get("workflowtemplates", "policy-campaign")["spec"]
    next(one for one in spec["arguments"]["parameters"] if one["name"] == "image")["value"] = "registry.example/moerl:2"
    for template in spec["templates"]:
        template |= {"inputs": {}, "metadata": {}} | template
    sound.patch("workflowtemplates", "policy-campaign", {"spec": spec})
    assert of(diagnose(), "templates").state == "ok"


def test_a_password_in_an_address_is_neither_shown_nor_sent(
    sound: KubernetesApi, diagnose: Diagnose, mlflow: str
) -> None:
    address = mlflow.replace("//", "//user:hidden-word@")
    sound.patch("configmaps", "moerl-environment", {"data": {"mlflow-tracking-uri": address}})
    assert of(diagnose(), "MLflow").detail == f"{mlflow} answers"


def test_templates_of_another_version(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.patch("workflowtemplates", "policy-campaign", {"spec": {"arguments": {"parameters": [{"name": "run"}]}}})
    finding = of(diagnose(), "templates")
    assert finding.state == "warn" and "of another version" in finding.detail


def test_rights_that_we_lack_name_the_commands(sound: KubernetesApi, tmp_path: Path) -> None:
    token = sound.add_user("reader", [{"apiGroups": ["argoproj.io"], "resources": ["workflows"], "verbs": ["get"]}])
    sound.kubeconfig(tmp_path / "reader", token)
    findings = list(examine(cluster_of(tmp_path / "reader"), load_profile("cpu")))
    lacking = [finding.detail for finding in findings if finding.check == "rights"]
    assert len(lacking) == len(OPERATOR_RIGHTS) - 1
    assert "you may not create workflows.argoproj.io in namespace moerl (moerl submit, resume)" in lacking
    assert all(finding.mend for finding in findings if finding.state in ("warn", "fail"))


def test_an_account_that_is_missing_or_may_not(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.store.delete(sound.kind("serviceaccounts"), "moerl", "moerl-step")
    sound.authorizer.rules["system:serviceaccount:moerl:moerl-campaign"].clear()
    findings = diagnose()
    assert of(findings, "account moerl-step").state == "fail"
    details = [finding.detail for finding in findings if finding.check == "account moerl-campaign"]
    assert "it may not create workflows.argoproj.io, which iterations of a campaign needs" in details


@pytest.mark.parametrize(
    ("data", "check", "state", "words"),
    [
        ({"store": "/data"}, "store", "fail", "pods on several nodes can't share"),
        ({"store": None}, "store", "fail", "store = ''"),
        ({"s3-endpoint-url": "http://127.0.0.1:1"}, "store", "warn", "can't be reached from here"),
        ({"s3-endpoint-url": "http://s3.moerl.svc.invalid:9000"}, "store", "skip", "can't be resolved from here"),
        ({"s3-endpoint-url": "nonsense"}, "store", "fail", "is not an address"),
        ({"mlflow-tracking-uri": None}, "MLflow", "warn", "none is configured"),
        ({"mlflow-tracking-uri": "sqlite:///mlflow.db"}, "MLflow", "warn", "no server that pods can share"),
        ({"mlflow-tracking-uri": "http://127.0.0.1:1"}, "MLflow", "warn", "can't be reached from here"),
    ],
)
def test_services_that_are_wrong_or_away(
    sound: KubernetesApi, diagnose: Diagnose, data: dict[str, str | None], check: str, state: str, words: str
) -> None:
    sound.patch("configmaps", "moerl-environment", {"data": data})
    finding = of(diagnose(), check)
    assert finding.state == state and words in finding.detail, finding


def test_a_tracking_server_that_is_something_else(sound: KubernetesApi, diagnose: Diagnose, mlflow: str) -> None:
    sound.patch("configmaps", "moerl-environment", {"data": {"mlflow-tracking-uri": f"{mlflow}/other"}})
    finding = of(diagnose(), "MLflow")
    assert finding.state == "warn" and "404" in finding.detail


@pytest.mark.parametrize(
    ("values", "check", "words"),
    [
        ({}, "credentials", "no key database-url"),
        ({"database-url": "postgresql+psycopg://h/d", "aws-access-key-id": "x"}, "credentials", "not its partner"),
        ({"database-url": "sqlite:////tmp/x"}, "database", "no postgresql+psycopg:// address"),
        ({"database-url": "hidden:word"}, "database", "no postgresql+psycopg:// address"),
        ({"database-url": "postgresql+psycopg://host:port/d"}, "database", "not an address"),
    ],
)
def test_a_secret_that_is_wrong(
    sound: KubernetesApi, diagnose: Diagnose, values: dict[str, str], check: str, words: str
) -> None:
    set_secret(sound, values)
    finding = of(diagnose(), check)
    assert finding.state == "fail" and words in finding.detail and finding.mend
    assert "hidden" not in finding.detail + finding.mend


def test_a_database_that_is_away(sound: KubernetesApi, diagnose: Diagnose) -> None:
    set_secret(sound, {"database-url": "postgresql+psycopg://u:p@127.0.0.1:1/moerl"})
    assert of(diagnose(), "database").state == "warn"


def test_a_config_map_or_secret_that_is_missing(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.store.delete(sound.kind("configmaps"), "moerl", "moerl-environment")
    sound.store.delete(sound.kind("secrets"), "moerl", "moerl-credentials")
    findings = diagnose()
    assert of(findings, "environment").state == "fail" and "templates/install" in of(findings, "environment").mend
    assert of(findings, "credentials").state == "fail"


def test_an_image_that_pods_wait_for(sound: KubernetesApi, diagnose: Diagnose) -> None:
    add_pod(sound, "digits-init-1", "digits", phase="Pending")
    waiting = {"image": IMAGE.value, "state": {"waiting": {"reason": "ImagePullBackOff"}}}
    sound.patch("pods", "digits-init-1", {"status": {"containerStatuses": [waiting]}})
    finding = of(diagnose(), "image")
    assert finding.state == "fail" and "ImagePullBackOff" in finding.detail


def test_an_image_without_a_registry_must_be_on_every_node(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.add("nodes", node("node-2", LAPTOP))
    finding = of(diagnose(), "image")
    assert finding.state == "warn" and "on 1 of 2 node(s)" in finding.detail


def test_nodes_that_are_too_small(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.store.replace(sound.kind("nodes"), "", "node-1", node("node-1", {"cpu": "4", "memory": "3Gi"}))
    findings = diagnose()
    assert of(findings, "nodes for control").state == "ok"
    finding = of(findings, "nodes for trainer")
    assert finding.state == "fail" and "short of memory" in finding.detail


def test_nodes_of_a_gpu_profile(sound: KubernetesApi, diagnose: Diagnose) -> None:
    absent = of(diagnose("p5en"), "nodes for trainer")
    assert absent.state == "fail" and "no p5en.48xlarge node" in absent.detail
    sound.add("nodepools", {"metadata": {"name": "gpu"}})
    assert of(diagnose("p5en"), "nodes for trainer").state == "warn"
    sound.add("nodes", node("gpu-1", P5EN, **{"node.kubernetes.io__instance-type": "p5en.48xlarge"}))
    assert of(diagnose("p5en"), "nodes for trainer").state == "ok"


@pytest.mark.parametrize(
    ("missing", "words"), [("vpc.amazonaws.com/efa", "EFA device plugin"), ("hugepages-2Mi", "preallocate them")]
)
def test_gpu_nodes_without_efa_or_huge_pages(
    sound: KubernetesApi, diagnose: Diagnose, missing: str, words: str
) -> None:
    allocatable = {name: quantity for name, quantity in P5EN.items() if name != missing}
    sound.add("nodes", node("gpu-1", allocatable, **{"node.kubernetes.io__instance-type": "p5en.48xlarge"}))
    finding = of(diagnose("p5en"), "nodes for trainer")
    assert finding.state == "fail" and missing in finding.detail and words in finding.mend


@pytest.mark.parametrize("version", ["v1beta1", "v1beta2"])
def test_a_queue_that_does_not_exist(sound: KubernetesApi, diagnose: Diagnose, version: str) -> None:
    queues = sound.kind("localqueues")
    sound.kinds = [replace(one, version=version) if one is queues else one for one in sound.kinds]
    template = sound.get("workflowtemplates", "policy-campaign")
    declared = template["spec"]["arguments"]["parameters"]
    changed = [entry | ({"value": "gpu"} if entry["name"] == "queue" else {}) for entry in declared]
    sound.patch("workflowtemplates", "policy-campaign", {"spec": {"arguments": {"parameters": changed}}})
    assert of(diagnose(), "queue").state == "fail"
    sound.add("localqueues", {"metadata": {"name": "gpu"}})
    findings = diagnose()
    assert of(findings, "queue").state == "ok" and version in of(findings, "Kueue").detail


def test_a_cluster_without_nodes_lacks_a_node_and_not_one_with_gpus(sound: KubernetesApi, diagnose: Diagnose) -> None:
    sound.store.delete(sound.kind("nodes"), "", "node-1")
    findings = diagnose("p5en")
    assert of(findings, "nodes for control").detail == "no node"
    assert of(findings, "nodes for trainer").detail == "no p5en.48xlarge node"


def test_a_cluster_that_is_away_is_one_line(api: KubernetesApi, moerl: Moerl) -> None:
    api.refuse("GET /version")
    code, out, err = moerl("doctor")
    assert (code, out, err.count("\n")) == (69, "", 1)


def test_an_unknown_profile_is_named(moerl: Moerl) -> None:
    code, _, err = moerl("doctor", "--profile", "p9")
    assert code == 78 and "no platform profile 'p9'" in err


def test_the_schedule_is_the_one_that_is_rendered() -> None:
    assert yaml.safe_load((TEMPLATES / "policy-retraining.yaml").read_text())["metadata"]["name"] == CRON_NAME
