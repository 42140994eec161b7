"""The places of a dag or steps template with `parallelism`: how many of its children may be active at once.

As Argo counts them (node_counters.go, checkParallelism in operator.go): a Retry node takes no place, only its running
attempt does. During a backoff the next child may therefore start, and the retried attempt then starts without asking.
"""

import asyncio
from collections import deque


class Places:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.active = 0
        self.waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> "Place":
        """Waits for a free place, in the order of asking."""
        while self.active >= self.limit:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.waiting.append(turn)
            await turn
        place = Place(self)
        place.enter()
        return place

    def changed(self) -> None:
        while self.waiting and self.active < self.limit:
            turn = self.waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                return


class Place:
    """One child's place."""

    def __init__(self, places: Places) -> None:
        self.places = places
        self.held = False

    def enter(self) -> None:
        """Counts as active again, whether or not there is room."""
        if not self.held:
            self.held = True
            self.places.active += 1

    def leave(self) -> None:
        if self.held:
            self.held = False
            self.places.active -= 1
            self.places.changed()
