"""`moerl plan`: what a configuration needs and how long it should take, before anything is rented."""

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from steps.errors import ConfigError
from workflows.shared_options import DEFAULT_CONFIG, REPOSITORY, Config, Json, Overrides, examples, read_config

if TYPE_CHECKING:
    from steps.config import RunConfig

plan_app = typer.Typer()

Profile = Annotated[
    str | None, typer.Option("--profile", metavar="NAME", help="Platform; default: what the configuration names.")
]
ResponseTokens = Annotated[
    int | None,
    typer.Option("--response-tokens", min=1, help="Mean length of a response; default: half of max_new_tokens."),
]


@plan_app.command(
    epilog=examples(
        "moerl plan configs/qwen3-30b-a3b-p5en.toml",
        "moerl plan qwen3-235b-a22b-p5en --set moe.dispatcher=all_to_all --response-tokens 4000",
        "moerl plan my.toml --profile p6-b200 --json",
    )
)
def plan(
    config: Config = DEFAULT_CONFIG,
    overrides: Overrides = None,
    profile: Profile = None,
    response_tokens: ResponseTokens = None,
    as_json: Json = False,
) -> None:
    """Reckon memory per GPU, the expert exchange and the phases of an iteration; refuse what can't work.

    Times are estimates from published figures and closed forms, shown with their sources; nothing of it was measured.
    """
    from rich.console import Console

    from workflows.capacity.model import new_setting
    from workflows.capacity.problems import setting_problems
    from workflows.capacity.report import plan_json, plan_tables
    from workflows.platform import load_profile

    resolved = read_config(config, overrides)
    platform = load_profile(profile or resolved.platform)
    if platform.accelerator is None:
        raise ConfigError(f"platform = {platform.name!r}: its profile has no GPUs to plan for; try --profile p5en")
    answer = _measure(resolved, platform.gpus)
    setting = new_setting(resolved, answer["size"], platform, platform.accelerator, response_tokens)
    problems = [*setting_problems(setting), *answer["exchange_problems"]]
    if as_json:
        typer.echo(json.dumps(plan_json(setting, answer["source"], problems), indent=2))
    else:
        Console().print(plan_tables(setting, answer["source"]))
    if problems:
        raise ConfigError("this can't work:\n  " + "\n  ".join(problems))


def _measure(config: "RunConfig", ranks_per_node: int) -> dict[str, Any]:
    """What only torch can say; a step's own error and exit code are this command's."""
    from steps.config_loader import config_json

    command = [sys.executable, "-m", "steps.model_size", "--ranks-per-node", str(ranks_per_node)]
    result = subprocess.run(command, input=config_json(config), capture_output=True, text=True, cwd=REPOSITORY)
    if result.returncode:
        sys.stderr.write(result.stderr)
        raise typer.Exit(result.returncode)
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
