"""A run's randomness is a function of (seed, iteration, prompt_uid, sample_index): never of time, pod or attempt."""

import hashlib
from collections.abc import Sequence


def derive_seed(*parts: str | int) -> int:
    """A 64-bit unsigned seed from its parts (BLAKE2b of their text, separated)."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def sample_seed(seed: int, iteration: int, prompt_uid: str, sample_index: int) -> int:
    """Seed of one response."""
    return derive_seed("sample", seed, iteration, prompt_uid, sample_index)


def epoch_order(uids: Sequence[str], seed: int, epoch: int, prompts_per_iteration: int) -> list[str]:
    """Order in which epoch `epoch` draws its prompts: a permutation of `uids`.

    An iteration may straddle two epochs. What it draws from the end of one is moved to the end of the next, so that no
    iteration holds a prompt twice while every epoch still uses every prompt once.
    """
    order: list[str] = []
    for current in range(epoch + 1):
        straddling = (current * len(uids)) % prompts_per_iteration
        late = set(order[len(order) - straddling :]) if order and straddling else set()
        shuffled = sorted(uids, key=lambda uid: derive_seed("epoch", seed, current, uid))  # noqa: B023 - used at once
        order = [uid for uid in shuffled if uid not in late] + [uid for uid in shuffled if uid in late]
    return order


def draw_prompts(uids: Sequence[str], seed: int, cursor: int, count: int) -> list[str]:
    """The `count` prompt uids at positions cursor, cursor + 1, ... of the endless sequence of epochs."""
    drawn: list[str] = []
    while len(drawn) < count:
        epoch, offset = divmod(cursor + len(drawn), len(uids))
        drawn += epoch_order(uids, seed, epoch, count)[offset : offset + count - len(drawn)]
    return drawn
