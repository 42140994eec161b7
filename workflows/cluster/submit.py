"""Start a campaign on a cluster, and go on with one: the objects that `argo submit` and `argo resubmit` create.

Parameters are checked against the WorkflowTemplate that is installed there, since that is what will read them.
"""

import itertools
from collections.abc import Mapping, Sequence

from steps.errors import ConfigError, UsageError
from workflows.cluster.client import WORKFLOW_TEMPLATES, WORKFLOWS, Cluster, Conflict, NotFound, Object
from workflows.cluster.runs import (
    CAMPAIGN_LABEL,
    CAMPAIGN_TEMPLATE,
    FINISHED,
    ITERATION_LABEL,
    PHASE_LABEL,
    RUN_LABEL,
    can_read_nodes,
    find_campaigns,
    inputs_of,
    latest_campaign,
    name_of,
    nodes_of,
    outputs_of,
    parameters_of,
    phase_of,
    step_of,
    unfinished_children,
)
from workflows.printed_commands import moerl_command

PREVIOUS_LABEL = "workflows.argoproj.io/resubmitted-from-workflow"
LONGEST_NAME = 42
"""Of a campaign, so that the names of its training pods fit (`workflows.campaign.LONGEST_NAME`)."""
TEMPLATE_LABEL = "workflows.argoproj.io/workflow-template"


def campaign_workflow(name: str, run_id: str, parameters: Mapping[str, str]) -> Object:
    """What `argo submit --from workflowtemplate/policy-campaign --name NAME -l moerl/run=RUN -p run=RUN -p ...` sends.

    (`NewWorkflowFromWorkflowTemplate` in Argo's workflow/common/convert.go, then `ApplySubmitOpts` in
    workflow/util/util.go.) The label is the one that Argo derives from the parameter a moment later.
    """
    values = {"run": run_id} | {key: value for key, value in parameters.items() if key != "run"}
    return {
        "apiVersion": "argoproj.io/v1alpha1",
        "kind": "Workflow",
        "metadata": {
            "name": name,
            "generateName": f"{CAMPAIGN_TEMPLATE}-",
            "labels": {TEMPLATE_LABEL: CAMPAIGN_TEMPLATE, RUN_LABEL: run_id},
        },
        "spec": {
            "arguments": {"parameters": [{"name": key, "value": value} for key, value in values.items()]},
            "workflowTemplateRef": {"name": CAMPAIGN_TEMPLATE},
        },
    }


def submit(cluster: Cluster, run_id: str, parameters: Mapping[str, str]) -> Object:
    """Start a campaign of the run; a finished run gets more iterations, by another campaign.

    UsageError for a parameter that the template does not take, for a run that is being driven, and for one whose last
    campaign failed (that is what `resume` is for).
    """
    _check_run(run_id, parameters)
    check_parameters(_template_parameters(cluster), {"run": run_id} | dict(parameters))
    campaigns = find_campaigns(cluster, run_id)
    if campaigns:
        _refuse_unless_succeeded(cluster, run_id, campaigns[-1])
    return _create(cluster, run_id, campaigns, parameters)


def resume(cluster: Cluster, run_id: str, parameters: Mapping[str, str]) -> Object:
    """Go on with a run: wake a suspended campaign, or start one that does what a failed or stopped one left undone.

    `parameters` replace those of the campaign before, such as an image in which a bug is mended. What is finished is
    not repeated: steps find their work done, and `iterations` counts what is left.
    """
    _check_run(run_id, parameters)
    campaign = latest_campaign(cluster, run_id)
    name, phase = name_of(campaign), phase_of(campaign)
    if phase == "Succeeded":
        more = moerl_command("submit", "--run-id", run_id, "-p", "iterations=N")
        raise UsageError(f"run {run_id} is finished (workflow {name} succeeded): add iterations with `{more}`")
    if phase not in FINISHED:
        return _wake(cluster, run_id, campaign, parameters)
    declared = _template_parameters(cluster)
    # What a newer template no longer declares, nothing reads.
    kept = {entry["name"] for entry in declared}
    values = {key: value for key, value in parameters_of(campaign).items() if key in kept} | dict(parameters)
    if "iterations" not in parameters:
        values |= _iterations_left(cluster, campaign)
    check_parameters(declared, values)
    return _create(cluster, run_id, find_campaigns(cluster, run_id), values, {PREVIOUS_LABEL: name})


def _check_run(run_id: str, parameters: Mapping[str, str]) -> None:
    if parameters.get("run", run_id) != run_id:
        raise UsageError(f"parameter run = {parameters['run']!r}, but the run is {run_id}: name one of them only")


def check_parameters(declared: Sequence[Object], given: Mapping[str, str]) -> None:
    """Raise UsageError for what the template would refuse, or would silently ignore."""
    known = {entry["name"]: entry for entry in declared}
    for name, value in given.items():
        if name not in known:
            raise UsageError(f"{CAMPAIGN_TEMPLATE} has no parameter {name!r}; it has {', '.join(known)}")
        choices = known[name].get("enum")
        if choices and value not in choices:
            raise UsageError(f"parameter {name} = {value!r}: choose one of {', '.join(map(str, choices))}")
    for name, entry in known.items():
        if name not in given and "value" not in entry and "default" not in entry:
            what = entry.get("description") or "it has no default"
            raise UsageError(f"parameter {name} is missing ({what}): give it with -p {name}=...")


def _template_parameters(cluster: Cluster) -> list[Object]:
    try:
        template = cluster.get(WORKFLOW_TEMPLATES, CAMPAIGN_TEMPLATE)
    except NotFound:
        raise ConfigError(
            f"namespace {cluster.namespace} of {cluster.context} has no WorkflowTemplate {CAMPAIGN_TEMPLATE}: install "
            "it with `kubectl apply -k templates/`, or name another --namespace"
        ) from None
    return list(template["spec"].get("arguments", {}).get("parameters") or [])


def _refuse_unless_succeeded(cluster: Cluster, run_id: str, campaign: Object) -> None:
    phase = phase_of(campaign)
    if phase == "Succeeded":
        return
    state = f"run {run_id} exists in namespace {cluster.namespace} (workflow {name_of(campaign)}, {phase})"
    if phase in FINISHED:
        raise UsageError(f"{state}: continue it with `{moerl_command('resume', run_id)}`, or choose another --run-id")
    raise UsageError(f"{state}: follow it with `{moerl_command('watch', run_id)}`, or choose another --run-id")


def _create(
    cluster: Cluster,
    run_id: str,
    campaigns: Sequence[Object],
    parameters: Mapping[str, str],
    labels: Mapping[str, str] | None = None,
) -> Object:
    """Create the campaign as RUN, or as RUN-2, RUN-3, ... beside those that there are.

    Of several that are submitted at the same time one is created: Conflict for the others.
    """
    taken = {name_of(campaign) for campaign in campaigns}
    for name in itertools.chain([run_id], (f"{run_id}-{number}" for number in itertools.count(2))):
        if name in taken:
            continue
        if len(name) > LONGEST_NAME:
            raise UsageError(
                f"{name} would be too long for the names of its pods: delete finished workflows of run {run_id}, or "
                "start another run with a shorter --run-id"
            )
        body = campaign_workflow(name, run_id, parameters)
        body["metadata"]["labels"] |= labels or {}
        try:
            return cluster.create(WORKFLOWS, body)
        except Conflict:
            # A later name may be that of another run.
            if name == run_id or parameters_of(cluster.get(WORKFLOWS, name)).get("run") == run_id:
                look = moerl_command("status", run_id)
                raise Conflict(
                    f"workflow {name} exists in namespace {cluster.namespace}, started a moment ago or for another "
                    f"purpose: look with `{look}`, or choose another --run-id"
                ) from None
    raise AssertionError("the names never end")


def _wake(cluster: Cluster, run_id: str, campaign: Object, parameters: Mapping[str, str]) -> Object:
    """Clear `spec.suspend` of the campaign and of its iteration, as `argo resume` does of one Workflow."""
    name = name_of(campaign)
    if campaign["spec"].get("shutdown"):
        raise UsageError(f"workflow {name} is still stopping: resume when `{moerl_command('status', run_id)}` says so")
    suspended = [one for one in (campaign, *unfinished_children(cluster, campaign)) if one["spec"].get("suspend")]
    if not suspended:
        follow = moerl_command("watch", run_id)
        raise UsageError(f"workflow {name} is {phase_of(campaign)}, nothing to resume: follow it with `{follow}`")
    if parameters:
        raise UsageError(
            f"workflow {name} is suspended and goes on with its own parameters: leave out -p, or end it first with "
            f"`{moerl_command('stop', run_id)}`"
        )
    return [cluster.merge_patch(WORKFLOWS, name_of(one), {"spec": {"suspend": None}}) for one in suspended][0]


def _iterations_left(cluster: Cluster, campaign: Object) -> dict[str, str]:
    """`iterations` without those that the campaign finished; nothing while its first step has not said how many."""
    if not can_read_nodes(campaign):
        raise UsageError(
            f"Argo keeps the nodes of workflow {name_of(campaign)} in its database, so what is left is not known here: "
            "say it with -p iterations=N"
        )
    nodes = nodes_of(campaign)
    total = next((outputs_of(node).get("iterations") for node in nodes if step_of(node) == "init"), None)
    if total is None:
        return {}
    done = {inputs_of(node)["iteration"] for node in nodes if step_of(node) == "child" and node["phase"] == "Succeeded"}
    # One may have ended well after its watcher was stopped, or lost.
    selector = f"{CAMPAIGN_LABEL}={name_of(campaign)},{PHASE_LABEL}=Succeeded"
    for child in cluster.select(WORKFLOWS, selector, metadata_only=True)[0]:
        done.add(child["metadata"]["labels"][ITERATION_LABEL])
    left = int(total) - len(done)
    if left > 0:
        return {"iterations": str(left)}
    raise UsageError(
        f"all iterations of workflow {name_of(campaign)} are done, only its summary is missing: "
        f"`argo retry {name_of(campaign)}` writes it"
    )
