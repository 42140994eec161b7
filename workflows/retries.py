"""Which failures of a pod are worth another attempt: by class, on leaf templates only.

Retried: an interruption (exit 75, 143, or 137 that is no OOM), a service that is unavailable for now (69), a pod that
the platform took away (deleted, evicted, node shut down, preempted), a failure of Argo's own containers. Never: a
user's error (64, 65, 78), a bug (1), an OOM, a deadline; another attempt would end the same way.

The policy is Always because one and the same Spot reclaim ends a node as Failed or as Error, depending on what the
controller saw first. `limit` is set because Argo waits for a backoff only where there is one. There is no
`backoff.maxDuration`: it counts from the first attempt and would become the deadline of the later pods.
"""

from hera.workflows import RetryStrategy
from hera.workflows import models as m

RETRIED_EXIT_CODES = (69, 75, 137, 143)
FINAL_EXIT_CODES = (64, 65, 78)
"""A user's error: usage, data, configuration."""

# A message that starts with "main: " may go on with what the step wrote to its termination log, so it is only looked at
# as far as Argo's own words go. Anything else comes from the kubelet, the controller or Argo's other containers.
FINAL_PATTERN = "^[a-z]+: OOMKilled|^Pod was active on the node longer|^Step exceeded its deadline"
CONTAINER_PATTERN = "^(main|init|wait|supervisor): "
LOST_POD_PATTERN = (
    "pod deleted|node shutdown|low on resource|[Pp]reempt|[Ee]vict|Pod was rejected"
    "|neither main nor wait|did not complete|^Pod failed before|find failed message for pod"
)
# Argo's executor failed, but not because it may not report, nor because the step ended with 0 and left an output out.
EXECUTOR_PATTERN = "^(init|wait|supervisor): Error"
EXECUTOR_FINAL_PATTERN = "[Ff]orbidden|no such file"


def _matches(pattern: str) -> str:
    return f"lastRetry.message matches '{pattern}'"


STEP_EXPRESSION = (
    f"!({_matches(FINAL_PATTERN)}) && ("
    f"asInt(lastRetry.exitCode) in [{', '.join(map(str, RETRIED_EXIT_CODES))}] || "
    f"(!({_matches(CONTAINER_PATTERN)}) && {_matches(LOST_POD_PATTERN)}) || "
    f"({_matches(EXECUTOR_PATTERN)} && !({_matches(EXECUTOR_FINAL_PATTERN)})))"
)

# Every failure of a resource template exits with 64, so only the message tells a lost watcher from a failed child.
# A refusal by the API server, a webhook or a missing CRD stays one.
REFUSAL_PATTERN = "[Ff]orbidden|[Ii]s invalid|denied the request|no matches for kind|have a resource type"
ATTACH_EXPRESSION = f"!({_matches(f'failure condition|{REFUSAL_PATTERN}')})"


def step_retry(limit: int) -> RetryStrategy:
    """Retry a step's container at most `limit` times, waiting 5 s, 10 s, ... up to 2 min."""
    return RetryStrategy(
        limit=str(limit),
        retry_policy="Always",
        expression=STEP_EXPRESSION,
        backoff=m.Backoff(duration="5s", factor=m.IntOrString(root="2"), cap="2m"),
    )


def attach_retry(limit: int) -> RetryStrategy:
    """Re-attach to a child resource whose watcher was lost; `apply` with its fixed name finds it again."""
    return RetryStrategy(
        limit=str(limit),
        retry_policy="Always",
        expression=ATTACH_EXPRESSION,
        backoff=m.Backoff(duration="10s", factor=m.IntOrString(root="2"), cap="2m"),
    )
