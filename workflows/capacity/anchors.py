"""Published figures that the expected times rest on. None was measured by this project; each says where it is from."""

from dataclasses import dataclass

EXCHANGE_LATENCY_S = 100e-6
"""Residue of one dispatch or combine: 67 to 120 us at 16 to 64 ranks (pplx-garden on EFA)."""
NETWORK_SHARE = 0.88
"""Of a link's rate that exchanges reach: 44 of 50 GB/s a GPU on P5en."""
NVLINK_SHARE = 320 / 450
"""DeepEP v1 within a node of H200."""
PIPELINE_SHARE = 53 / 50
"""UCCL-EP on P5en, 16 to 32 ranks: time = tokens x nodes reached x row bytes / (53 GB/s)."""
DECODE_SHARE = 0.6
"""Of the memory's rate that a decoding engine reaches: assumed."""
PUBLISH_BYTES_PER_S = 2e9
"""Of one publisher pod to S3: assumed; `python -m benchmarks.publication` measures yours."""
FETCH_BYTES_PER_S = 5e9
"""Of one rollout node from S3: assumed."""
DELTA_SHARE = 0.05
"""Of a full publication's bytes: the project's own bound for an update that changes 3 % of the numbers."""


@dataclass(frozen=True, slots=True)
class Anchor:
    """A published figure."""

    figure: str
    source: str


MFU_SMALL = (0.31, Anchor("MFU 0.31 on 32 GPUs, 0.40 on 8 (Qwen3-30B-A3B)", "verl docs/perf/dpsk.md"))
MFU_LARGE = (0.19, Anchor("MFU 0.19 on 96 H20 (DeepSeek-V3)", "verl docs/perf/dpsk.md"))
LARGE_PARAMETERS = 1e11
LOW_LATENCY_S = {
    8: (191e-6, Anchor("dispatch 77 us + combine 114 us, 128 tokens, 8 ranks (H800)", "DeepEP README")),
    16: (519e-6, Anchor("dispatch 226 us + combine 293 us, 128 tokens, 16 ranks (P5en)", "UCCL-EP")),
    32: (1159e-6, Anchor("dispatch 465 us + combine 694 us, 128 tokens, 32 ranks (P5en)", "UCCL-EP")),
}
"""Ranks -> seconds of one layer's exchange while decoding."""
CROSS_CHECKS = (
    Anchor("Qwen3-30B-A3B: 1,102 tokens/s/GPU over the whole step, on-policy, 192 s a step on 32 H100", "NeMo-RL v0.6"),
    Anchor("Qwen3-235B-A22B: 58.9 tokens/s/GPU over the whole step on 128 H100", "NeMo-RL v0.6"),
    Anchor("weights of 30B in 32.2 s whole, in 7.1 s as a delta; 235B 256 s and 11 to 15 s (H100)", "verl delta sync"),
    Anchor(
        "NCCL's all-to-all is no weak baseline: Qwen3-235B at EP32 15.8 s a step, UCCL-EP 19.2 s, DeepEP v1 21.1 s",
        "awslabs/awsome-distributed-ai",
    ),
)
