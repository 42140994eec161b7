"""Are the WorkflowTemplates of the cluster those that this version of the program renders?"""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from workflows.catalog import render_all
from workflows.cluster.client import Object
from workflows.cluster.findings import Finding, fail, ok, warn
from workflows.parameters import CAMPAIGN, ITERATION
from workflows.platform import PlatformProfile, load_profile, profile_names

APPLY = "kubectl apply -k templates/"
FROM_HERE = f"{APPLY}, or the overlay that you use, from the version that you use here"
PARAMETERS = {"policy-iteration": ITERATION, "policy-campaign": CAMPAIGN}
SHOWN = 3
"""Places that differ, of as many as there may be."""


def template_findings(
    namespace: str, installed: Mapping[str, Object | None], profile: PlatformProfile
) -> Iterator[Finding]:
    """`installed`: name -> what the cluster has under it, if anything."""
    for name, template in installed.items():
        if template is None:
            yield fail("templates", f"WorkflowTemplate {name} is not to be seen in namespace {namespace}", APPLY)
        else:
            yield _finding(name, template, profile)


def declared_parameters(template: Object) -> dict[str, Object]:
    entries = template["spec"].get("arguments", {}).get("parameters") or []
    return {entry["name"]: entry for entry in entries}


def _finding(name: str, template: Object, profile: PlatformProfile) -> Finding:
    what = f"WorkflowTemplate {name}"
    differing = set(declared_parameters(template)) ^ {parameter.name for parameter in PARAMETERS[name]}
    if differing:
        listed = ", ".join(sorted(differing))
        return warn("templates", f"{what} is of another version: parameters {listed} differ", FROM_HERE)
    places = _differences(name, template, profile)
    if not places:
        return ok("templates", f"{what}, as rendered for profile {profile.name}")
    for other in profile_names():
        if other != profile.name and not _differences(name, template, load_profile(other)):
            mend = f"moerl doctor --profile {other}, or install those of {profile.name} (moerl render --profile)"
            return warn("templates", f"{what} is that of profile {other}, not of {profile.name}", mend)
    more = f" and {len(places) - SHOWN} more places" if len(places) > SHOWN else ""
    where = ", ".join(places[:SHOWN]) + more
    return warn("templates", f"{what} is not what is rendered here for profile {profile.name}: {where}", FROM_HERE)


def _differences(name: str, template: Object, profile: PlatformProfile) -> list[str]:
    rendered = yaml.safe_load(render_all(profile)[f"{name}.yaml"])
    return list(_places(_comparable(rendered["spec"]), _comparable(template["spec"]), ""))


def _comparable(spec: Object) -> Any:
    """Without the defaults of parameters, which an overlay may set, and without what is empty.

    Argo's server and its UI write fields that are empty; a cluster's own copy may lack them.
    """
    arguments = spec.get("arguments", {})
    kept = [{key: value for key, value in one.items() if key != "value"} for one in arguments.get("parameters") or ()]
    return _pruned(spec | {"arguments": arguments | {"parameters": kept}})


def _pruned(value: Any) -> Any:
    """Lists of named things become mappings, so that a place is told by its name."""
    if isinstance(value, dict):
        pruned = {key: _pruned(entry) for key, entry in value.items()}
        return {key: entry for key, entry in pruned.items() if entry not in (None, "", {}, [])}
    if not isinstance(value, list):
        return value
    names = [one.get("name") if isinstance(one, dict) else None for one in value]
    if all(names) and len(set(names)) == len(names):
        return {str(name): _pruned(one) for name, one in zip(names, value, strict=True)}
    return [_pruned(one) for one in value]


def _places(ours: Any, theirs: Any, path: str) -> Iterator[str]:
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from _places(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif ours != theirs:
        yield path
