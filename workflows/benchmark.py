"""policy-benchmark: is a dispatcher exact on these nodes, and what does it bring to the sampling of one workload?

Each of two dispatchers is probed with made-up tokens, forward and backward; then both sample the same prompts of a run.
"""

from hera.workflows import DAG, Container, Parameter, Task, WorkflowTemplate
from hera.workflows import models as m

from workflows import parameters
from workflows.containers import Stage, stage_container
from workflows.iteration import run_label, run_mutex, set_pod_defaults
from workflows.parameters import BENCHMARK_PROMPTS, BENCHMARK_RANKS, FIRST_DISPATCHER, RUN, SECOND_DISPATCHER
from workflows.platform import PlatformProfile

NAME = "policy-benchmark"

PROBE = Stage(
    name="probe",
    module="transport_probe",
    flags=("--dispatcher", "{{inputs.parameters.dispatcher}}", "--ranks", BENCHMARK_RANKS.reference),
    inputs=("dispatcher", "position"),
    outputs=(),
    workload="trainer",
    domain="training",
    deadline="1800",
    display_name="probe-{{inputs.parameters.position}}",
)
"""The position, first or second, is in the name: a dispatcher's own has underscores, which a display name can't."""
COMPARISON = Stage(
    name="rollout-comparison",
    module="benchmark_rollout",
    flags=(
        *("--run", RUN.reference),
        *("--first", FIRST_DISPATCHER.reference),
        *("--second", SECOND_DISPATCHER.reference),
        *("--ranks", BENCHMARK_RANKS.reference),
        *("--prompts", BENCHMARK_PROMPTS.reference),
    ),
    outputs=("summary", "ratio", "report"),
    published=("summary", "ratio", "report"),
    workload="trainer",
    domain="training",
    deadline="3600",
    display_name="rollout-comparison",
)


def build_benchmark(profile: PlatformProfile) -> WorkflowTemplate:
    """The WorkflowTemplate of the benchmark; its pods are those that train on one node."""
    with WorkflowTemplate(
        name=NAME,
        entrypoint="benchmark",
        annotations={
            "workflows.argoproj.io/title": "Dispatcher benchmark",
            "workflows.argoproj.io/description": (
                "Probe two dispatchers on this cluster's nodes, then sample the prompts of a run under both: "
                "tokens a second, and whether the tokens are equal."
            ),
        },
        labels={"app.kubernetes.io/name": "argo-moe-rl"},
        arguments=parameters.to_hera(parameters.BENCHMARK),
        synchronization=run_mutex("benchmark"),
        workflow_metadata=run_label(),
    ) as template:
        set_pod_defaults(template)
        probe = stage_container(PROBE, profile)
        comparison = stage_container(COMPARISON, profile)
        with DAG(name="benchmark", outputs=_outputs()):
            first = _probe(probe, "first", FIRST_DISPATCHER.reference)
            second = _probe(probe, "second", SECOND_DISPATCHER.reference)
            # One after the other: they measure, and on one machine they would share its network.
            first >> second
            second >> Task(name=COMPARISON.name, template=comparison)
    return template


def _probe(container: Container, position: str, dispatcher: str) -> Task:
    """The local dispatcher exchanges nothing that could be probed."""
    return Task(
        name=f"probe-{position}",
        template=container,
        arguments={"dispatcher": dispatcher, "position": position},
        when=f"{dispatcher} != local",
    )


def _outputs() -> list[Parameter]:
    return [
        Parameter(
            name=name,
            value_from=m.ValueFrom(parameter=f"{{{{tasks.{COMPARISON.name}.outputs.parameters.{name}}}}}", default=""),
        )
        for name in COMPARISON.published
    ]
