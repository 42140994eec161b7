"""`moerl transport ...`: what carries tokens between ranks.

The probe itself is a step: this replaces the process by it, so that signals and the exit code are its own.
"""

import os
import sys

import typer

transport_app = typer.Typer(help="Check what carries tokens between ranks.", no_args_is_help=True)


@transport_app.command(
    add_help_option=False, context_settings={"allow_extra_args": True, "ignore_unknown_options": True}
)
def probe(context: typer.Context) -> None:
    """Run the expert exchange here: is it exact, how fast is it, what carried it? Options: `--help`."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "steps.transport_probe", *context.args])
