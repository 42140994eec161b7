"""The EKS overlay: node pools that every pod fits, EFA kept apart, and rights on the bucket."""

import inspect
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from steps.adapters import s3_download, s3_store
from tests.kustomization import EKS, NODES, Document, build
from workflows import engines
from workflows.platform import CAPACITY_TYPE_LABEL, INSTANCE_TYPE_LABEL, load_profile, quantity_bytes

PROFILE = load_profile("p5en")
BUILT = build(NODES)
POOLS = {pool["metadata"]["name"]: pool["spec"]["template"]["spec"] for pool in BUILT.all("NodePool")}
LABELS = {
    pool["metadata"]["name"]: pool["spec"]["template"].get("metadata", {}).get("labels", {})
    for pool in BUILT.all("NodePool")
}
CLASSES = {one["metadata"]["name"]: one["spec"] for one in BUILT.all("EC2NodeClass")}
ACCELERATED = {"moerl-gpu", "moerl-gpu-spot", "moerl-train", "moerl-engine"}
IAM_OF_CALL = {
    "head_bucket": {"s3:ListBucket"},
    "list_objects_v2": {"s3:ListBucket"},
    "head_object": {"s3:GetObject"},
    "get_object": {"s3:GetObject"},
    "put_object": {"s3:PutObject"},
    "upload_file": {"s3:PutObject", "s3:AbortMultipartUpload"},
    "delete_objects": {"s3:DeleteObject"},
}
"""Actions that S3 asks for each call of the client (Service Authorization Reference, Amazon S3)."""
DRAIN_BEFORE_CAPACITY_BLOCK_ENDS_S = 600
"""Karpenter's documentation, "Utilizing ODCRs and Capacity Blocks"."""
TAG = re.compile(r"\{\{[^{}]*\}\}")

Pod = dict[str, Any]


def pods_of_workflows() -> Iterator[tuple[str, Pod]]:
    """(name, what the scheduler sees) of every pod that the rendered workflows make."""
    for document in build(EKS).all("WorkflowTemplate"):
        for template in document["spec"]["templates"]:
            name = f"{document['metadata']['name']}/{template['name']}"
            if "container" in template:
                yield name, {**template, "containers": [template["container"]]}
            elif template.get("resource", {}).get("action") == "apply":
                manifest = yaml.safe_load(TAG.sub("1", template["resource"]["manifest"]))
                if manifest["kind"] == "JobSet":
                    yield name, manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
                elif manifest["kind"] == "StatefulSet":
                    yield name, manifest["spec"]["template"]["spec"]


def requests(pod: Pod) -> dict[str, str]:
    return dict(pod["containers"][0]["resources"]["requests"])


def requirement(pool: Document, key: str) -> set[str] | None:
    values = [set(one["values"]) for one in pool["requirements"] if one["key"] == key and one["operator"] == "In"]
    return set.intersection(*values) if values else None


def efa_interfaces(node_class: Document) -> int:
    return sum(one["interfaceType"] == "efa-only" for one in node_class.get("networkInterfaces", []))


def hugepages(pool: str) -> int:
    """Bytes that Karpenter expects on the pool's nodes."""
    return sum(
        quantity_bytes(overlay["spec"]["capacity"]["hugepages-2Mi"])
        for overlay in BUILT.all("NodeOverlay")
        for one in overlay["spec"]["requirements"]
        if one["key"] == "karpenter.sh/nodepool" and pool in one["values"]
    )


def takes(name: str, pod: Pod) -> bool:
    """Whether Karpenter would launch a node of this pool for the pod: taints, labels, GPUs, EFA, huge pages."""
    pool, wanted = POOLS[name], requests(pod)
    if any(LABELS[name].get(label) in values for label, values in excluded(pod)):
        return False
    for taint in pool.get("taints", []):
        if not any(tolerates(one, taint) for one in pod.get("tolerations") or []):
            return False
    for label, value in (pod.get("nodeSelector") or {}).items():
        if value not in (requirement(pool, label) or set()):
            return False
    if int(wanted.get("nvidia.com/gpu", 0)) > (PROFILE.gpus if name in ACCELERATED else 0):
        return False
    if int(wanted.get("vpc.amazonaws.com/efa", 0)) > efa_interfaces(CLASSES[pool["nodeClassRef"]["name"]]):
        return False
    return "hugepages-2Mi" not in wanted or quantity_bytes(wanted["hugepages-2Mi"]) <= hugepages(name)


def excluded(pod: Pod) -> Iterator[tuple[str, list[str]]]:
    """(label, values) of the nodes that the pod's required affinity keeps it from."""
    affinity = (pod.get("affinity") or {}).get("nodeAffinity", {})
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution", {})
    for term in required.get("nodeSelectorTerms", []):
        for expression in term["matchExpressions"]:
            assert expression["operator"] == "NotIn"
            yield expression["key"], expression["values"]


def tolerates(toleration: dict[str, str], taint: dict[str, str]) -> bool:
    equal = toleration.get("operator", "Equal") == "Exists" or toleration.get("value") == taint.get("value")
    return toleration.get("key") == taint["key"] and equal and toleration.get("effect") in (None, "", taint["effect"])


PODS = dict(pods_of_workflows())


@pytest.mark.parametrize("pod", PODS.values(), ids=list(PODS))
def test_every_pod_of_the_workflows_finds_a_node_pool_of_its_kind(pod: Pod) -> None:
    pools = {name for name in POOLS if takes(name, pod)}
    if pod["containers"][0].get("name") == engines.CONTAINER:
        assert pools == {"moerl-engine"}
    elif "vpc.amazonaws.com/efa" in requests(pod):
        assert pools == {"moerl-train"}
    elif "nvidia.com/gpu" in requests(pod):
        assert pools == {"moerl-gpu", "moerl-gpu-spot"}
    else:
        assert pools == {"moerl-stable", "moerl-spot"}


def test_the_workflows_have_pods_of_all_three_kinds() -> None:
    kinds = {
        (int(requests(pod).get("nvidia.com/gpu", 0)), int(requests(pod).get("vpc.amazonaws.com/efa", 0)))
        for pod in PODS.values()
    }
    assert {(0, 0), (1, 0), (PROFILE.gpus, PROFILE.efa)} <= kinds


def test_capacity_types_of_the_pools_are_those_of_the_profile() -> None:
    types = {name: requirement(pool, CAPACITY_TYPE_LABEL) or set() for name, pool in POOLS.items()}
    assert types["moerl-spot"] == types["moerl-gpu-spot"] == {PROFILE.capacity["interruptible"]}
    assert PROFILE.capacity["stable"] in types["moerl-stable"] & types["moerl-gpu"]
    assert PROFILE.capacity["training"] in types["moerl-train"]
    assert PROFILE.capacity["interruptible"] in types["moerl-engine"]
    assert "spot" not in types["moerl-train"] | types["moerl-stable"] | types["moerl-gpu"]
    assert set().union(*types.values()) == {"spot", "on-demand", "reserved"}


def test_trainers_and_engines_nodes_have_all_interfaces_of_the_instance_and_the_others_none() -> None:
    interfaces = CLASSES["moerl-train"]["networkInterfaces"]
    assert interfaces[0] == {"networkCardIndex": 0, "deviceIndex": 0, "interfaceType": "interface"}
    assert efa_interfaces(CLASSES["moerl-train"]) == PROFILE.efa
    assert [one["networkCardIndex"] for one in interfaces[1:]] == list(range(PROFILE.efa))
    assert len({(one["networkCardIndex"], one["deviceIndex"]) for one in interfaces}) == len(interfaces)
    assert CLASSES["moerl-engine"]["networkInterfaces"] == interfaces
    assert CLASSES["moerl-engine"]["userData"] == CLASSES["moerl-train"]["userData"]
    assert efa_interfaces(CLASSES["moerl-gpu"]) == 0
    assert CLASSES["moerl-gpu"]["networkInterfaces"], "without the field Karpenter offers all EFA interfaces"


def test_the_overlay_promises_no_more_huge_pages_than_the_node_sets_aside() -> None:
    (pages,) = re.findall(r"vm\.nr_hugepages=(\d+)", CLASSES["moerl-train"]["userData"])
    assert hugepages("moerl-train") == int(pages) * quantity_bytes("2Mi")
    assert hugepages("moerl-engine") == hugepages("moerl-train")
    assert hugepages("moerl-train") >= quantity_bytes(PROFILE.resources["trainer"].hugepages)


def test_trainers_nodes_are_of_one_zone_and_one_instance_type_and_stay() -> None:
    pool = POOLS["moerl-train"]
    assert requirement(pool, INSTANCE_TYPE_LABEL) == {PROFILE.instance_type}
    assert len(requirement(pool, "topology.kubernetes.io/zone") or set()) == 1
    assert pool["expireAfter"] == "Never"
    (budgets,) = [
        one["spec"]["disruption"]["budgets"]
        for one in BUILT.all("NodePool")
        if one["metadata"]["name"] == "moerl-train"
    ]
    assert {"nodes": "0", "reasons": ["Drifted"]} in budgets


def test_no_pool_moves_a_running_pod_or_cuts_its_grace_period() -> None:
    for pool in BUILT.all("NodePool"):
        assert pool["spec"]["disruption"]["consolidationPolicy"] == "WhenEmpty"
        assert pool["spec"]["limits"]
        assert pool["spec"]["template"]["spec"]["nodeClassRef"]["name"] in CLASSES
    assert {name for name, pool in POOLS.items() if "terminationGracePeriod" in pool} == {"moerl-train"}


def test_a_trainer_gets_its_whole_grace_period_before_a_capacity_block_ends() -> None:
    gang = PODS["policy-iteration/train-gang"]
    minutes = int(POOLS["moerl-train"]["terminationGracePeriod"].removesuffix("m"))
    assert gang["terminationGracePeriodSeconds"] < minutes * 60 < DRAIN_BEFORE_CAPACITY_BLOCK_ENDS_S


def test_the_bucket_policy_allows_what_the_store_calls_and_no_more() -> None:
    source = "".join(inspect.getsource(module) for module in (s3_store, s3_download))
    calls = set(re.findall(r"_(?:client|transfers)\.([a-z_0-9]+)\(", source)) | set(
        re.findall(r'get_paginator\("([a-z_0-9]+)"\)', source)
    )
    calls -= {"get_paginator"}
    assert calls <= IAM_OF_CALL.keys()
    policy = json.loads((EKS / "bucket-policy.json").read_text())
    allowed = {
        action
        for statement in policy["Statement"]
        for action in ([statement["Action"]] if isinstance(statement["Action"], str) else statement["Action"])
    }
    assert allowed == set().union(*(IAM_OF_CALL[call] for call in calls))
    assert {statement["Effect"] for statement in policy["Statement"]} == {"Allow"}


def test_store_reports_and_policy_name_the_same_bucket_and_prefix() -> None:
    built = build(EKS)
    store = built.one("ConfigMap", "moerl-environment")["data"]["store"]
    bucket, _, prefix = store.removeprefix("s3://").partition("/")
    repository = yaml.safe_load(built.one("ConfigMap", "artifact-repositories")["data"]["moerl"])
    assert repository["s3"]["bucket"] == bucket
    resources = [one["Resource"] for one in json.loads((EKS / "bucket-policy.json").read_text())["Statement"]]
    assert resources == [f"arn:aws:s3:::{bucket}", f"arn:aws:s3:::{bucket}/{prefix}/*"]
    keys = [
        artifact["s3"]["key"]
        for document in built.all("WorkflowTemplate")
        for template in document["spec"]["templates"]
        for artifact in template.get("outputs", {}).get("artifacts", [])
    ]
    assert keys and all(key.startswith(f"{prefix}/") for key in keys)


def test_no_static_keys_are_needed_on_eks() -> None:
    repository = yaml.safe_load(build(EKS).one("ConfigMap", "artifact-repositories")["data"]["moerl"])
    assert repository["s3"]["useSDKCreds"] is True
    assert not repository["s3"].keys() & {"accessKeySecret", "secretKeySecret"}
