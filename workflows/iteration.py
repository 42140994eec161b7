"""policy-iteration: the DAG of one policy iteration, from `plan` to `report`."""

from hera.workflows import DAG, Container, Parameter, Task, WorkflowTemplate
from hera.workflows import models as m
from hera.workflows.task import TaskResult

from workflows import engines, jobset, parameters
from workflows.cleanup import EXIT_TEMPLATE, deletion, exit_handler
from workflows.containers import Stage, pod_security_context, stage_container
from workflows.parameters import REWARD_CAPACITY, ROLLOUT_CAPACITY, ROLLOUT_DEADLINE, STRAGGLER_DEADLINE, TRAINING_NODES
from workflows.platform import PlatformProfile

NAME = "policy-iteration"
STEP_SERVICE_ACCOUNT = "moerl-step"
GANG_SERVICE_ACCOUNT = "moerl-gang"
DEADLINE_S = 2 * 86400
"""Of a whole iteration: a pod that no node ever takes would otherwise be waited for without end."""

_RUN = ("--run", "{{workflow.parameters.run}}")
_ITERATION = (*_RUN, "--iteration", "{{workflow.parameters.iteration}}")
_WORKER = (*_ITERATION, "--worker", "{{inputs.parameters.worker}}")
_ONE_NODE = f"{TRAINING_NODES.reference} <= 1"
_SEVERAL_NODES = f"{TRAINING_NODES.reference} > 1"


def _label(stage: str) -> str:
    return f"{stage}-{{{{workflow.parameters.iteration}}}}"


PLAN = Stage(
    name="plan",
    module="plan",
    flags=_ITERATION,
    outputs=("policy-version", "units"),
    deadline="900",
    display_name=_label("plan"),
)
ROLLOUT = Stage(
    name="rollout",
    module="rollout",
    flags=(*_WORKER, "--straggler-deadline", STRAGGLER_DEADLINE.reference),
    inputs=("worker",),
    outputs=("samples", "tokens-per-s"),
    workload="sampler",
    domain="interruptible",
    capacity=ROLLOUT_CAPACITY,
    deadline=ROLLOUT_DEADLINE.reference,
    grace_s=90,
    retry_limit=8,
    display_name="rollout-{{inputs.parameters.worker}}",
    engine_url=engines.worker_url("asInt(inputs.parameters.worker)"),
)
REWARD = Stage(
    name="reward",
    module="reward",
    flags=_WORKER,
    inputs=("worker",),
    outputs=("reward-mean",),
    domain="interruptible",
    capacity=REWARD_CAPACITY,
    deadline="3600",
    grace_s=90,
    retry_limit=8,
    display_name="reward-{{inputs.parameters.worker}}",
)
FLUSH = Stage(
    name="flush",
    module="flush",
    flags=_ITERATION,
    outputs=("batch-uri", "samples"),
    deadline="1800",
    display_name=_label("flush"),
)
TRAIN = Stage(
    name="train",
    module="train",
    flags=_ITERATION,
    outputs=("checkpoint-uri",),
    workload="trainer",
    domain="training",
    deadline="14400",
    grace_s=300,
    display_name=_label("train"),
)
PUBLISH = Stage(
    name="publish",
    module="publish",
    flags=_ITERATION,
    outputs=("publication-uri", "policy-version"),
    published=("policy-version",),
    workload="publisher",
    deadline="3600",
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
    deadline="3600",
    display_name=_label("evaluate"),
    engine_url=engines.worker_url("0"),
)
REPORT = Stage(
    name="report",
    module="report",
    flags=_ITERATION,
    outputs=("summary", "mlflow-url"),
    published=("summary", "mlflow-url"),
    deadline="900",
    display_name=_label("report"),
    report_key="moerl/{{workflow.parameters.run}}/iteration-{{workflow.parameters.iteration}}.html",
)
STAGES = (PLAN, ROLLOUT, REWARD, FLUSH, TRAIN, PUBLISH, EVALUATE, REPORT)


def build_iteration(profile: PlatformProfile) -> WorkflowTemplate:
    """The WorkflowTemplate of one iteration; every stage may run again at any time with the same outcome."""
    with WorkflowTemplate(
        name=NAME,
        entrypoint="iteration",
        on_exit=EXIT_TEMPLATE,
        annotations={
            "workflows.argoproj.io/title": "Policy iteration",
            "workflows.argoproj.io/description": (
                "One policy iteration of a run: sample with the current policy, score, train, publish, evaluate. "
                "Campaigns start it; submit it alone to run one more iteration by hand."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        arguments=parameters.to_hera(parameters.ITERATION),
        synchronization=run_mutex("iteration"),
        workflow_metadata=run_label(),
        active_deadline_seconds=DEADLINE_S,
    ) as template:
        set_pod_defaults(template)
        containers = {stage.name: stage_container(stage, profile) for stage in STAGES}
        gang = jobset.gang_resource(TRAIN, profile, GANG_SERVICE_ACCOUNT)
        delete_gang = deletion(
            "delete-gang",
            jobset.deletion_flags(),
            service_account=GANG_SERVICE_ACCOUNT,
            display_name=_label("delete-gang"),
            profile=profile,
        )
        exit_handler({_SEVERAL_NODES: delete_gang})
        with DAG(name="iteration", outputs=_dag_outputs()):
            plan = Task(name="plan", template=containers["plan"])
            rollout = _fan_out("rollout", containers, parameters.ROLLOUT_WORKERS.reference)
            reward = _fan_out("reward", containers, parameters.REWARD_WORKERS.reference)
            flush = Task(name="flush", template=containers["flush"])
            train = Task(name="train", template=containers["train"], when=_ONE_NODE)
            train_gang = Task(name=jobset.TEMPLATE, template=gang, when=_SEVERAL_NODES)
            # A task that was skipped counts as done in a bare `depends`: then a failed one would be followed, too.
            publish = Task(
                name="publish", template=containers["publish"], depends="train.Succeeded || train-gang.Succeeded"
            )
            evaluate, report = (Task(name=name, template=containers[name]) for name in ("evaluate", "report"))
            plan >> rollout
            # Workers share the units by leases, so one that survives does the work of all.
            rollout.next(reward, on=TaskResult.any_succeeded)
            reward.next(flush, on=TaskResult.any_succeeded)
            flush >> [train, train_gang]
            publish >> evaluate
            evaluate >> report
    return template


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
    sources = {name: stage.name for stage in STAGES for name in stage.published}
    return [
        Parameter(
            name=name,
            value_from=m.ValueFrom(parameter=f"{{{{tasks.{task}.outputs.parameters.{name}}}}}", default=""),
        )
        for name, task in sources.items()
    ]
