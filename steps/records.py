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
    """One task item. `uid` is stable across runs: it hashes the text or messages, the answer and the meta data."""

    uid: str
    text: str
    """Of several messages a transcript, `role: content` each, with empty lines between."""
    answer: str
    meta: dict[str, Any] = field(default_factory=dict)
    messages: tuple[dict[str, str], ...] = ()
    """Turns of `role` and `content`; empty when the prompt is one text, the user's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkUnit:
    """A bounded list of prompts for one lease; a rollout unit is always decoded as the same batch."""

    run_id: str
    iteration: int
    kind: UnitKind
    unit: int
    prompt_uids: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Worker:
    """Who leases units: a process in the place of worker `number` of an iteration."""

    number: int
    pod: str
    step_attempt_id: int
    """The process's entry in the ledger: of two in one place the one with the higher number is the successor."""

    @property
    def name(self) -> str:
        return f"{self.pod}/{self.number}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Lease:
    """The right to work on a unit until it expires by the database's clock; `token` fences a late owner."""

    unit: WorkUnit
    token: str
    attempt: int
    """1 for the first lease of the unit, 2 after one was lost, ..."""
    worker: Worker
    is_backup: bool = False
    """Beside the lease of another worker, which takes long: the first commit of a group wins."""


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
    """One response: T tokens including the stop token when there is one.

    In a conversation of several turns the T tokens are everything after the prompt, also what a tool or an environment
    said in between.
    """

    prompt_uid: str
    sample_index: int
    seed: int
    prompt_ids: tuple[int, ...]
    response_ids_T: tuple[int, ...]
    response_text: str
    logprobs_T: tuple[float, ...]
    """float32 log-probabilities of the sampled tokens under the sampling distribution; 0 of others."""
    versions_T: tuple[int, ...]
    """Policy version that produced each token, of others the one that answered them."""
    finish_reason: FinishReason
    temperature: float
    top_p: float
    routing: SampleRouting | None = None
    """None unless the run replays the sampler's routing."""
    mask_T: tuple[bool, ...] | None = None
    """Whether the policy sampled each token; None: it sampled all."""


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
