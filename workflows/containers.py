"""A stage of the pipeline -> a container template: argv, environment, resources, retries, grace, deadline, outputs."""

from dataclasses import dataclass

from hera.workflows import Container, Counter, Gauge, Label, NoneArchiveStrategy, Parameter, Resources, S3Artifact
from hera.workflows import models as m

from workflows.platform import CAPACITY_TYPE_LABEL, FailureDomain, PlatformProfile, Workload
from workflows.retries import step_retry

DISPLAY_NAME = "workflows.argoproj.io/display-name"
OUTPUTS_DIR = "/tmp/moerl/outputs"
ENVIRONMENT_CONFIG_MAP = "moerl-environment"
CREDENTIALS_SECRET = "moerl-credentials"
DEFAULT_IMAGE = "argo-moe-rl:0.1.0"
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
    deadline_s: int
    grace_s: int = 30
    """Seconds between SIGTERM and SIGKILL."""
    retry_limit: int = 4
    display_name: str
    inputs: tuple[str, ...] = ()
    published: tuple[str, ...] = ()
    """Outputs that also become outputs of the workflow itself."""
    report_key: str = ""
    """Object key of the HTML report in the artifact repository; empty: the stage has none."""


def stage_container(stage: Stage, profile: PlatformProfile) -> Container:
    """The container template of `stage`; call it inside a WorkflowTemplate's context."""
    return Container(
        name=stage.name,
        image="{{workflow.parameters.image}}",
        image_pull_policy="IfNotPresent",
        command=["python", "-m", f"steps.{stage.module}"],
        args=list(stage.flags),
        env=_environment(stage, profile),
        inputs=[Parameter(name=name) for name in stage.inputs],
        outputs=[*_output_parameters(stage), *_report_artifact(stage)],
        annotations={DISPLAY_NAME: stage.display_name},
        resources=_resources(profile, stage.workload),
        affinity=capacity_affinity(profile, stage.domain),
        security_context=m.SecurityContext(allow_privilege_escalation=False, capabilities=m.Capabilities(drop=["ALL"])),
        retry_strategy=step_retry(stage.retry_limit),
        active_deadline_seconds=str(stage.deadline_s),  # Argo's schema wants its IntOrString as a string
        # Argo has no field for the grace period; podSpecPatch is the only way to set it.
        pod_spec_patch=f"terminationGracePeriodSeconds: {stage.grace_s}\n",
        metrics=stage_metrics(stage.name),
    )


def pod_security_context() -> m.PodSecurityContext:
    """Never root; files in mounted volumes belong to our group."""
    return m.PodSecurityContext(
        run_as_non_root=True,
        run_as_user=USER_ID,
        run_as_group=USER_ID,
        fs_group=USER_ID,
        seccomp_profile=m.SeccompProfile(type="RuntimeDefault"),
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


def capacity_affinity(profile: PlatformProfile, domain: FailureDomain) -> m.Affinity:
    """Prefer the domain's capacity; on nodes without the label (kind, minikube) the pods run all the same."""
    term = m.NodeSelectorRequirement(key=CAPACITY_TYPE_LABEL, operator="In", values=[profile.capacity[domain]])
    return m.Affinity(
        node_affinity=m.NodeAffinity(
            preferred_during_scheduling_ignored_during_execution=[
                m.PreferredSchedulingTerm(weight=100, preference=m.NodeSelectorTerm(match_expressions=[term]))
            ]
        )
    )


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


def _resources(profile: PlatformProfile, workload: Workload) -> Resources:
    size = profile.resources[workload]
    return Resources(
        cpu_request=size.cpu_request,
        cpu_limit=size.cpu_limit,
        memory_request=size.memory,
        memory_limit=size.memory,
    )


def _environment(stage: Stage, profile: PlatformProfile) -> list[m.EnvVar]:
    return [
        _from_config_map("MOERL_STORE", "store"),
        _from_secret("MOERL_DATABASE_URL", "database-url"),
        _from_config_map("MLFLOW_TRACKING_URI", "mlflow-tracking-uri", optional=True),
        _from_config_map("AWS_ENDPOINT_URL_S3", "s3-endpoint-url", optional=True),
        _from_secret("AWS_ACCESS_KEY_ID", "aws-access-key-id", optional=True),
        _from_secret("AWS_SECRET_ACCESS_KEY", "aws-secret-access-key", optional=True),
        m.EnvVar(name="MOERL_OUTPUTS_DIR", value=OUTPUTS_DIR),
        m.EnvVar(name="MOERL_CAPACITY_TYPE", value=profile.capacity[stage.domain]),
        m.EnvVar(name="MOERL_ATTEMPT", value="{{retries}}"),
        m.EnvVar(name="OMP_NUM_THREADS", value=str(profile.threads)),
        m.EnvVar(name="ARGO_WORKFLOW", value="{{workflow.name}}"),
        _from_field("POD_NAME", "metadata.name"),
        _from_field("NODE_NAME", "spec.nodeName"),
    ]


def _from_config_map(variable: str, key: str, *, optional: bool | None = None) -> m.EnvVar:
    selector = m.ConfigMapKeySelector(name=ENVIRONMENT_CONFIG_MAP, key=key, optional=optional)
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(config_map_key_ref=selector))


def _from_secret(variable: str, key: str, *, optional: bool | None = None) -> m.EnvVar:
    selector = m.SecretKeySelector(name=CREDENTIALS_SECRET, key=key, optional=optional)
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(secret_key_ref=selector))


def _from_field(variable: str, path: str) -> m.EnvVar:
    return m.EnvVar(name=variable, value_from=m.EnvVarSource(field_ref=m.ObjectFieldSelector(field_path=path)))
