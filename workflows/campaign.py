"""policy-campaign: N iterations of a run, each a child Workflow; policy-retraining: the campaign on a schedule."""

from collections.abc import Sequence

import yaml
from hera.workflows import CronWorkflow, Parameter, Resource, Step, Steps, WorkflowTemplate
from hera.workflows import models as m

from workflows import engines, iteration, jobset, parameters
from workflows.cleanup import EXIT_TEMPLATE, WATCHER_POD_PATCH, WORKFLOW_RESOURCE, deletion, exit_handler
from workflows.containers import DISPLAY_NAME, Stage, capacity_affinity, stage_container, stage_metrics
from workflows.parameters import CONFIG, DISPATCHER, ENGINE_PODS, ITERATIONS, ROLLOUT_ENGINE, RUN, TRAINING_NODES
from workflows.platform import PlatformProfile
from workflows.retries import attach_retry

NAME = "policy-campaign"
CRON_NAME = "policy-retraining"
CAMPAIGN_SERVICE_ACCOUNT = "moerl-campaign"
CHILD_TEMPLATE = "child"
CAMPAIGN_LABEL = "moerl/campaign"
ITERATION_LABEL = "moerl/iteration"
ITERATION_DIGITS = 5
FLEET_TEMPLATE = "engines"
_ENGINE_PODS = f"{{{{steps.init.outputs.parameters.{ENGINE_PODS.name}}}}}"
LONGEST_NAME = jobset.LONGEST_NAME - len("-") - ITERATION_DIGITS
"""Characters of a campaign's name that leave room for the names of its iterations and of their training pods."""

RESOLVED = parameters.names(parameters.RESOLVED)
"""Numbers of an iteration: what was submitted, or what the configuration says; init tells which."""
CHILD_OUTPUTS = ("policy-version", "reward-eval", "validated", "summary", "mlflow-url")


def init_stage(profile: PlatformProfile) -> Stage:
    """The stage that makes the run, or finds it; it checks the submitted numbers against the nodes of the profile."""
    workers = (parameters.ROLLOUT_WORKERS, parameters.REWARD_WORKERS)
    given = (RUN, CONFIG, ITERATIONS, *workers, DISPATCHER, TRAINING_NODES, ROLLOUT_ENGINE, ENGINE_PODS)
    flags = [word for parameter in given for word in (f"--{parameter.name}", parameter.reference)]
    return Stage(
        name="init",
        module="init_run",
        flags=(*flags, "--most-ranks-per-node", str(profile.ranks_per_node)),
        outputs=("first-iteration", "iterations", *RESOLVED, "policy-version"),
        workload="solo_trainer",
        deadline="14400",
        grace_s=60,
        display_name="init",
    )


SUMMARY = Stage(
    name="summary",
    module="report",
    flags=("--run", RUN.reference),
    outputs=("summary", "mlflow-url"),
    published=("summary", "mlflow-url"),
    deadline="900",
    display_name="summary",
    report_key=f"moerl/{RUN.reference}/run.html",
)


def build_campaign(profile: PlatformProfile) -> WorkflowTemplate:
    """The WorkflowTemplate of a campaign: init, the loop of iterations, the summary."""
    with WorkflowTemplate(
        name=NAME,
        entrypoint="campaign",
        on_exit=EXIT_TEMPLATE,
        annotations={
            "workflows.argoproj.io/title": "Policy campaign",
            "workflows.argoproj.io/description": (
                "Post-train a Mixture-of-Experts policy for a number of iterations. "
                "A run that exists already continues after its last iteration."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        arguments=parameters.to_hera(parameters.CAMPAIGN),
        synchronization=iteration.run_mutex("campaign"),
        workflow_metadata=iteration.run_label(),
    ) as template:
        iteration.set_pod_defaults(template)
        _exit_handler(profile)
        init = stage_container(init_stage(profile), profile)
        summary = stage_container(SUMMARY, profile)
        loop = _loop(_wrapper(_child(profile)))
        fleet = _fleet(profile)
        with Steps(
            name="campaign",
            outputs=[
                Parameter(
                    name=name,
                    value_from=m.ValueFrom(parameter=f"{{{{steps.summary.outputs.parameters.{name}}}}}", default=""),
                )
                for name in SUMMARY.published
            ],
        ):
            Step(name="init", template=init)
            Step(
                name=FLEET_TEMPLATE,
                template=fleet,
                arguments={ENGINE_PODS.name: _ENGINE_PODS},
                when=f"{_ENGINE_PODS} > 0",
            )
            Step(
                name="loop",
                template=loop,
                arguments={
                    name: f"{{{{steps.init.outputs.parameters.{name}}}}}"
                    for name in ("first-iteration", "iterations", *RESOLVED)
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
    passed_on = parameters.references(parameters.names((RUN, *parameters.SHARED)))
    values = {"iteration": iteration_number} | _passed_on(RESOLVED) | passed_on
    manifest = {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": "{{workflow.name}}-" + iteration_number,
            "labels": {CAMPAIGN_LABEL: "{{workflow.name}}", ITERATION_LABEL: iteration_number},
            "annotations": {
                "workflows.argoproj.io/title": "{{workflow.parameters.run}}, iteration " + iteration_number,
            },
        },
        "spec": {
            "workflowTemplateRef": {"name": iteration.NAME},
            "arguments": {"parameters": [{"name": name, "value": value} for name, value in values.items()]},
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=1000)


def deletion_flags() -> list[str]:
    """Arguments of `kubectl delete` for the iteration that still runs when its campaign ends, as by `argo stop`.

    Its pods get SIGTERM and save what they have; `argo retry` of the campaign then applies the iteration anew. One that
    has ended stays, with its logs.
    """
    selector = f"{CAMPAIGN_LABEL}={{{{workflow.name}}}},workflows.argoproj.io/completed!=true"
    return [WORKFLOW_RESOURCE, f"--selector={selector}", "--wait=false"]


def _exit_handler(profile: PlatformProfile) -> None:
    delete_iteration = deletion(
        "delete-iteration",
        deletion_flags(),
        service_account=CAMPAIGN_SERVICE_ACCOUNT,
        display_name="delete-iteration",
        profile=profile,
    )
    delete_engines = deletion(
        "delete-engines",
        engines.deletion_flags(),
        service_account=engines.SERVICE_ACCOUNT,
        display_name="delete-engines",
        profile=profile,
    )
    # What init found out is not known here when it failed, so the submitted value decides; nothing to delete is fine.
    # Quoted: of from-config without quotes govaluate makes a subtraction.
    exit_handler(
        {"{{workflow.status}} != Succeeded": delete_iteration, f"'{ENGINE_PODS.reference}' != '0'": delete_engines}
    )


def _fleet(profile: PlatformProfile) -> Steps:
    """The run's engines, once `init` has made the run that they look up."""
    service, pods = engines.service_resource(profile), engines.pods_resource(profile)
    with Steps(name=FLEET_TEMPLATE, inputs=[Parameter(name=ENGINE_PODS.name)]) as fleet, fleet.parallel():
        Step(name=engines.SERVICE_TEMPLATE, template=service)
        Step(name=engines.POD_TEMPLATE, template=pods, arguments=_passed_on([ENGINE_PODS.name]))
    return fleet


def _child(profile: PlatformProfile) -> Resource:
    # Without a deadline: it would end the watcher and leave the child running. The child's stages have theirs.
    return Resource(
        name=CHILD_TEMPLATE,
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
        affinity=capacity_affinity(profile.capacity["stable"]),
        pod_spec_patch=WATCHER_POD_PATCH,
        retry_strategy=attach_retry(20),
        metrics=stage_metrics(CHILD_TEMPLATE),
    )


def _iteration_inputs() -> list[Parameter]:
    return [Parameter(name=name) for name in ("iteration", *RESOLVED)]


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
        Step(name="run", template=child, arguments=_passed_on(("iteration", *RESOLVED)))
    return wrapper


def _loop(wrapper: Steps) -> Steps:
    """Iterations one after another; `failFast` keeps a failed one from being followed by the next."""
    with Steps(
        name="loop",
        parallelism=1,
        fail_fast=True,
        inputs=[Parameter(name=name) for name in ("first-iteration", "iterations", *RESOLVED)],
    ) as loop:
        Step(
            name="iteration",
            template=wrapper,
            arguments={"iteration": "{{item}}"} | _passed_on(RESOLVED),
            with_sequence=m.Sequence(
                start=m.IntOrString(root="{{inputs.parameters.first-iteration}}"),
                count=m.IntOrString(root="{{inputs.parameters.iterations}}"),
                format=f"%0{ITERATION_DIGITS}d",
            ),
        )
    return loop
