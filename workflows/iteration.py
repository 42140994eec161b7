"""policy-iteration: the DAG of one policy iteration, from `plan` to `report`."""

from hera.workflows import DAG, Container, Parameter, Task, WorkflowTemplate
from hera.workflows import models as m
from hera.workflows.task import TaskResult

from workflows.containers import DEFAULT_IMAGE, Stage, pod_security_context, stage_container
from workflows.platform import PlatformProfile

NAME = "policy-iteration"
STEP_SERVICE_ACCOUNT = "moerl-step"

_RUN = ("--run", "{{workflow.parameters.run}}")
_ITERATION = (*_RUN, "--iteration", "{{workflow.parameters.iteration}}")
_WORKER = (*_ITERATION, "--worker", "{{inputs.parameters.worker}}")


def _label(stage: str) -> str:
    return f"{stage}-{{{{workflow.parameters.iteration}}}}"


PLAN = Stage(
    name="plan",
    module="plan",
    flags=_ITERATION,
    outputs=("policy-version", "units"),
    deadline_s=900,
    display_name=_label("plan"),
)
ROLLOUT = Stage(
    name="rollout",
    module="rollout",
    flags=_WORKER,
    inputs=("worker",),
    outputs=("samples", "tokens-per-s"),
    workload="sampler",
    domain="interruptible",
    deadline_s=7200,
    grace_s=90,
    retry_limit=8,
    display_name="rollout-{{inputs.parameters.worker}}",
)
REWARD = Stage(
    name="reward",
    module="reward",
    flags=_WORKER,
    inputs=("worker",),
    outputs=("reward-mean",),
    domain="interruptible",
    deadline_s=3600,
    grace_s=90,
    retry_limit=8,
    display_name="reward-{{inputs.parameters.worker}}",
)
FLUSH = Stage(
    name="flush",
    module="flush",
    flags=_ITERATION,
    outputs=("batch-uri", "samples"),
    deadline_s=1800,
    display_name=_label("flush"),
)
TRAIN = Stage(
    name="train",
    module="train",
    flags=_ITERATION,
    outputs=("checkpoint-uri",),
    workload="trainer",
    deadline_s=14400,
    grace_s=300,
    display_name=_label("train"),
)
PUBLISH = Stage(
    name="publish",
    module="publish",
    flags=_ITERATION,
    outputs=("publication-uri", "policy-version"),
    published=("policy-version",),
    workload="trainer",
    deadline_s=3600,
    grace_s=60,
    display_name=_label("publish"),
)
EVALUATE = Stage(
    name="evaluate",
    module="evaluate",
    flags=_ITERATION,
    outputs=("reward-eval", "validated"),
    published=("reward-eval", "validated"),
    workload="sampler",
    deadline_s=3600,
    display_name=_label("evaluate"),
)
REPORT = Stage(
    name="report",
    module="report",
    flags=_ITERATION,
    outputs=("summary",),
    published=("summary",),
    deadline_s=900,
    display_name=_label("report"),
    report_key="moerl/{{workflow.parameters.run}}/iteration-{{workflow.parameters.iteration}}.html",
)
STAGES = (PLAN, ROLLOUT, REWARD, FLUSH, TRAIN, PUBLISH, EVALUATE, REPORT)


def build_iteration(profile: PlatformProfile) -> WorkflowTemplate:
    """The WorkflowTemplate of one iteration; every stage may run again at any time with the same outcome."""
    with WorkflowTemplate(
        name=NAME,
        entrypoint="iteration",
        annotations={
            "workflows.argoproj.io/title": "Policy iteration",
            "workflows.argoproj.io/description": (
                "One policy iteration of a run: sample with the current policy, score, train, publish, evaluate. "
                "Campaigns start it; submit it alone to run one more iteration by hand."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        arguments=iteration_parameters(),
        synchronization=run_mutex("iteration"),
        workflow_metadata=run_label(),
    ) as template:
        set_pod_defaults(template)
        containers = {stage.name: stage_container(stage, profile) for stage in STAGES}
        with DAG(name="iteration", outputs=_dag_outputs()):
            plan = Task(name="plan", template=containers["plan"])
            rollout = _fan_out("rollout", containers, "{{workflow.parameters.rollout-workers}}")
            reward = _fan_out("reward", containers, "{{workflow.parameters.reward-workers}}")
            flush, train, publish, evaluate, report = (
                Task(name=name, template=containers[name])
                for name in ("flush", "train", "publish", "evaluate", "report")
            )
            plan >> rollout
            # Workers share the units by leases, so one that survives does the work of all.
            rollout.next(reward, on=TaskResult.any_succeeded)
            reward.next(flush, on=TaskResult.any_succeeded)
            flush >> train
            train >> publish
            publish >> evaluate
            evaluate >> report
    return template


def iteration_parameters() -> list[Parameter]:
    """Arguments of one iteration; `run` and `iteration` have no default, so a submission must name them."""
    return [
        run_parameter(),
        Parameter(
            name="iteration", description="Number of the iteration, from 1; it makes the policy version of that number"
        ),
        *worker_parameters(),
        image_parameter(),
    ]


def run_parameter() -> Parameter:
    return Parameter(name="run", description="Id of the run: 1 to 40 lower-case letters, digits and inner hyphens")


def worker_parameters(rollout: str = "2", reward: str = "1", note: str = "") -> list[Parameter]:
    return [
        Parameter(name="rollout-workers", value=rollout, description=f"Pods that sample in parallel{note}"),
        Parameter(name="reward-workers", value=reward, description=f"Pods that score in parallel{note}"),
    ]


def image_parameter() -> Parameter:
    return Parameter(
        name="image", value=DEFAULT_IMAGE, description="Image of every step (Dockerfile, target cpu or gpu)"
    )


def run_mutex(level: str) -> m.Synchronization:
    """At most one workflow of this level works on a run.

    A campaign and the iteration that it started hold mutexes of different names: with one name, the campaign would wait
    for a child that waits for the campaign.
    """
    return m.Synchronization(mutexes=[m.Mutex(name=f"moerl-{level}-{{{{workflow.parameters.run}}}}")])


def run_label() -> m.WorkflowMetadata:
    """Label the workflow with its run, for selectors and for the columns of the UI's list."""
    return m.WorkflowMetadata(labels_from={"moerl/run": m.LabelValueFrom(expression="workflow.parameters.run")})


def set_pod_defaults(template: WorkflowTemplate) -> None:
    """Set the fields of the spec that every workflow of ours shares."""
    template.service_account_name = STEP_SERVICE_ACCOUNT
    template.security_context = pod_security_context()
    # Failed pods stay for their logs until the workflow goes.
    template.pod_gc = m.PodGC(strategy="OnPodSuccess", delete_delay_duration="10m")
    template.ttl_strategy = m.TTLStrategy(seconds_after_success=7 * 86400, seconds_after_failure=14 * 86400)


def _fan_out(name: str, containers: dict[str, Container], count: str) -> Task:
    return Task(
        name=name,
        template=containers[name],
        arguments={"worker": "{{item}}"},
        with_sequence=m.Sequence(count=m.IntOrString(root=count)),
    )


def _dag_outputs() -> list[Parameter]:
    sources = {"policy-version": "publish", "reward-eval": "evaluate", "validated": "evaluate", "summary": "report"}
    return [
        Parameter(
            name=name,
            value_from=m.ValueFrom(parameter=f"{{{{tasks.{task}.outputs.parameters.{name}}}}}", default=""),
        )
        for name, task in sources.items()
    ]
