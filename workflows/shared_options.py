"""Arguments that several commands of `moerl` take, and what they mean."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from steps.errors import UsageError

if TYPE_CHECKING:
    from steps.config import RunConfig

REPOSITORY = Path(__file__).resolve().parents[1]
DEFAULT_CONFIG = "configs/reverse-digits.toml"
RUNS_DIR = Path("runs")

Config = Annotated[
    str, typer.Argument(metavar="[CONFIG]", help="TOML file, or the name of one in configs/ (sort-digits).")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="a.b=value", help="Change one field; may be repeated."),
]
RunsDir = Annotated[Path, typer.Option("--runs-dir", metavar="DIR", help="Folder that holds the runs.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Run id, or the path of its folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
Context = Annotated[str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig; default: current.")]
Namespace = Annotated[
    str, typer.Option("--namespace", "-n", metavar="NAME", help="Default: the context's, or else moerl.")
]
Parameters = Annotated[
    list[str] | None,
    typer.Option("--parameter", "-p", metavar="NAME=VALUE", help="Set a workflow parameter; may be repeated."),
]


def examples(*lines: str) -> str:
    """Epilog of a command's help."""
    return "**Examples**\n\n" + "\n\n".join(f"`{line}`" for line in lines)


def read_config(name: str, overrides: Sequence[str] | None) -> "RunConfig":
    """Load a TOML file by its path, or a ready-made one by its path or name in the repository."""
    from steps.config_loader import load_config

    choices = (Path(name), REPOSITORY / name, REPOSITORY / "configs" / f"{name}.toml")
    try:
        path = next((choice for choice in choices if choice.is_file()), None)
    except OSError as error:
        shown = name if len(name) < 100 else f"{name[:100]}..."
        raise UsageError(f"configuration {shown!r}: {error.strerror}; give the path of a TOML file") from None
    if path is None:
        ready = ", ".join(sorted(file.stem for file in (REPOSITORY / "configs").glob("*.toml")))
        raise UsageError(f"no configuration {name!r}: give the path of a TOML file, or one of {ready}")
    return load_config(str(path), list(overrides or ()))


def read_parameters(given: Sequence[str] | None) -> dict[str, str]:
    """NAME=VALUE pairs as a mapping; UsageError for anything else."""
    parameters = {}
    for pair in given or ():
        name, separator, value = pair.partition("=")
        if not separator or not name:
            raise UsageError(f"-p {pair}: write NAME=VALUE, as in -p rollout-workers=8")
        parameters[name] = value
    return parameters
