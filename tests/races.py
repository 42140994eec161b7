"""Processes that do something at the same moment, many times over."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

from steps.adapters.database import Database, open_database
from steps.adapters.store import AlreadyExists, Store, open_store
from steps.errors import StepError

RACE_TIMEOUT_S = 120


@dataclass(frozen=True)
class Services:
    """A store and a migrated database."""

    store_uri: str
    database_url: str
    rounds: int
    """Races that a test is to make."""

    def open(self) -> tuple[Store, Database]:
        return open_store(self.store_uri), open_database(self.database_url)


@dataclass(frozen=True)
class Refused:
    """What a contestant was told instead of an answer."""

    kind: str
    message: str


Contest = Callable[[int, int, Store, Database], Any]
"""Contestant and round, both counted from 0."""


def race(services: Services, contest: Contest, contestants: int = 2) -> list[list[Any]]:
    """Have each of the contestants, processes with connections of their own, do all rounds, each round together.

    Returns the answers of each round; one of our errors is an answer, any other fails the test.
    """
    context = get_context("fork")
    barrier = context.Barrier(contestants)
    pipes = [context.Pipe(duplex=False) for _ in range(contestants)]
    processes = [
        context.Process(target=_contend, args=(services, contest, number, barrier, pipes[number][1]), daemon=True)
        for number in range(contestants)
    ]
    for process in processes:
        process.start()
    for _, writing in pipes:
        writing.close()
    answers = [reading.recv() for reading, _ in pipes]
    for process in processes:
        process.join()
    for given in answers:
        if isinstance(given, BaseException):
            raise given
    return [list(given) for given in zip(*answers, strict=True)]


def _contend(services: Services, contest: Contest, number: int, barrier: Any, answers: Connection) -> None:
    store, database = services.open()
    database.now()  # connected, as `head` connects to the store: the first race is as close as the others
    store.head("nothing")
    given: list[Any] = []
    try:
        for round_ in range(services.rounds):
            barrier.wait(RACE_TIMEOUT_S)
            try:
                given.append(contest(number, round_, store, database))
            except (StepError, AlreadyExists) as error:
                given.append(Refused(type(error).__name__, str(error)))
        answers.send(given)
    except BaseException as error:
        barrier.abort()
        answers.send(error)
    finally:
        database.close()


def winners(answers: Sequence[Any]) -> list[int]:
    """The contestants that were not refused."""
    return [number for number, answer in enumerate(answers) if not isinstance(answer, Refused)]
