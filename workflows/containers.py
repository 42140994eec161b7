"""A stage of the pipeline -> a container template: argv, environment, resources, retries, grace, deadline, outputs."""

import json
from dataclasses import dataclass
from typing import Any

from hera.workflows import Container, Counter, Gauge, Label, NoneArchiveStrategy, Parameter, S3Artifact
from hera.workflows import models as m

from steps.environment import OPTIONAL_SETTINGS
from workflows.parameters import CREDENTIALS, ENGINE_PODS, ENVIRONMENT, IMAGE, WorkflowParameter, capacity_expression
from workflows.platform import (
    CAPACITY_TYPE_LABEL,
    EFA_RESOURCE,
    GPU_RESOURCE,
    HUGEPAGES_RESOURCE,
    FailureDomain,
    PlatformProfile,
    PodResources,
    Workload,
)
from workflows.retries import step_retry

DISPLAY_NAME = "workflows.argoproj.io/display-name"
DO_NOT_DISRUPT = "karpenter.sh/do-not-disrupt"
OUTPUTS_DIR = "/tmp/moerl/outputs"
SHM_VOLUME = "shm"
USER_ID = 10001
"""Numeric, so that Kubernetes can verify runAsNonRoot for our image and Argo's executor alike (Dockerfile)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """What the platform must know about one `python -m steps.NAME`."""

    name: str
    module: str
    flags: tuple[str, ...]
    outputs: tuple[str, ...]
    workload: Workload = "control"
    domain: FailureDomain = "stable"
    capacity: WorkflowParameter | None = None
    """The parameter that says on which nodes an interruptible stage runs."""
    deadline: str
    """Seconds, or the reference of a parameter."""
    grace_s: int = 30
    """Seconds between SIGTERM and SIGKILL."""
    retry_limit: int = 4
    display_name: str
    inputs: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    """Outputs that also become outputs of the workflow itself."""
    report_key: str = ""
    """Object key of the HTML report in the artifact repository; empty: the stage has none."""
    engine_url: str = ""
    """Of a stage that samples: where its rollout engine's host is, as a tag that may turn out empty."""

    def capacity_type(self, profile: PlatformProfile) -> str:
        """Value of Karpenter's label, or the tag that Argo replaces by it."""
        if self.capacity is not None:
            return capacity_expression(self.capacity, self.retry_limit)
        return profile.capacity[self.domain]


def stage_container(stage: Stage, profile: PlatformProfile) -> Container:
    """The container template of `stage`; call it inside a WorkflowTemplate's context."""
    size = profile.resources[stage.workload]
    environment = [*step_environment(stage.capacity_type(profile), "{{retries}}"), *platform_environment(profile, size)]
    if stage.engine_url:
        environment.append(m.EnvVar(name="MOERL_ENGINE_URL", value=stage.engine_url))
    return Container(
        name=stage.name,
        image=IMAGE.reference,
        image_pull_policy="IfNotPresent",
        command=["python", "-m", f"steps.{stage.module}"],
        args=list(stage.flags),
        env=environment,
        inputs=[Parameter(name=name) for name in stage.inputs],
        outputs=[*_output_parameters(stage), *_report_artifact(stage)],
        annotations={DISPLAY_NAME: stage.display_name, **undisturbed(stage.domain)},
        resources=resource_requirements(size),
        node_selector=dict(profile.node_selector) if size.gpus else None,
        tolerations=tolerations(profile, size),
        affinity=capacity_affinity(stage.capacity_type(profile)),
        volumes=shm_volumes(size) or None,
        volume_mounts=shm_mounts(size) or None,
        security_context=container_security(profile, size),
        retry_strategy=step_retry(stage.retry_limit),
        active_deadline_seconds=stage.deadline,
        pod_spec_patch=_pod_patch(stage, profile),
        metrics=stage_metrics(stage.name),
    )


def _pod_patch(stage: Stage, profile: PlatformProfile) -> str:
    """The grace period, for which Argo has no field of its own, and no GPU for a pod whose engine has them.

    Which one it is is known when the workflow is submitted, and Argo takes tags in no quantity. Kubernetes' strategic
    merge deletes a key whose value is null. The tags stand alone on their lines: what they become is YAML.
    """
    patch = f"terminationGracePeriodSeconds: {stage.grace_s}\n"
    sampler = profile.resources[stage.workload]
    if not (stage.engine_url and sampler.gpus):
        return patch
    client = resource_requirements(profile.resources["engine_client"])
    quantities = {
        "limits": {GPU_RESOURCE: None, **dump(client)["limits"]},
        "requests": {GPU_RESOURCE: None, **dump(client)["requests"]},
    }
    return (
        patch
        + f"nodeSelector: {_with_engines(dict.fromkeys(profile.node_selector), {})}\n"
        + f"containers: {_with_engines([{'name': 'main', 'resources': quantities}], [])}\n"
    )


def _with_engines(patch: object, otherwise: object) -> str:
    """Tag with one of two values as JSON, by whether the run has engines. Two closing braces would end the tag."""
    one, other = (json.dumps(value).replace("}}", "} }").replace("}}", "} }") for value in (patch, otherwise))
    return f"{{{{=asInt(workflow.parameters['{ENGINE_PODS.name}']) > 0 ? '{one}' : '{other}'}}}}"


def pod_security_context() -> m.PodSecurityContext:
    """Never root; files in mounted volumes belong to our group."""
    return m.PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER_ID,
        run_as_group=USER_ID,
        fs_group=USER_ID,
        seccomp_profile=m.SeccompProfile(type="RuntimeDefault"),
    )


def container_security(profile: PlatformProfile, size: PodResources) -> m.SecurityContext:
    """No privileges, and of the capabilities only those that a whole node's exchange needs."""
    added = list(profile.capabilities) if size.efa else []
    return m.SecurityContext(
        allow_privilege_escalation=False, capabilities=m.Capabilities(drop=["ALL"], add=added or None)
    )


def stage_metrics(stage_name: str) -> list[Gauge | Counter]:
    """Duration and result of a stage; run ids are no label, since each would be a new time series.

    Argo exports them as argo_workflows_moerl_stage_duration_seconds and argo_workflows_moerl_stage_results_total.
    """
    stage = Label(key="stage", value=stage_name)
    return [
        Gauge(
            name="moerl_stage_duration_seconds",
            help="Seconds that a stage took",
            labels=[stage],
            realtime=False,
            value="{{duration}}",
        ),
        Counter(
            name="moerl_stage_results",
            help="Stages that ended, by result",
            labels=[stage, Label(key="status", value="{{status}}")],
            value="1",
        ),
    ]


def capacity_affinity(capacity_type: str) -> m.Affinity:
    """Prefer nodes of this capacity; on nodes without the label (kind, minikube) the pods run all the same."""
    term = m.NodeSelectorRequirement(key=CAPACITY_TYPE_LABEL, operator="In", values=[capacity_type])
    return m.Affinity(
        node_affinity=m.NodeAffinity(
            preferred_during_scheduling_ignored_during_execution=[
                m.PreferredSchedulingTerm(weight=100, preference=m.NodeSelectorTerm(match_expressions=[term]))
            ]
        )
    )


def tolerations(profile: PlatformProfile, size: PodResources) -> list[m.Toleration] | None:
    """Of a pod on accelerated nodes; those with EFA take only pods that ask for it, which none else can use."""
    if not size.gpus:
        return None
    return [
        m.Toleration(key=item.key, operator=item.operator, value=item.value or None, effect=item.effect or None)
        for item in profile.tolerations
        if size.efa or item.key != EFA_RESOURCE
    ]


def undisturbed(domain: FailureDomain) -> dict[str, str]:
    """Annotations of a pod: Karpenter does not move a trainer to save a node."""
    return {DO_NOT_DISRUPT: "true"} if domain == "training" else {}


def resource_requirements(size: PodResources) -> m.ResourceRequirements:
    """Requests and limits; what can't be overcommitted stands in both, alike."""
    whole = {"memory": size.memory}
    counted = {GPU_RESOURCE: size.gpus, EFA_RESOURCE: size.efa}
    whole |= {name: str(count) for name, count in counted.items() if count}
    if size.hugepages:
        whole[HUGEPAGES_RESOURCE] = size.hugepages
    return m.ResourceRequirements(
        requests=_quantities({"cpu": size.cpu_request, **whole}), limits=_quantities({"cpu": size.cpu_limit, **whole})
    )


def _quantities(values: dict[str, str]) -> dict[str, m.Quantity]:
    return {name: m.Quantity(root=value) for name, value in values.items()}


def shm_volumes(size: PodResources) -> list[m.Volume]:
    """The memory behind /dev/shm: the 64 MiB of the container runtime are too few for NCCL."""
    if not size.shm:
        return []
    memory = m.EmptyDirVolumeSource(medium="Memory", size_limit=m.Quantity(root=size.shm))
    return [m.Volume(name=SHM_VOLUME, empty_dir=memory)]


def shm_mounts(size: PodResources) -> list[m.VolumeMount]:
    return [m.VolumeMount(name=SHM_VOLUME, mount_path="/dev/shm")] if size.shm else []


def step_environment(capacity_type: str, attempt: str | m.EnvVarSource) -> list[m.EnvVar]:
    """Where the services are and who the pod is; `attempt` counts from 0."""
    return [
        _from_config_map("MOERL_STORE", "store"),
        _from_secret("MOERL_DATABASE_URL", "database-url"),
        _from_config_map("MLFLOW_TRACKING_URI", "mlflow-tracking-uri", optional=True),
        _from_config_map("AWS_ENDPOINT_URL_S3", "s3-endpoint-url", optional=True),
        *(_from_config_map(variable, key, optional=True) for variable, key in OPTIONAL_SETTINGS.items()),
        _from_secret("AWS_ACCESS_KEY_ID", "aws-access-key-id", optional=True),
        _from_secret("AWS_SECRET_ACCESS_KEY", "aws-secret-access-key", optional=True),
        m.EnvVar(name="MOERL_OUTPUTS_DIR", value=OUTPUTS_DIR),
        m.EnvVar(name="MOERL_CAPACITY_TYPE", value=capacity_type),
        m.EnvVar(name="MOERL_ATTEMPT", value=attempt)
        if isinstance(attempt, str)
        else m.EnvVar(name="MOERL_ATTEMPT", value_from=attempt),
        m.EnvVar(name="ARGO_WORKFLOW", value="{{workflow.name}}"),
        from_field("POD_NAME", "metadata.name"),
        from_field("NODE_NAME", "spec.nodeName"),
    ]


def platform_environment(profile: PlatformProfile, size: PodResources) -> list[m.EnvVar]:
    """Threads, and on accelerated nodes what carries the tokens."""
    variables = {"OMP_NUM_THREADS": str(profile.threads)}
    if size.gpus:
        variables |= profile.transport_environment
    return [m.EnvVar(name=name, value=value) for name, value in variables.items()]


def from_field(variable: str, path: str) -> m.EnvVar:
    """A variable with a field of the pod's own manifest."""
    return m.EnvVar(name=variable, value_from=field_source(path))


def field_source(path: str) -> m.EnvVarSource:
    return m.EnvVarSource(field_ref=m.ObjectFieldSelector(field_path=path))


def _from_config_map(variable: str, key: str, *, optional: bool | None = None) -> m.EnvVar:
    selector = m.ConfigMapKeySelector(name=ENVIRONMENT.reference, key=key, optional=optional)
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(config_map_key_ref=selector))


def _from_secret(variable: str, key: str, *, optional: bool | None = None) -> m.EnvVar:
    selector = m.SecretKeySelector(name=CREDENTIALS.reference, key=key, optional=optional)
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(secret_key_ref=selector))


def _output_parameters(stage: Stage) -> list[Parameter]:
    # No default: a step that ends with 0 and leaves an output out has a bug, and a default would hide it.
    return [
        Parameter(
            name=name,
            value_from=m.ValueFrom(path=f"{OUTPUTS_DIR}/{name}"),
            global_name=name if name in stage.published else None,
        )
        for name in stage.outputs
    ]


def _report_artifact(stage: Stage) -> list[S3Artifact]:
    """The report as the UI shows it: not archived, and with a key that ends in .html.

    `optional` covers a container that was stopped before it wrote the file; without it Argo's wait container would add
    an error of its own. A key without a bucket takes the namespace's default artifact repository, which
    `templates/artifact-repository.yaml` declares: Argo cannot save any artifact where there is none.
    """
    if not stage.report_key:
        return []
    return [
        S3Artifact(
            name="report",
            path=f"{OUTPUTS_DIR}/report.html",
            archive=NoneArchiveStrategy(),
            optional=True,
            key=stage.report_key,
        )
    ]


def dump(model: Any) -> dict[str, Any]:
    """A model as a manifest that stands as text in a resource template has it."""
    dumped: dict[str, Any] = model.model_dump(by_alias=True, exclude_none=True)
    return dumped
