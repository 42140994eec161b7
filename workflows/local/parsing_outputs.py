"""Parameters and artifacts of templates and workflows."""

from workflows.local.fields import Fields, refuse
from workflows.local.model import OUTPUTS_DIR, Artifact, Container, Dag, Parameter, Resource, Steps, ValueFrom


def _value_from(fields: Fields) -> ValueFrom | None:
    if not fields.has("valueFrom"):
        return None
    source = fields.below("valueFrom")
    value_from = ValueFrom(
        path=source.optional_text("path"),
        parameter=source.optional_text("parameter"),
        expression=source.optional_text("expression"),
        json_path=source.optional_text("jsonPath"),
        default=source.optional_text("default"),
    )
    source.close()
    given = (value_from.path, value_from.parameter, value_from.expression, value_from.json_path)
    if sum(item is not None for item in given) != 1:
        refuse(source.where, "needs exactly one of path, parameter, expression, jsonPath")
    return value_from


def parse_parameter(value: object, where: str) -> Parameter:
    fields = Fields(value, where)
    name = fields.required_text("name")
    fields.where = f"{where} {name}"
    parameter = Parameter(
        name=name,
        value=fields.optional_text("value"),
        default=fields.optional_text("default"),
        value_from=_value_from(fields),
        global_name=fields.optional_text("globalName"),
    )
    fields.ignore("description", "enum")
    fields.close()
    return parameter


def parse_output(value: object, where: str, body: object) -> Parameter:
    parameter = parse_parameter(value, where)
    source = parameter.value_from
    where = f"{where} {parameter.name}"
    if source is None:
        if parameter.value is None:
            refuse(where, "needs valueFrom")
        return parameter
    if isinstance(body, Container) and source.path is None:
        refuse(where, "a container's output comes from valueFrom.path")
    if isinstance(body, Resource) and source.json_path is None:
        refuse(where, "a resource's output comes from valueFrom.jsonPath")
    if isinstance(body, Dag | Steps) and source.parameter is None and source.expression is None:
        refuse(where, "a dag's or steps' output comes from valueFrom.parameter or .expression")
    _check_path(source.path, where)
    return parameter


def _check_path(path: str | None, where: str) -> None:
    if path is not None and not path.startswith(f"{OUTPUTS_DIR}/"):
        refuse(where, f"path {path} must lie under {OUTPUTS_DIR}/, the folder that each local step has to itself")


def parse_artifact(value: object, where: str) -> Artifact:
    fields = Fields(value, where)
    name = fields.required_text("name")
    artifact = Artifact(
        name=name,
        path=fields.optional_text("path"),
        from_=fields.optional_text("from"),
        optional=fields.flag("optional"),
    )
    fields.ignore("archive", "artifactGC", "s3", "archiveLogs")
    fields.close()
    if (artifact.path is None) == (artifact.from_ is None):
        refuse(f"{where} {name}", "an artifact needs exactly one of path, from")
    _check_path(artifact.path, f"{where} {name}")
    return artifact
