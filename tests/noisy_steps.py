"""Steps whose numbers are never the same twice, as on GPUs: a warm server preloads this module.

$NOISE names what differs from process to process: `update` (the weights, also of a warm-up), `probe` (the last bits of
the publication's log-probabilities), `score` (the held-out reward).
"""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import moe.consolidate
import steps.seeds
from steps import policies


def is_noisy(what: str) -> bool:
    return what in os.environ.get("NOISE", "").split(",")


def derive_seed(*parts: Any) -> int:
    trains = parts[0] in ("update", "warmup") and is_noisy("update")
    return DERIVE(*parts, os.getpid()) if trains else DERIVE(*parts)


def consolidate(checkpoint: Path, parent: Path, folder: Path, *arguments: Any) -> None:
    CONSOLIDATE(checkpoint, parent, folder, *arguments)
    if is_noisy("probe"):
        probe = folder / "probe.json"
        probe.write_text(probe.read_text() + " " * (os.getpid() % 1000))


def score_held_out(*arguments: Any) -> policies.HeldOutScore:
    score = SCORE(*arguments)
    return replace(score, reward_mean=os.getpid() % 1000 / 1000) if is_noisy("score") else score


DERIVE, CONSOLIDATE, SCORE = steps.seeds.derive_seed, moe.consolidate.consolidate, policies.score_held_out
steps.seeds.derive_seed = derive_seed
moe.consolidate.consolidate = consolidate
policies.score_held_out = score_held_out
