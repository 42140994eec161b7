"""The laptop overlay's services: probes, non-root, pinned images, and keys, ports and names that fit together."""

import re
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.kustomization import LAPTOP, REPOSITORY, build, documents_of, pods
from workflows import parameters
from workflows.containers import USER_ID

SERVICES = [one for name in ("postgresql", "s3", "mlflow") for one in documents_of(LAPTOP / f"{name}.yaml")]
PODS = dict(pods(SERVICES))
CONTAINERS = {
    f"{owner}/{container['name']}": container
    for owner, pod in PODS.items()
    for container in [*pod.get("initContainers", []), *pod["containers"]]
}
STEP_KEYS = {"database-url", "aws-access-key-id", "aws-secret-access-key"}
GUIDE = (REPOSITORY / "docs" / "install-laptop.md").read_text()

each_container = pytest.mark.parametrize("container", CONTAINERS.values(), ids=list(CONTAINERS))
each_pod = pytest.mark.parametrize("pod", PODS.values(), ids=list(PODS))


def test_there_is_a_database_a_store_and_a_tracking_server() -> None:
    assert set(PODS) == {"postgresql", "s3", "mlflow"}


@each_pod
def test_pods_run_as_nobody_special_and_can_call_no_api(pod: dict[str, Any]) -> None:
    assert pod["automountServiceAccountToken"] is False
    security = pod["securityContext"]
    assert security["runAsNonRoot"] is True and security["runAsUser"] >= 70
    assert security["fsGroup"] == security["runAsGroup"] == security["runAsUser"]
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}


@each_container
def test_containers_have_no_privileges_a_fixed_image_and_bounds(container: dict[str, Any]) -> None:
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert re.fullmatch(r"[a-z0-9./-]+:[0-9][A-Za-z0-9.-]*", container["image"]), "a version, not latest"
    assert {"cpu", "memory"} == container["resources"]["requests"].keys()
    assert "memory" in container["resources"]["limits"]


@each_pod
def test_every_server_is_probed_on_its_own_port(pod: dict[str, Any]) -> None:
    for container in pod["containers"]:
        ports = {port["name"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            get = container[probe].get("httpGet")
            assert get["port"] in ports if get else container[probe]["exec"]["command"]


@each_pod
def test_nothing_is_written_but_to_volumes_that_exist(pod: dict[str, Any]) -> None:
    claims = {
        claim["metadata"]["name"]
        for one in SERVICES
        if one["kind"] == "StatefulSet" and one["spec"]["template"]["spec"] is pod
        for claim in one["spec"]["volumeClaimTemplates"]
    }
    volumes = {volume["name"] for volume in pod.get("volumes", [])} | claims
    for container in [*pod.get("initContainers", []), *pod["containers"]]:
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts.keys() <= volumes
        assert "/tmp" in mounts.values()


def test_passwords_come_from_the_one_secret_and_the_guide_makes_every_key() -> None:
    keys = set(STEP_KEYS)
    for container in CONTAINERS.values():
        for variable in container.get("env", []):
            reference = variable.get("valueFrom", {}).get("secretKeyRef")
            if reference:
                assert reference["name"] == parameters.CREDENTIALS_SECRET
                keys.add(reference["key"])
            assert reference or not re.search("PASSWORD$|SECRET|ACCESS_KEY", variable["name"])
    assert keys == {match[1] for match in re.finditer(r"^([a-z-]+)=\S+$", GUIDE, re.MULTILINE)}


def test_urls_of_the_steps_lead_to_services_that_select_a_pod_with_that_port() -> None:
    built = build(LAPTOP)
    data = built.one("ConfigMap", parameters.ENVIRONMENT_CONFIG_MAP)["data"]
    assert data["store"].startswith("s3://moerl/")
    urls = [data["s3-endpoint-url"], data["mlflow-tracking-uri"]]
    (database,) = re.findall(r"^database-url=(\S+)$", GUIDE, re.MULTILINE)
    for url in [*urls, database]:
        parts = urlsplit(url)
        service = built.one("Service", str(parts.hostname))
        (port,) = service["spec"]["ports"]
        assert port["port"] == parts.port
        (workload,) = [
            one
            for one in built.all("Deployment", "StatefulSet")
            if one["spec"]["template"]["metadata"]["labels"] == service["spec"]["selector"]
        ]
        assert workload["spec"]["selector"]["matchLabels"] == service["spec"]["selector"]
        named = {
            item["name"]
            for container in workload["spec"]["template"]["spec"]["containers"]
            for item in container["ports"]
        }
        assert port["targetPort"] in named


def test_mlflow_is_our_image_run_as_our_user_and_answers_to_the_name_that_the_steps_call() -> None:
    pod = PODS["mlflow"]
    assert {container["image"] for container in [*pod["initContainers"], *pod["containers"]]} == {
        parameters.DEFAULT_IMAGE
    }
    assert pod["securityContext"]["runAsUser"] == USER_ID
    (hosts,) = [a.partition("=")[2] for a in pod["containers"][0]["args"] if a.startswith("--allowed-hosts=")]
    uri = build(LAPTOP).one("ConfigMap", parameters.ENVIRONMENT_CONFIG_MAP)["data"]["mlflow-tracking-uri"]
    assert urlsplit(uri).netloc in hosts.split(",")


def test_of_the_s3_servers_parts_only_the_one_that_asks_for_signatures_is_reachable() -> None:
    arguments = dict(argument.split("=") for argument in CONTAINERS["s3/s3"]["args"] if "ip" in argument)
    assert arguments == {"-ip": "127.0.0.1", "-ip.bind": "127.0.0.1", "-s3.ip.bind": "0.0.0.0"}
    assert {"-s3.port.iceberg=0", "-s3.port.lance=0"} <= set(CONTAINERS["s3/s3"]["args"]), "two more, on by default"
    (service,) = [one for one in documents_of(LAPTOP / "s3.yaml") if one["kind"] == "Service"]
    assert [port["port"] for port in service["spec"]["ports"]] == [8333]
