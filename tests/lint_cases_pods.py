"""Traps of pods, gangs, security, roles and platforms. One edit each."""

from typing import Any

from tests.tampering import Case, Documents
from workflows.platform import EFA_RESOURCE, GPU_RESOURCE, HUGEPAGES_RESOURCE

ITERATION, CAMPAIGN = "policy-iteration", "policy-campaign"


def _resource(docs: Documents, name: str, value: str | None, *, template: str = "train", where: str = "both") -> None:
    sizes = docs.container(template)["resources"]
    for which in ("requests", "limits") if where == "both" else (where,):
        if value is None:
            del sizes[which][name]
        else:
            sizes[which][name] = value


def _set_env(docs: Documents, name: str, value: str, template: str = "train") -> None:
    environment = docs.container(template)["env"]
    environment[:] = [item for item in environment if item["name"] != name] + [{"name": name, "value": value}]


def _unset_env(docs: Documents, name: str) -> None:
    environment = docs.container("train")["env"]
    environment[:] = [item for item in environment if item["name"] != name]


def _shm(docs: Documents, size: str | None) -> None:
    (volume,) = docs.template(ITERATION, "train")["volumes"]
    if size is None:
        del volume["emptyDir"]["sizeLimit"]
    else:
        volume["emptyDir"]["sizeLimit"] = size


def _capacity(docs: Documents, template: str, value: str) -> None:
    affinity = docs.template(ITERATION, template)["affinity"]["nodeAffinity"]
    (term,) = affinity["preferredDuringSchedulingIgnoredDuringExecution"]
    term["preference"]["matchExpressions"][0]["values"] = [value]


def _blocking_budget(docs: Documents) -> None:
    docs["PodDisruptionBudget/rollouts"] = {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {"name": "rollouts"},
        "spec": {"maxUnavailable": 0, "selector": {"matchLabels": {"app": "rollouts"}}},
    }


def _secret(docs: Documents) -> None:
    docs["Secret/moerl-credentials"] = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "moerl-credentials"},
        "stringData": {"database-url": "sqlite:///x"},
    }


def _role(docs: Documents, **changes: Any) -> None:
    docs.of("Role/moerl-step")["rules"][0].update(changes)


def _secret_role(docs: Documents) -> None:
    docs.of("Role/moerl-step")["rules"].append({"apiGroups": [""], "resources": ["secrets"], "verbs": ["get"]})


def _label_watchers(docs: Documents) -> None:
    docs.of(ITERATION)["spec"]["podMetadata"] = {"labels": {"kueue.x-k8s.io/queue-name": "train"}}


def _always_queued(docs: Documents) -> None:
    text = docs.template(ITERATION, "train-gang")["resource"]["manifest"]
    (line,) = [line for line in text.splitlines() if "kueue.x-k8s.io/queue-name" in line]
    docs.gang(line, "    kueue.x-k8s.io/queue-name: '{{workflow.parameters.queue}}'")


def _fewer_interfaces(docs: Documents) -> None:
    docs.of("EC2NodeClass/moerl-train")["spec"]["networkInterfaces"].pop()


def _resource_of(docs: Documents, template: str, **changes: Any) -> None:
    workflow = ITERATION if template == "train-gang" else CAMPAIGN
    resource = docs.template(workflow, template)["resource"]
    resource.update({key: value for key, value in changes.items() if value is not None})
    for key in [key for key, value in changes.items() if value is None]:
        del resource[key]


def _engines(docs: Documents, old: str, new: str, **changes: Any) -> None:
    resource = docs.template(CAMPAIGN, "engine-pods")["resource"]
    assert old in resource["manifest"]
    resource["manifest"] = resource["manifest"].replace(old, new)
    resource.update(changes)


def _args(docs: Documents, workflow: str, template: str, old: str, new: str) -> None:
    arguments = docs.container(template, workflow)["args"]
    arguments[arguments.index(old) + 1] = new


CASES = (
    Case("object-created", lambda docs: _resource_of(docs, "train-gang", action="create")),
    Case(
        "object-name",
        lambda docs: docs.gang("  name: t-{{workflow.name}}\n", "  generateName: t-{{workflow.name}}-\n"),
        ("gang-name",),
    ),
    Case("object-name", lambda docs: docs.gang("  name: t-{{workflow.name}}\n", "  name: t-{{retries}}\n")),
    Case("object-conditions", lambda docs: _resource_of(docs, "child", failureCondition=None)),
    Case(
        "object-conditions",
        lambda docs: _resource_of(
            docs, "child", successCondition="status.conditions.#(type==Completed).status == True"
        ),
    ),
    Case("object-conditions", lambda docs: _resource_of(docs, "train-gang", successCondition="status.succeeded == 1")),
    Case("object-owner", lambda docs: _resource_of(docs, "train-gang", setOwnerReference=None)),
    Case("exit-handler-missing", lambda docs: docs.of(ITERATION)["spec"].pop("onExit")),
    Case("exit-handler-missing", lambda docs: docs.of(CAMPAIGN)["spec"].pop("onExit")),
    Case("exit-handler-missing", lambda docs: docs.template(CAMPAIGN, "delete-engines")["resource"]["flags"].pop(0)),
    Case("object-owner", lambda docs: docs.template(CAMPAIGN, "engine-service")["resource"].pop("setOwnerReference")),
    Case("object-created", lambda docs: _engines(docs, "", "", action="create")),
    Case("profile-gpus", lambda docs: _engines(docs, "nvidia.com/gpu: '8'", "nvidia.com/gpu: '4'")),
    Case("profile-environment", lambda docs: _engines(docs, "name: EP_REUSE_NCCL_COMM", "name: EP_REUSE_COMM")),
    Case("profile-capacity", lambda docs: _engines(docs, "workflow.parameters['rollout-capacity']", "''spot''")),
    Case("rbac-missing", lambda docs: docs.pop("RoleBinding/moerl-engines")),
    Case("child-spec", lambda docs: docs.child("spec:\n", "spec:\n  activeDeadlineSeconds: 60\n")),
    Case("gang-restarts", lambda docs: docs.gang("maxRestarts: ", "maxRestarts: 0 # ")),
    Case("gang-restarts", lambda docs: docs.gang("backoffLimit: 0", "backoffLimit: 6")),
    Case("gang-restarts", lambda docs: docs.gang("restartPolicy: Never", "restartPolicy: OnFailure")),
    Case(
        "gang-rendezvous",
        lambda docs: docs.gang("completions: {{workflow.parameters.training-nodes}}", "completions: 3"),
    ),
    Case("gang-rendezvous", lambda docs: docs.gang("--master-addr", "--main-addr")),
    Case("object-name", lambda docs: docs.gang("/tmp/moerl/outputs", "/tmp/{{=pod.name}}")),
    Case("gang-failure-policy", lambda docs: docs.gang("name: Deadline", "name: UserError")),
    Case("gang-failure-policy", lambda docs: docs.gang("- DeadlineExceeded", "- Deadline")),
    Case("gang-failure-policy", lambda docs: docs.gang("containerName: trainer", "containerName: main")),
    Case("gang-failure-policy", lambda docs: docs.gang("- 64\n", "- 640\n")),
    Case("bad-name", lambda docs: docs.gang("app.kubernetes.io/name: argo-moe-rl", "app.kubernetes.io/name: argo rl")),
    Case("gang-name", lambda docs: docs.gang("name: t-{{workflow.name}}", "name: 1-{{workflow.name}}")),
    Case(
        "gang-name", lambda docs: docs.gang("  name: t-{{workflow.name}}\n", "  name: '{{workflow.name}}-training'\n")
    ),
    Case("gang-logs", lambda docs: docs.gang("workflows.argoproj.io/workflow:", "workflow:")),
    Case("queue-label", _always_queued),
    Case("queue-label", _label_watchers),
    Case("gang-on-spot", lambda docs: docs.gang("- reserved", "- spot"), ("grace-beyond-notice", "profile-capacity")),
    Case("bad-quantity", lambda docs: _resource(docs, "memory", "170GB"), ("profile-memory", "shm-memory")),
    Case("hugepages-units", lambda docs: _resource(docs, HUGEPAGES_RESOURCE, "5120"), ("profile-hugepages",)),
    Case("hugepages-units", lambda docs: docs.gang("5120Mi", "5121Mi"), ("profile-hugepages",)),
    Case("bad-quantity", lambda docs: _resource(docs, GPU_RESOURCE, "4", where="requests")),
    Case("memory-request", lambda docs: _resource(docs, "memory", "1Gi", where="requests")),
    Case("memory-request", lambda docs: docs.template(ITERATION, "train-gang").pop("podSpecPatch")),
    Case("shm-memory", lambda docs: _shm(docs, None), ("profile-shm",)),
    Case("shm-memory", lambda docs: _shm(docs, "1700Gi"), ("profile-shm",)),
    Case("unknown-volume", lambda docs: docs.template(ITERATION, "train").pop("volumes"), ("profile-shm",)),
    Case("deadline-missing", lambda docs: docs.template(ITERATION, "flush").pop("activeDeadlineSeconds")),
    Case("watcher-deadline", lambda docs: docs.template(ITERATION, "train-gang").update(activeDeadlineSeconds="3600")),
    Case(
        "grace-beyond-notice",
        lambda docs: docs.template(ITERATION, "rollout").update(podSpecPatch="terminationGracePeriodSeconds: 300\n"),
    ),
    Case("grace-missing", lambda docs: docs.template(ITERATION, "rollout").pop("podSpecPatch")),
    Case("pdb-on-spot", lambda docs: docs.of(ITERATION)["spec"].update(podDisruptionBudget={"minAvailable": 1})),
    Case("pdb-on-spot", _blocking_budget),
    Case(
        "do-not-disrupt-on-spot",
        lambda docs: docs.template(ITERATION, "rollout").update(
            metadata={"annotations": {"karpenter.sh/do-not-disrupt": "true"}}
        ),
    ),
    Case("rdmav-fork-safe", lambda docs: _set_env(docs, "RDMAV_FORK_SAFE", "1")),
    Case("socket-interface", lambda docs: _set_env(docs, "NCCL_SOCKET_IFNAME", "^lo,docker"), ("profile-environment",)),
    Case("socket-interface", lambda docs: _set_env(docs, "NCCL_SOCKET_IFNAME", "eth0"), ("profile-environment",)),
    Case("floating-image", lambda docs: docs.container("plan").update(image="argo-moe-rl:latest")),
    Case("floating-image", lambda docs: docs.container("plan").update(image="registry:5000/argo-moe-rl")),
    Case("secret-in-value", lambda docs: docs.container("plan")["env"].append({"name": "HF_TOKEN", "value": "abc"})),
    Case(
        "secret-in-text",
        lambda docs: docs.of("ConfigMap/moerl-environment")["data"].update(url="postgresql://moerl:hunter2@db/moerl"),
    ),
    Case("secret-in-text", lambda docs: docs.container("plan")["args"].append("AKIAIOSFODNN7EXAMPLE")),
    Case("secret-in-text", _secret),
    Case("run-as-root", lambda docs: docs.of(ITERATION)["spec"]["securityContext"].update(runAsNonRoot=False)),
    Case("run-as-root", lambda docs: docs.gang("runAsNonRoot: true", "runAsNonRoot: false")),
    Case("privileged", lambda docs: docs.container("train")["securityContext"].update(privileged=True)),
    Case("privileged", lambda docs: docs.container("train")["securityContext"].pop("allowPrivilegeEscalation")),
    Case("privileged", lambda docs: docs.container("train")["securityContext"]["capabilities"].update(drop=[])),
    Case("privileged", lambda docs: docs.gang("- IPC_LOCK", "- SYS_ADMIN"), ("profile-capabilities",)),
    Case(
        "privileged",
        lambda docs: docs.template(ITERATION, "train")["volumes"].append({"name": "dev", "hostPath": {"path": "/dev"}}),
    ),
    Case(
        "default-service-account",
        lambda docs: docs.gang("serviceAccountName: moerl-step", "serviceAccountName: default"),
    ),
    Case("rbac-wildcard", lambda docs: _role(docs, verbs=["*"]), ("rbac-missing",)),
    Case("rbac-wildcard", _secret_role),
    Case("rbac-missing", lambda docs: _role(docs, verbs=["create"])),
    Case("rbac-missing", lambda docs: docs.pop("RoleBinding/moerl-gang")),
    Case("profile-gpus", lambda docs: docs.gang("nvidia.com/gpu: '8'", "nvidia.com/gpu: '4'")),
    Case("profile-efa", lambda docs: docs.gang("vpc.amazonaws.com/efa: '16'", "vpc.amazonaws.com/efa: '8'")),
    Case(
        "profile-efa", lambda docs: _resource(docs, EFA_RESOURCE, None), ("profile-capabilities", "profile-hugepages")
    ),
    Case("profile-hugepages", lambda docs: docs.gang("5120Mi", "512Mi")),
    Case("profile-shm", lambda docs: docs.gang("sizeLimit: 200Gi", "sizeLimit: 2Gi")),
    Case("profile-memory", lambda docs: docs.gang("memory: 1700Gi", "memory: 900Gi")),
    Case("profile-toleration", lambda docs: docs.gang("- key: capacity-reservation", "- key: reservation")),
    Case("profile-node", lambda docs: docs.template(ITERATION, "train").pop("nodeSelector")),
    Case("profile-node", lambda docs: docs.gang("instance-type: p5en.48xlarge", "instance-type: p5.48xlarge")),
    Case("profile-environment", lambda docs: _unset_env(docs, "FI_PROVIDER")),
    Case("profile-environment", lambda docs: docs.gang("value: libfabric", "value: ibrc")),
    Case("profile-capacity", lambda docs: _capacity(docs, "train", "on-demand")),
    Case("profile-capacity", lambda docs: docs.template(ITERATION, "plan").pop("affinity")),
    Case("profile-capabilities", lambda docs: docs.container("train")["securityContext"]["capabilities"].pop("add")),
    Case("profile-gpus", lambda docs: _args(docs, CAMPAIGN, "init", "--most-ranks-per-node", "4")),
    Case("profile-efa", _fewer_interfaces),
)
