"""Manifest -> `model.py`. Refuses unknown fields, unknown kinds and dangling references, naming template and field."""

from typing import Any, Literal, cast

from workflows.local.expressions import EXPR, compile_expression
from workflows.local.fields import Fields, refuse, scalar_text
from workflows.local.model import (
    DISPLAY_NAME,
    Backoff,
    Call,
    Container,
    Dag,
    EnvVar,
    Resource,
    RetryStrategy,
    Steps,
    Template,
    Workflow,
    WorkflowSpec,
)
from workflows.local.parsing_calls import parse_arguments, parse_dag, parse_steps
from workflows.local.parsing_outputs import parse_artifact, parse_output, parse_parameter
from workflows.local.variables import has_tag

# Scheduling, security, clean-up and monitoring: they change where and how a pod runs, not what it computes.
_POD_FIELDS_FOR_CLUSTERS = (
    "affinity",
    "archiveLocation",
    "automountServiceAccountToken",
    "executor",
    "hostNetwork",
    "nodeSelector",
    "podPriorityClassName",
    "priorityClassName",
    "schedulerName",
    "securityContext",
    "serviceAccountName",
    "tolerations",
    "volumes",
)
_SPEC_FIELDS_FOR_CLUSTERS = (
    *_POD_FIELDS_FOR_CLUSTERS,
    "archiveLogs",
    "artifactGC",
    "artifactRepositoryRef",
    "imagePullSecrets",
    "metrics",
    "podDisruptionBudget",
    "podGC",
    "podMetadata",
    "ttlStrategy",
    "workflowMetadata",
)
_CONTAINER_FIELDS_FOR_CLUSTERS = (
    "image",
    "imagePullPolicy",
    "name",
    "ports",
    "resources",
    "securityContext",
    "terminationMessagePolicy",
    "volumeMounts",
    "workingDir",
)


def parse_workflow(manifest: object) -> Workflow:
    """A manifest of kind Workflow; raises ConfigError."""
    fields = Fields(manifest, "Workflow")
    kind = fields.required_text("kind")
    if kind != "Workflow":
        refuse("manifest", f"kind {kind} can't be run here; submit a Workflow")
    fields.ignore("apiVersion", "status")
    metadata = fields.below("metadata")
    name = metadata.text("name")
    if not name:
        refuse("Workflow.metadata", "name is missing (a run is resumed by its name, so generateName is refused)")
    labels = _texts_by_name(metadata, "labels")
    annotations = _texts_by_name(metadata, "annotations")
    metadata.ignore("namespace", "ownerReferences", "finalizers")
    metadata.close()
    spec_value = fields.take("spec")
    fields.close()
    where = f"Workflow {name}"
    spec = Fields(spec_value, where)
    reference = spec.below("workflowTemplateRef")
    template_ref = reference.text("name")
    reference.close()
    arguments = parse_arguments(spec, where)
    if template_ref:
        spec.ignore(*_SPEC_FIELDS_FOR_CLUSTERS)
        spec.close()
        return Workflow(
            name=name, template_ref=template_ref, arguments=arguments, labels=labels, annotations=annotations
        )
    own = {key: value for key, value in cast(dict[str, Any], spec_value).items() if key != "workflowTemplateRef"}
    return Workflow(name=name, spec=parse_spec(own, where), arguments=arguments, labels=labels, annotations=annotations)


def parse_template_manifest(manifest: object) -> tuple[str, WorkflowSpec] | None:
    """(name, spec) of a WorkflowTemplate; None for a CronWorkflow, whose spec is checked and never run here."""
    fields = Fields(manifest, "manifest")
    kind = fields.required_text("kind")
    metadata = fields.take("metadata")
    name = Fields(metadata, f"{kind}.metadata").required_text("name")
    if kind == "WorkflowTemplate":
        return name, parse_spec(fields.take("spec"), f"WorkflowTemplate {name}")
    if kind == "CronWorkflow":
        return None
    refuse(f"{kind} {name}", "the local executor takes WorkflowTemplates")


def _texts_by_name(fields: Fields, name: str) -> dict[str, str]:
    value = fields.take(name) or {}
    where = f"{fields.where}.{name}"
    Fields(value, where)
    return {str(key): scalar_text(item, where) for key, item in value.items()}


def parse_spec(value: object, where: str) -> WorkflowSpec:
    fields = Fields(value, where)
    arguments = fields.below("arguments")
    parameters = tuple(parse_parameter(item, f"{where}.arguments") for item in arguments.list("parameters"))
    arguments.close()
    templates: dict[str, Template] = {}
    for item in fields.list("templates"):
        template = parse_template(item, where)
        if template.name in templates:
            refuse(where, f"template {template.name} is defined twice")
        templates[template.name] = template
    if fields.take("retryStrategy") or fields.take("templateDefaults"):
        refuse(where, "retryStrategy and templateDefaults of a spec also retry dag and steps; put it on leaf templates")
    spec = WorkflowSpec(
        entrypoint=fields.required_text("entrypoint"),
        templates=templates,
        parameters=parameters,
        on_exit=fields.text("onExit"),
        active_deadline_s=fields.text("activeDeadlineSeconds"),
        parallelism=fields.count("parallelism"),
        pod_spec_patch=fields.text("podSpecPatch"),
        mutexes=_mutexes(fields),
    )
    fields.ignore(*_SPEC_FIELDS_FOR_CLUSTERS)
    fields.close()
    _check_references(spec, where)
    return spec


def _check_references(spec: WorkflowSpec, where: str) -> None:
    for role, name in (("entrypoint", spec.entrypoint), ("onExit", spec.on_exit)):
        if name and name not in spec.templates:
            refuse(where, f"{role} {name} is not one of its templates")
    for template in spec.templates.values():
        for call in calls_of(template):
            if call.template not in spec.templates:
                refuse(f"template {template.name}.{call.name}", f"template {call.template} does not exist in {where}")


def calls_of(template: Template) -> tuple[Call, ...]:
    """The tasks or steps of a template, in order."""
    if isinstance(template.body, Dag):
        return template.body.tasks
    if isinstance(template.body, Steps):
        return tuple(call for group in template.body.groups for call in group)
    return ()


def _mutexes(fields: Fields) -> tuple[str, ...]:
    synchronization = fields.below("synchronization")
    names = []
    for item in synchronization.list("mutexes"):
        mutex = Fields(item, f"{synchronization.where}.mutexes")
        names.append(mutex.required_text("name"))
        mutex.ignore("namespace", "database")
        mutex.close()
    synchronization.close()
    return tuple(names)


def parse_template(value: object, where: str) -> Template:
    name = Fields(value, f"{where}.templates").required_text("name")
    where = f"template {name}"
    fields = Fields(value, where)
    inputs = fields.below("inputs")
    input_parameters = tuple(parse_parameter(item, f"{where}.inputs") for item in inputs.list("parameters"))
    inputs.close()
    outputs = fields.below("outputs")
    body = _body(fields)
    fields.ignore("metrics")  # its tags are about the node's end: {{status}}, {{duration}}
    template = Template(
        name=fields.required_text("name"),
        body=body,
        inputs=input_parameters,
        outputs=tuple(parse_output(item, f"{where}.outputs", body) for item in outputs.list("parameters")),
        artifacts=tuple(parse_artifact(item, f"{where}.outputs") for item in outputs.list("artifacts")),
        retry=_retry(fields),
        active_deadline_s=fields.text("activeDeadlineSeconds"),
        pod_spec_patch=fields.text("podSpecPatch"),
        parallelism=fields.count("parallelism"),
        fail_fast=fields.flag("failFast"),
        mutexes=_mutexes(fields),
        display_name=_display_name(fields),
        unused=fields.ignore(*_POD_FIELDS_FOR_CLUSTERS),
    )
    outputs.close()
    fields.close()
    _check_template(template, where)
    return template


def _check_template(template: Template, where: str) -> None:
    grouping = isinstance(template.body, Dag | Steps)
    if grouping and template.retry is not None:
        refuse(where, "retryStrategy on a dag or steps template reruns every child; put it on the leaf templates")
    if grouping and template.active_deadline_s:
        refuse(where, "activeDeadlineSeconds acts on leaf templates only; Argo ignores it here")
    if not grouping and (template.parallelism is not None or template.fail_fast):
        refuse(where, "parallelism and failFast act on dag and steps templates only")


def _display_name(fields: Fields) -> str:
    fields.below("metadata").ignore("annotations", "labels")
    return _texts_by_name(fields, "annotations").get(DISPLAY_NAME, "")


def _body(fields: Fields) -> Container | Resource | Dag | Steps:
    kinds = [kind for kind in ("container", "resource", "dag", "steps") if fields.has(kind)]
    if len(kinds) != 1:
        refuse(fields.where, f"needs exactly one of container, resource, dag, steps; it has {kinds or 'none known'}")
    if kinds[0] == "steps":
        return parse_steps(fields)
    body = fields.below(kinds[0])
    if kinds[0] == "container":
        return parse_container(body)
    return _resource(body) if kinds[0] == "resource" else parse_dag(body)


def parse_container(fields: Fields) -> Container:
    command = fields.texts("command")
    if not command:
        refuse(fields.where, "command is missing (an image's own entrypoint is not known here)")
    container = Container(
        command=command,
        args=fields.texts("args"),
        env=tuple(_env(item, f"{fields.where}.env") for item in fields.list("env")),
        unused=fields.ignore(*_CONTAINER_FIELDS_FOR_CLUSTERS),
    )
    fields.close()
    return container


def _env(value: object, where: str) -> EnvVar:
    fields = Fields(value, where)
    name = fields.required_text("name")
    if not fields.has("valueFrom"):
        variable = EnvVar(name=name, value=fields.text("value"))
        fields.close()
        return variable
    source = fields.below("valueFrom")
    fields.close()
    variable = _env_reference(name, source)
    source.close()
    return variable


def _env_reference(name: str, source: Fields) -> EnvVar:
    kinds: dict[str, Literal["configMap", "secret"]] = {"configMapKeyRef": "configMap", "secretKeyRef": "secret"}
    for field_name, kind in kinds.items():
        if source.has(field_name):
            reference = source.below(field_name)
            variable = EnvVar(
                name=name,
                source=kind,
                object_name=reference.required_text("name"),
                key=reference.required_text("key"),
                optional=reference.flag("optional"),
            )
            reference.close()
            return variable
    if not source.has("fieldRef"):
        source.close()
        refuse(source.where, "is empty")
    reference = source.below("fieldRef")
    reference.ignore("apiVersion")
    variable = EnvVar(name=name, source="field", key=reference.required_text("fieldPath"))
    reference.close()
    return variable


def _resource(fields: Fields) -> Resource:
    action = fields.required_text("action")
    if action not in ("apply", "create", "delete", "get"):
        refuse(fields.where, f"action {action} is not known; use apply, create, get or delete")
    resource = Resource(
        action=cast(Literal["apply", "create", "delete", "get"], action),
        manifest=fields.text("manifest"),
        flags=fields.texts("flags"),
        success_condition=fields.text("successCondition"),
        failure_condition=fields.text("failureCondition"),
        owned=fields.flag("setOwnerReference"),
    )
    fields.close()
    _check_resource(resource, fields.where)
    return resource


def _check_resource(resource: Resource, where: str) -> None:
    waits = resource.success_condition or resource.failure_condition
    is_at_once = "\nkind: Service\n" in f"\n{resource.manifest}"  # there is nothing of it to wait for
    if resource.action in ("apply", "create") and not waits and not is_at_once:
        refuse(where, "needs successCondition or failureCondition: without one Argo does not wait for the object")
    if resource.action in ("apply", "create", "get") and not resource.manifest:
        refuse(where, f"{resource.action} needs a manifest")


def _retry(fields: Fields) -> RetryStrategy | None:
    if not fields.has("retryStrategy"):
        return None
    strategy = fields.below("retryStrategy")
    policy = strategy.optional_text("retryPolicy")
    if policy not in (None, "Always", "OnFailure", "OnError"):
        refuse(strategy.where, f"retryPolicy {policy} is not known; use Always, OnFailure or OnError")
    expression = strategy.text("expression")
    if expression and not has_tag(expression):
        compile_expression(expression, EXPR)
    retry = RetryStrategy(
        limit=strategy.optional_text("limit"),
        policy=cast(Literal["Always", "OnFailure", "OnError"] | None, policy),
        expression=expression,
        backoff=_backoff(strategy),
    )
    strategy.ignore("affinity")
    strategy.close()
    return retry


def _backoff(strategy: Fields) -> Backoff | None:
    if not strategy.has("backoff"):
        return None
    fields = strategy.below("backoff")
    if fields.has("maxDuration"):
        refuse(fields.where, "maxDuration counts the steps' own run time and becomes their deadline; use cap")
    backoff = Backoff(
        duration=fields.required_text("duration"), factor=fields.text("factor", "1"), cap=fields.text("cap")
    )
    fields.close()
    return backoff
