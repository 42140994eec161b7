"""The frame around a step that several ranks run together; the first of them is the attempt in the ledger."""

from collections.abc import Callable
from functools import partial
from typing import NoReturn

from moe.dispatch.monitor import ExchangeFailed
from steps import gang, paths
from steps.adapters import retries
from steps.adapters.store import NotFound, open_store
from steps.config_loader import config_from_json
from steps.entrypoint import RankContext, StepContext, execute, explain, run_body
from steps.environment import read_environment
from steps.errors import ConfigError, Interrupted, StepError
from steps.gang import Member
from steps.interruption import Interruption
from steps.notices import watch_notices

RankBody = Callable[[RankContext, Member], None]
"""The first rank gets a StepContext; the others, which open no database, a RankContext. It joins its gang itself."""


def execute_in_ranks(step: str, body: RankBody, *, run_id: str, iteration: int) -> NoReturn:
    """Run `body` in `train.ranks` ranks as one attempt of `step`, and exit the process with its code.

    Started by torchrun this process is one of them; otherwise, when there are several, it forks them and waits.
    """
    try:
        member = gang.member_of_environment()
        if member is None and (ranks := _configured_ranks(run_id)) > 1:
            again = partial(execute_in_ranks, step, body, run_id=run_id, iteration=iteration)
            raise SystemExit(gang.run_local_ranks(ranks, again))
    except StepError as error:
        explain(step, error)
        raise SystemExit(error.exit_code) from None
    member = member or Member()
    if member.rank == 0:
        execute(step, partial(_checked, body, member), run_id=run_id, iteration=iteration)
    _follow(step, partial(_checked, body, member), run_id)


def _configured_ranks(run_id: str) -> int:
    """`train.ranks` of the run; 1 before there is a run, so that the step itself says what is missing.

    No connection stays open: this process may be about to fork.
    """
    store = open_store(read_environment().store_uri)
    try:
        return config_from_json(store.get_bytes(paths.config_key(run_id)).decode()).train.ranks
    except NotFound:
        return 1


def fail_together(context: RankContext, error: StepError) -> NoReturn:
    """Fail with what all ranks fail with at this point: the first one says it, the others only end."""
    if isinstance(context, StepContext):
        raise error
    raise SystemExit(error.exit_code)


def _checked(body: RankBody, member: Member, context: RankContext) -> None:
    ranks = context.config.train.ranks
    if member.size != ranks:
        message = f"train.ranks = {ranks}: {member.size} ranks were started (WORLD_SIZE); make the two equal"
        fail_together(context, ConfigError(message))
    try:
        body(context, member)
    except ExchangeFailed as loss:
        cause = gang.told_failure(loss) if isinstance(context, StepContext) else None
        if cause is None:
            raise
        raise cause from loss  # the ledger's entry is to say what the pod ends with


def _follow(step: str, body: Callable[[RankContext], None], run_id: str) -> NoReturn:
    """Run `body` in a rank that is no attempt of its own."""
    interruption = Interruption()
    interruption.install()
    retries.heed(interruption, step)
    try:
        paths.validate_run_id(run_id)
        environment = read_environment()
        context = RankContext(
            step=step,
            run_id=run_id,
            environment=environment,
            store=open_store(environment.store_uri),
            interruption=interruption,
        )
        watch_notices(interruption, environment, context.say)
        code, detail = run_body(body, context)
        if code not in (0, Interrupted.exit_code):
            gang.tell_failure(code, detail)
    except StepError as error:
        code = error.exit_code
        explain(step, error)
    raise SystemExit(code)
