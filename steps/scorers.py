"""The scoring process of a step: what of the step's own is out of its reach, and what the ledger says about it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit

from steps.config import RunConfig
from steps.entrypoint import StepContext
from steps.tasks.sandbox import Scorer

_SQLITE = "sqlite:///"


@contextmanager
def open_scorer(context: StepContext, config: RunConfig) -> Iterator[Scorer]:
    """A scorer for the length of the block; it loads in the background.

    What its sandbox was and was not able to do is in `context.metrics["sandbox"]` afterwards, and said in the log.
    """
    private = _private_paths(context)
    with Scorer(config.task, config.reward, private=private, check=context.interruption.check) as scorer:
        try:
            yield scorer
        finally:
            context.metrics["sandbox"] = scorer.report()
            missing = [f"{name} ({why})" for name, why in scorer.effective.items() if isinstance(why, str)]
            if missing:
                context.say(f"verifier's sandbox: not in effect on this node: {', '.join(missing)}")


def _private_paths(context: StepContext) -> list[Path]:
    environment = context.environment
    private = [environment.cache_dir, environment.outputs_dir]
    store = urlsplit(context.store.uri)
    if store.scheme == "file":
        private.append(Path(unquote(store.path)))
    if environment.database_url.startswith(_SQLITE):
        private.append(Path(environment.database_url.removeprefix(_SQLITE).partition("?")[0]))
    return private
