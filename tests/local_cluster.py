"""Small workflows for the local executor's tests: manifests as dicts, steps as tiny real modules."""

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from workflows.local.events import Event
from workflows.local.executor import LocalCluster
from workflows.local.warm_client import Preload

OUTPUTS = "/tmp/moerl/outputs"

# What the tests' steps do, chosen by the first argument. Each run of a step leaves a line in $TRACE.
STEP = """
import json, os, re, signal, sys, time
from pathlib import Path

verb, *arguments = sys.argv[1:]
with open(os.environ["TRACE"], "a") as trace:
    trace.write(os.environ["POD_NAME"] + " " + " ".join(sys.argv[1:]) + "\\n")
outputs = Path(os.environ["MOERL_OUTPUTS_DIR"])
if verb == "write":
    name, value = arguments
    (outputs / name).write_text(value + "\\n")
elif verb == "exit":
    sys.exit(int(arguments[0]))
elif verb == "raise":
    raise RuntimeError("a bug")
elif verb == "env":
    (outputs / "env").write_text(json.dumps({name: os.environ.get(name) for name in arguments}))
elif verb == "flaky":  # fails with exit code arguments[0] until the file counts arguments[1] runs
    counter = Path(os.environ["TRACE"] + "." + arguments[2])
    runs = int(counter.read_text()) if counter.exists() else 0
    counter.write_text(str(runs + 1))
    sys.exit(int(arguments[0]) if runs < int(arguments[1]) else 0)
elif verb == "sleep":
    (outputs / "started").touch()
    time.sleep(float(arguments[0]))
elif verb == "drain":  # ends with 75 on SIGTERM, as a step does
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    (outputs / "started").touch()
    time.sleep(float(arguments[0]))
elif verb == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (outputs / "started").touch()
    time.sleep(float(arguments[0]))
elif verb == "rank":  # tells its place; rank arguments[1] ends with code arguments[0] in restart arguments[2]
    code, rank, restart = arguments
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    (outputs / ("rank-" + os.environ["RANK"])).write_text(json.dumps({name: os.environ[name] for name in names}))
    if os.environ["ATTEMPT"] == restart:
        if os.environ["RANK"] == rank:
            restarted = re.search(r"(-restart-\\d+)?$", outputs.parent.name)[0]
            pattern, others = f"*-[0-9]{restarted}/outputs/started-*", int(os.environ["WORLD_SIZE"]) - 1
            while len(list(outputs.parents[1].glob(pattern))) < others:
                time.sleep(0.01)  # what the others do shall not depend on who comes first
            print("the reason")
            sys.exit(int(code))
        def drain(*_):
            (outputs / ("drained-" + os.environ["RANK"])).touch()
            sys.exit(75)
        signal.signal(signal.SIGTERM, drain)
        (outputs / ("started-" + os.environ["RANK"])).touch()
        time.sleep(60)
elif verb == "exec":
    exec(arguments[0])
elif verb == "kill":
    os.kill(os.getpid(), int(arguments[0]))
elif verb == "progress":
    for line in ("0/2", "1/2", "2/2"):
        with open(os.environ["ARGO_PROGRESS_FILE"], "a") as progress:
            progress.write(line + "\\n")
"""


def step(name: str, *args: str, outputs: Sequence[Mapping[str, Any]] = (), **template: Any) -> dict[str, Any]:
    """A container template that runs the step module with `args`; other template fields by keyword."""
    container = {"image": "x", "command": ["python", "-m", "tinystep"], "args": list(args)}
    container |= template.pop("container", {})
    body: dict[str, Any] = {"name": name, "container": container, **template}
    if outputs:
        body["outputs"] = {"parameters": list(outputs)}
    return body


def output(name: str, **source: Any) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"path": f"{OUTPUTS}/{name}", **source}}


def inputs(*names: str) -> dict[str, Any]:
    return {"parameters": [{"name": name} for name in names]}


def call(name: str, template: str | None = None, *, arguments: Mapping[str, str] | None = None, **fields: Any) -> Any:
    """A dag task or a step."""
    body: dict[str, Any] = {"name": name, "template": template or name, **fields}
    if arguments:
        body["arguments"] = {"parameters": [{"name": key, "value": value} for key, value in arguments.items()]}
    return body


def workflow(name: str, templates: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    """A Workflow whose first template is its entrypoint."""
    body = {"entrypoint": templates[0]["name"], "templates": list(templates), **spec}
    return {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "metadata": {"name": name}, "spec": body}


def workflow_template(name: str, templates: Sequence[Mapping[str, Any]], **spec: Any) -> dict[str, Any]:
    return workflow(name, templates, **spec) | {"kind": "WorkflowTemplate"}


def child_of(name: str, template: str) -> dict[str, Any]:
    """The fields of a resource template that applies a child Workflow."""
    manifest = f"""
        apiVersion: argoproj.io/v1alpha1
        kind: Workflow
        metadata: {{name: "{name}"}}
        spec: {{workflowTemplateRef: {{name: {template}}}}}
    """
    return {
        "action": "apply",
        "manifest": textwrap.dedent(manifest),
        "successCondition": "status.phase == Succeeded",
        "failureCondition": "status.phase in (Failed, Error)",
    }


class Cluster(LocalCluster):
    """A LocalCluster in a test's folder that keeps its events; nothing is preloaded, so that it starts at once."""

    def __init__(self, folder: Path, **options: Any) -> None:
        modules = folder / "modules"
        modules.mkdir(exist_ok=True)
        (modules / "tinystep.py").write_text(STEP)
        self.trace_file = folder / "trace"
        self.events: list[Event] = []
        super().__init__(
            folder / "runs",
            config_maps=options.pop("config_maps", {}),
            secrets=options.pop("secrets", {}),
            templates=options.pop("templates", []),
            on_event=options.pop("on_event", self.events.append),
            working_dir=modules,
            extra_env={"TRACE": str(self.trace_file), **options.pop("extra_env", {})},
            preload=options.pop("preload", Preload()),
            backoff_scale=options.pop("backoff_scale", 0.0),
            **options,
        )

    def trace(self) -> list[str]:
        """The arguments of every step that ran, in order."""
        lines = self.trace_file.read_text().splitlines() if self.trace_file.exists() else []
        return [line.partition(" ")[2] for line in lines]
