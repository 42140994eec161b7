"""policy-campaign: N iterations of a run, each a child Workflow; policy-retraining: the campaign on a schedule."""

from collections.abc import Sequence

import yaml
from hera.workflows import CronWorkflow, Parameter, Resource, Step, Steps, WorkflowTemplate
from hera.workflows import models as m

from workflows import iteration
from workflows.containers import DISPLAY_NAME, Stage, capacity_affinity, stage_container, stage_metrics
from workflows.platform import PlatformProfile
from workflows.retries import attach_retry

NAME = "policy-campaign"
CRON_NAME = "policy-retraining"
CAMPAIGN_SERVICE_ACCOUNT = "moerl-campaign"

INIT = Stage(
    name="init",
    module="init_run",
    flags=(
        "--run",
        "{{workflow.parameters.run}}",
        "--config",
        "{{workflow.parameters.config}}",
        "--iterations",
        "{{workflow.parameters.iterations}}",
        "--rollout-workers",
        "{{workflow.parameters.rollout-workers}}",
        "--reward-workers",
        "{{workflow.parameters.reward-workers}}",
    ),
    outputs=("first-iteration", "iterations", "rollout-workers", "reward-workers", "policy-version"),
    workload="trainer",
    deadline_s=14400,
    grace_s=60,
    display_name="init",
)
SUMMARY = Stage(
    name="summary",
    module="report",
    flags=("--run", "{{workflow.parameters.run}}"),
    outputs=("summary",),
    published=("summary",),
    deadline_s=900,
    display_name="summary",
    report_key="moerl/{{workflow.parameters.run}}/run.html",
)
# A resource template has no field for its container's requests; without any, a watcher that lives for hours would be
# the first pod to be evicted.
WATCHER_POD_PATCH = """\
containers:
- name: main
  resources:
    requests: {cpu: 10m, memory: 64Mi}
    limits: {memory: 256Mi}
"""
WORKERS = ("rollout-workers", "reward-workers")
"""Pods of an iteration: the submitted counts, or what the configuration says; init tells which."""
CHILD_OUTPUTS = ("policy-version", "reward-eval", "validated", "summary")


def build_campaign(profile: PlatformProfile) -> WorkflowTemplate:
    """The WorkflowTemplate of a campaign: init, the loop of iterations, the summary."""
    with WorkflowTemplate(
        name=NAME,
        entrypoint="campaign",
        annotations={
            "workflows.argoproj.io/title": "Policy campaign",
            "workflows.argoproj.io/description": (
                "Post-train a Mixture-of-Experts policy for a number of iterations. "
                "A run that exists already continues after its last iteration."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        arguments=_campaign_parameters(),
        synchronization=iteration.run_mutex("campaign"),
        workflow_metadata=iteration.run_label(),
    ) as template:
        iteration.set_pod_defaults(template)
        init = stage_container(INIT, profile)
        summary = stage_container(SUMMARY, profile)
        loop = _loop(_wrapper(_child(profile)))
        with Steps(
            name="campaign",
            outputs=[
                Parameter(
                    name="summary",
                    value_from=m.ValueFrom(parameter="{{steps.summary.outputs.parameters.summary}}", default=""),
                )
            ],
        ):
            Step(name="init", template=init)
            Step(
                name="loop",
                template=loop,
                arguments={
                    name: f"{{{{steps.init.outputs.parameters.{name}}}}}"
                    for name in ("first-iteration", "iterations", *WORKERS)
                },
            )
            Step(name="summary", template=summary)
    return template


def build_retraining() -> CronWorkflow:
    """The campaign on a schedule: each start adds iterations to the same run.

    It is applied suspended, since a schedule that costs money is for its owner to switch on (`argo cron resume`).
    """
    with CronWorkflow(
        name=CRON_NAME,
        annotations={
            "workflows.argoproj.io/title": "Scheduled retraining",
            "workflows.argoproj.io/description": (
                "Continues the run `retraining` every night. Applied suspended: `argo cron resume policy-retraining`."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        schedules=["0 2 * * *"],
        timezone="Etc/UTC",
        concurrency_policy="Forbid",
        starting_deadline_seconds=3600,
        stop_strategy=m.StopStrategy(expression="cronworkflow.failed >= 3"),
        successful_jobs_history_limit=3,
        failed_jobs_history_limit=3,
        cron_suspend=True,
        workflow_template_ref=m.WorkflowTemplateRef(name=NAME),
        arguments=[Parameter(name="run", value="retraining"), Parameter(name="iterations", value="5")],
    ) as cron:
        pass
    return cron


def child_manifest() -> str:
    """The Workflow of one iteration: a name that a repeated `apply` finds again, and nothing but a reference.

    The spec is `workflowTemplateRef` and `arguments`: a controller with `templateReferencing: Strict` takes no more.
    Every value is quoted by the dump: Argo replaces the placeholders in the text, and "00001" must stay a string.
    """
    iteration_number = "{{inputs.parameters.iteration}}"
    parameters = [
        {"name": "iteration", "value": iteration_number},
        *({"name": name, "value": f"{{{{inputs.parameters.{name}}}}}"} for name in WORKERS),
        *({"name": name, "value": f"{{{{workflow.parameters.{name}}}}}"} for name in ("run", "image")),
    ]
    manifest = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": "{{workflow.name}}-" + iteration_number,
            "labels": {"moerl/campaign": "{{workflow.name}}"},
            "annotations": {
                "workflows.argoproj.io/title": "{{workflow.parameters.run}}, iteration " + iteration_number,
            },
        },
        "spec": {
            "workflowTemplateRef": {"name": iteration.NAME},
            "arguments": {"parameters": parameters},
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def _campaign_parameters() -> list[Parameter]:
    return [
        iteration.run_parameter(),
        Parameter(
            name="config",
            value="configs/reverse-digits.toml",
            description="Configuration of the run: TOML text, a path in the image, or an s3:// URI of a TOML file",
        ),
        Parameter(
            name="iterations",
            value="0",
            description="Iterations to add to the run; 0: as many as its configuration says",
        ),
        *iteration.worker_parameters(rollout="0", reward="0", note="; 0: as many as the configuration says"),
        iteration.image_parameter(),
    ]


def _child(profile: PlatformProfile) -> Resource:
    # Without a deadline: it would end the watcher and leave the child running. The child's stages have theirs.
    return Resource(
        name="child",
        action="apply",
        set_owner_reference=True,
        manifest=child_manifest(),
        success_condition="status.phase == Succeeded",
        failure_condition="status.phase in (Failed, Error)",
        inputs=_iteration_inputs(),
        outputs=[
            Parameter(
                name=name,
                value_from=m.ValueFrom(
                    json_path=f'{{.status.outputs.parameters[?(@.name=="{name}")].value}}', default=""
                ),
            )
            for name in CHILD_OUTPUTS
        ],
        annotations={DISPLAY_NAME: "watch-{{inputs.parameters.iteration}}"},
        service_account_name=CAMPAIGN_SERVICE_ACCOUNT,
        affinity=capacity_affinity(profile, "stable"),
        pod_spec_patch=WATCHER_POD_PATCH,
        retry_strategy=attach_retry(20),
        metrics=stage_metrics("child"),
    )


def _iteration_inputs() -> list[Parameter]:
    return [Parameter(name=name) for name in ("iteration", *WORKERS)]


def _passed_on(names: Sequence[str]) -> dict[str, str]:
    """Inputs of a template, handed to what it calls."""
    return {name: f"{{{{inputs.parameters.{name}}}}}" for name in names}


def _wrapper(child: Resource) -> Steps:
    """The loop's unretried child.

    Argo's `parallelism` does not count a Retry node and `failFast` counts its failed attempts: with the retried
    template directly in the loop, the next iteration could start during a backoff, and a lost watcher would end the
    campaign.
    """
    with Steps(
        name="one",
        inputs=_iteration_inputs(),
        annotations={DISPLAY_NAME: "iteration-{{inputs.parameters.iteration}}"},
    ) as wrapper:
        Step(name="run", template=child, arguments=_passed_on(("iteration", *WORKERS)))
    return wrapper


def _loop(wrapper: Steps) -> Steps:
    """Iterations one after another; `failFast` keeps a failed one from being followed by the next."""
    with Steps(
        name="loop",
        parallelism=1,
        fail_fast=True,
        inputs=[Parameter(name=name) for name in ("first-iteration", "iterations", *WORKERS)],
    ) as loop:
        Step(
            name="iteration",
            template=wrapper,
            arguments={"iteration": "{{item}}"} | _passed_on(WORKERS),
            with_sequence=m.Sequence(
                start=m.IntOrString(root="{{inputs.parameters.first-iteration}}"),
                count=m.IntOrString(root="{{inputs.parameters.iterations}}"),
                format="%05d",
            ),
        )
    return loop
