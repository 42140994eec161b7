"""What travels between steps: small immutable records. Shapes are in the names (T response tokens).

A sample is identified by (run, iteration, prompt_uid, sample_index) and by nothing else: never by pod, attempt or
workflow name.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

UnitKind = Literal["rollout", "reward"]
RewardStatus = Literal["ok", "timeout", "error"]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One task item. `uid` is stable across runs: it hashes the text, the answer and the meta data."""

    uid: str
    text: str
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnit:
    """A bounded list of prompts for one lease; a rollout unit is always decoded as the same batch."""

    run_id: str
    iteration: int
    kind: UnitKind
    unit: int
    prompt_uids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to work on a unit until it expires by the database's clock; `token` fences a late owner."""

    unit: WorkUnit
    token: str
    attempt: int
    """1 for the first lease of the unit, 2 after one was lost, ..."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRouting:
    """Experts that a sample's tokens were sent to while sampling."""

    num_layers: int
    """Layers with experts."""
    top_k: int
    """Experts a token."""
    ids: bytes
    """Little-endian int16, row-major (prompt and response tokens, layers, top_k); a row of -1 is unknown. Empty when
    they lie at `uri`."""
    uri: str = ""
    """Object of the store that holds them, named by their SHA-256; empty when they are in `ids`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One response: T tokens including the stop token when there is one."""

    prompt_uid: str
    sample_index: int
    seed: int
    prompt_ids: tuple[int, ...]
    response_ids_T: tuple[int, ...]
    response_text: str
    logprobs_T: tuple[float, ...]
    """float32 log-probabilities of the sampled tokens under the sampling distribution."""
    versions_T: tuple[int, ...]
    """Policy version that produced each token."""
    finish_reason: FinishReason
    temperature: float
    top_p: float
    routing: SampleRouting | None = None
    """None unless the run replays the sampler's routing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reward:
    """A score, or the reason why there is none: a failure is never a 0.0."""

    prompt_uid: str
    sample_index: int
    status: RewardStatus
    value: float | None
    detail: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredSample:
    """A sample with its reward, as flush reads it."""

    sample: Sample
    reward: Reward


@dataclass(frozen=True, kw_only=True, slots=True)
class Publication:
    """An immutable policy that others can load."""

    run_id: str
    policy_version: int
    parent_version: int | None
    uri: str
    manifest_sha256: str
    weights_sha256: str
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Held-out greedy score of one policy version, and the gate's verdict."""

    run_id: str
    policy_version: int
    reward_eval: float
    num_prompts: int
    validated: bool
    reason: str
