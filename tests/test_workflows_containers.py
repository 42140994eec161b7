"""Container templates: argv, environment, outputs, security, and which failures are tried again."""

import importlib.util
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from steps.environment import OPTIONAL_SETTINGS
from workflows import catalog
from workflows.containers import OUTPUTS_DIR, USER_ID
from workflows.local.expressions import evaluate_bool
from workflows.local.variables import substitute
from workflows.parameters import CAMPAIGN, DEFAULT_IMAGE
from workflows.platform import CPU, load_profile, quantity_bytes

REPOSITORY = Path(__file__).resolve().parent.parent
SPECS: dict[str, dict[str, Any]] = {
    name: yaml.safe_load(text)["spec"]
    for name, text in catalog.render_all().items()
    if "templates" in yaml.safe_load(text)["spec"]
}
LEAVES: list[dict[str, Any]] = [
    template for spec in SPECS.values() for template in spec["templates"] if "container" in template
]
# Options and outputs of every step's command.
COMMANDS = {
    "init": (
        "init_run",
        [
            *("--run", "--config", "--iterations", "--rollout-workers", "--reward-workers", "--dispatcher"),
            *("--training-nodes", "--rollout-engine", "--engine-pods", "--most-ranks-per-node"),
        ],
        [
            *("first-iteration", "iterations", "rollout-workers", "reward-workers", "training-nodes"),
            *("ranks-per-node", "engine-pods", "policy-version"),
        ],
    ),
    "plan": ("plan", ["--run", "--iteration"], ["policy-version", "units"]),
    "rollout": ("rollout", ["--run", "--iteration", "--worker", "--straggler-deadline"], ["samples", "tokens-per-s"]),
    "reward": ("reward", ["--run", "--iteration", "--worker"], ["reward-mean"]),
    "flush": ("flush", ["--run", "--iteration"], ["batch-uri", "samples"]),
    "train": ("train", ["--run", "--iteration"], ["checkpoint-uri"]),
    "publish": ("publish", ["--run", "--iteration"], ["publication-uri", "policy-version"]),
    "evaluate": ("evaluate", ["--run", "--iteration"], ["reward-eval", "validated"]),
    "report": ("report", ["--run", "--iteration"], ["summary", "mlflow-url"]),
    "summary": ("report", ["--run"], ["summary", "mlflow-url"]),
    "probe": ("transport_probe", ["--dispatcher", "--ranks"], []),
    "rollout-comparison": (
        "benchmark_rollout",
        ["--run", "--first", "--second", "--ranks", "--prompts"],
        ["summary", "ratio", "report"],
    ),
}
each_leaf = pytest.mark.parametrize("template", LEAVES, ids=[leaf["name"] for leaf in LEAVES])


def variables(template: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in template["container"]["env"]}


def test_every_step_has_one_template() -> None:
    assert sorted(leaf["name"] for leaf in LEAVES) == sorted(COMMANDS)


@each_leaf
def test_argv_names_a_step_module_with_its_options_and_its_outputs(template: dict[str, Any]) -> None:
    module, options, outputs = COMMANDS[template["name"]]
    container = template["container"]
    assert container["command"] == ["python", "-m", f"steps.{module}"]
    assert importlib.util.find_spec(f"steps.{module}") is not None
    assert container["args"][::2] == options
    literal = [value for value in container["args"][1::2] if not value.startswith("{{")]
    assert literal == (["0"] if template["name"] == "init" else [])
    declared = template.get("outputs", {}).get("parameters", [])
    assert [parameter["name"] for parameter in declared] == outputs
    assert all(parameter["valueFrom"] == {"path": f"{OUTPUTS_DIR}/{parameter['name']}"} for parameter in declared)


@each_leaf
def test_environment_comes_from_the_config_map_the_secret_and_the_downward_api(template: dict[str, Any]) -> None:
    environment = variables(template)
    assert environment["MOERL_STORE"]["valueFrom"]["configMapKeyRef"] == {
        "name": "{{workflow.parameters.environment}}",
        "key": "store",
    }
    assert environment["MOERL_DATABASE_URL"]["valueFrom"]["secretKeyRef"] == {
        "name": "{{workflow.parameters.credentials}}",
        "key": "database-url",
    }
    for name in ("MLFLOW_TRACKING_URI", "AWS_ENDPOINT_URL_S3", *OPTIONAL_SETTINGS):
        assert environment[name]["valueFrom"]["configMapKeyRef"]["optional"] is True
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        assert environment[name]["valueFrom"]["secretKeyRef"]["optional"] is True
    assert environment["POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert environment["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "spec.nodeName"
    assert environment["MOERL_ATTEMPT"]["value"] == "{{retries}}"
    assert environment["ARGO_WORKFLOW"]["value"] == "{{workflow.name}}"
    assert environment["OMP_NUM_THREADS"]["value"] == "1"


@each_leaf
def test_nothing_that_is_secret_has_a_literal_value(template: dict[str, Any]) -> None:
    for name, entry in variables(template).items():
        if any(word in name for word in ("KEY", "SECRET", "TOKEN", "PASSWORD", "DATABASE")):
            assert set(entry) == {"name", "valueFrom"}
            assert set(entry["valueFrom"]) == {"secretKeyRef"}


@each_leaf
def test_image_is_the_workflow_parameter(template: dict[str, Any]) -> None:
    assert template["container"]["image"] == "{{workflow.parameters.image}}"


@each_leaf
def test_container_asks_for_what_its_profile_says_and_cannot_gain_privileges(template: dict[str, Any]) -> None:
    resources = template["container"]["resources"]
    assert resources["requests"]["memory"] == resources["limits"]["memory"]
    sizes = [(size.cpu_request, size.cpu_limit, size.memory) for size in CPU.resources.values()]
    assert (resources["requests"]["cpu"], resources["limits"]["cpu"], resources["limits"]["memory"]) in sizes
    security = template["container"]["securityContext"]
    assert security == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@pytest.mark.parametrize("name", sorted(SPECS))
def test_pods_never_run_as_root_and_own_their_volumes(name: str) -> None:
    security = SPECS[name]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsUser"] == security["fsGroup"] == USER_ID


@each_leaf
def test_metrics_are_labelled_by_stage_and_by_no_run(template: dict[str, Any]) -> None:
    metrics = template["metrics"]["prometheus"]
    assert [next(kind for kind in ("gauge", "counter") if kind in metric) for metric in metrics] == ["gauge", "counter"]
    for metric in metrics:
        assert metric["name"].replace("_", "").isalnum()
        labels = {label["key"]: label["value"] for label in metric["labels"]}
        assert labels["stage"] == template["name"]
        assert set(labels) <= {"stage", "status"}


@each_leaf
@pytest.mark.parametrize(
    ("exit_code", "status", "message", "retried"),
    [
        ("75", "Failed", "main: Error (exit code 75)", True),
        ("143", "Failed", "main: Error (exit code 143)", True),
        ("137", "Failed", "main: Error (exit code 137)", True),
        ("69", "Failed", "main: Error (exit code 69)", True),
        ("-1", "Error", "pod deleted", True),
        ("-1", "Failed", "Pod was terminated in response to imminent node shutdown.", True),
        ("143", "Failed", "The node was low on resource: memory.", True),
        ("-1", "Failed", "Preempted in order to admit critical pod", True),
        ("-1", "Failed", "pod failed: neither main nor wait container completed successfully", True),
        ("-1", "Error", "Pod failed before main container starts due to ContainerCreating: node is gone", True),
        ("-1", "Failed", "can't find failed message for pod run-1-00001-rollout-1 namespace moerl", True),
        ("0", "Error", "wait: Error (exit code 64): failed to put file: connection reset by peer", True),
        ("137", "Failed", "main: OOMKilled (exit code 137)", False),
        ("69", "Failed", "main: Error (exit code 69): flush: s3://b/runs: 403 Forbidden; check its policy", True),
        ("75", "Failed", "main: Error (exit code 75): rollout: the drain passed its deadline", True),
        ("1", "Failed", "main: Error (exit code 1)", False),
        ("1", "Failed", "main: Error (exit code 1): train: KeyError: evicted", False),
        ("0", "Error", "wait: OOMKilled (exit code 137)", False),
        ("143", "Failed", "Step exceeded its deadline", False),
        ("64", "Failed", "main: Error (exit code 64)", False),
        ("65", "Failed", "main: Error (exit code 65)", False),
        ("78", "Failed", "main: Error (exit code 78)", False),
        ("75", "Failed", "Pod was active on the node longer than the specified deadline", False),
        ("0", "Error", 'wait: Error (exit code 64): workflowtaskresults.argoproj.io is forbidden: User "x"', False),
        ("0", "Error", "wait: Error (exit code 64): stat /tmp/moerl/outputs/units: no such file or directory", False),
    ],
)
def test_retries_are_by_class(
    template: dict[str, Any], exit_code: str, status: str, message: str, retried: bool
) -> None:
    last_retry = {"exitCode": exit_code, "status": status, "duration": "60", "message": message}
    expression = template["retryStrategy"]["expression"]
    assert evaluate_bool(expression, {"lastRetry": last_retry, "retries": "0"}) is retried


GPU_LEAVES: dict[str, dict[str, Any]] = {
    template["name"]: template
    for text in catalog.render_all(load_profile("p5en")).values()
    for template in yaml.safe_load(text)["spec"].get("templates", [])
    if "container" in template
}


def test_pods_on_gpus_ask_for_the_nodes_that_have_them_and_bear_their_taints() -> None:
    on_gpu = {name for name, leaf in GPU_LEAVES.items() if "nvidia.com/gpu" in leaf["container"]["resources"]["limits"]}
    assert on_gpu == {"init", "rollout", "evaluate", "train", "probe", "rollout-comparison"}
    for name, leaf in GPU_LEAVES.items():
        assert ("nodeSelector" in leaf) == ("tolerations" in leaf) == (name in on_gpu)
    assert GPU_LEAVES["train"]["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5en.48xlarge"}
    for name in on_gpu:
        keys = {toleration["key"] for toleration in GPU_LEAVES[name]["tolerations"]}
        asks_for_efa = "vpc.amazonaws.com/efa" in GPU_LEAVES[name]["container"]["resources"]["limits"]
        assert "nvidia.com/gpu" in keys
        assert ("vpc.amazonaws.com/efa" in keys) == asks_for_efa, name


def test_karpenter_leaves_trainers_alone_and_the_annotation_is_the_pods() -> None:
    marked = {
        name
        for name, leaf in GPU_LEAVES.items()
        if leaf.get("metadata", {}).get("annotations", {}).get("karpenter.sh/do-not-disrupt") == "true"
    }
    assert marked == {"train", "probe", "rollout-comparison"}


def test_trainer_takes_a_whole_node_with_its_efa_interfaces_and_huge_pages_alike_in_requests_and_limits() -> None:
    resources = GPU_LEAVES["train"]["container"]["resources"]
    for part in (resources["requests"], resources["limits"]):
        assert part["nvidia.com/gpu"] == "8"
        assert part["vpc.amazonaws.com/efa"] == "16"
        assert part["hugepages-2Mi"] == "5120Mi"
    assert GPU_LEAVES["train"]["container"]["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"], "drop": ["ALL"]}
    assert "vpc.amazonaws.com/efa" not in GPU_LEAVES["rollout"]["container"]["resources"]["limits"]
    assert "add" not in GPU_LEAVES["rollout"]["container"]["securityContext"]["capabilities"]


def test_shared_memory_is_a_memory_volume_that_fits_into_the_pods_memory() -> None:
    train = GPU_LEAVES["train"]
    (volume,) = train["volumes"]
    assert volume["emptyDir"]["medium"] == "Memory"
    assert train["container"]["volumeMounts"] == [{"mountPath": "/dev/shm", "name": volume["name"]}]
    memory = train["container"]["resources"]["limits"]["memory"]
    assert quantity_bytes(volume["emptyDir"]["sizeLimit"]) < quantity_bytes(memory)


def test_transport_environment_is_on_gpu_pods_only_and_keeps_nccl_off_the_wrong_interfaces() -> None:
    train = variables(GPU_LEAVES["train"])
    assert train["FI_PROVIDER"]["value"] == "efa"
    excluded = train["NCCL_SOCKET_IFNAME"]["value"]
    assert excluded.startswith("^")
    assert {"lo", "docker", "veth", "pod-id-link0"} <= set(excluded.removeprefix("^").split(","))
    assert "RDMAV_FORK_SAFE" not in train
    assert "NCCL_SOCKET_IFNAME" not in variables(GPU_LEAVES["plan"])


@pytest.mark.parametrize("name", ["rollout", "reward"])
@pytest.mark.parametrize(
    ("capacity", "retries", "asked_for"),
    [
        ("spot", "0", "spot"),
        ("spot", "8", "spot"),
        ("on-demand", "0", "on-demand"),
        ("spot-then-on-demand", "0", "spot"),
        ("spot-then-on-demand", "7", "spot"),
        ("spot-then-on-demand", "8", "on-demand"),
    ],
)
def test_capacity_of_an_attempt_follows_the_parameter_and_the_last_attempt_may_leave_spot(
    name: str, capacity: str, retries: str, asked_for: str
) -> None:
    template = next(leaf for leaf in LEAVES if leaf["name"] == name)
    assert template["retryStrategy"]["limit"] == "8"
    preferred = template["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    (value,) = preferred[0]["preference"]["matchExpressions"][0]["values"]
    scope = {f"workflow.parameters.{name}-capacity": capacity, "retries": retries}
    assert substitute(value, scope, "test") == asked_for
    assert variables(template)["MOERL_CAPACITY_TYPE"]["value"] == value


def test_every_parameter_of_a_campaign_reaches_a_step_or_an_iteration() -> None:
    text = catalog.render_all()["policy-campaign.yaml"]
    for parameter in CAMPAIGN:
        assert f"{{{{workflow.parameters.{parameter.name}}}}}" in text, parameter.name


def test_default_image_carries_the_version_of_the_project() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert f"argo-moe-rl:{project['version']}" == DEFAULT_IMAGE


def test_image_and_manifests_agree_on_the_user_and_every_target_has_no_root() -> None:
    lines = (REPOSITORY / "Dockerfile").read_text().splitlines()
    stages: dict[str, list[str]] = {}
    for line in lines:
        if line.startswith("FROM "):
            stages[line.split()[-1]] = []
        elif stages:
            stages[list(stages)[-1]].append(line)
    for target in ("control", "cpu", "gpu"):
        assert f"USER {USER_ID}:{USER_ID}" in stages[target]
        assert "COPY --from=sources / ./" in stages[target]
    for target in ("python", "gpu"):
        assert any(line.startswith("ENV PYTHONPATH=/app") for line in stages[target])
        assert "WORKDIR /app" in stages[target]
    assert any(line.startswith("ARG DEEPEP_REQUIREMENT=") for line in stages["gpu"])
    assert any(line.startswith("ARG GPU_BASE_IMAGE=") for line in lines)
    assert not any("full.txt" in line for line in stages["control"])
