"""The experts of a sample's tokens, from the sampler to the batch: inline when small, else in the store."""

import hashlib
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from steps import paths
from steps.adapters.store import AlreadyExists, Store, require_sha256
from steps.records import Sample, SampleRouting, ScoredSample

INLINE_BYTES = 64 * 1024
"""Larger expert ids are spilled to the store: rows of the database stay small."""


def from_expert_ids(ids_TLK: Tensor) -> SampleRouting:
    """Inline, from int16 (prompt and response tokens, layers, experts a token) on the CPU."""
    _, num_layers, top_k = ids_TLK.shape
    return SampleRouting(num_layers=num_layers, top_k=top_k, ids=ids_TLK.numpy().astype("<i2").tobytes())


def to_expert_ids(routing: SampleRouting) -> Tensor:
    """The inverse of `from_expert_ids`; the ids must be inline (`fetch`)."""
    ids = np.frombuffer(routing.ids, dtype="<i2").astype(np.int16)
    return torch.from_numpy(ids.reshape(-1, routing.num_layers, routing.top_k))


def spill(store: Store, run_id: str, sample: Sample) -> Sample:
    """Write large expert ids to the store, before the sample's row; equal ids are one object, written once."""
    routing = sample.routing
    if routing is None or len(routing.ids) <= INLINE_BYTES:
        return sample
    key = paths.routing_key(run_id, hashlib.sha256(routing.ids).hexdigest())
    try:
        store.put_bytes(key, routing.ids, if_none_match=True)
    except AlreadyExists:
        pass  # its name is its content
    return replace(sample, routing=replace(routing, ids=b"", uri=store.uri_of(key)))


def fetch(store: Store, run_id: str, scored: ScoredSample) -> ScoredSample:
    """The sample with its expert ids inline; NotFound or DataError when the object is gone or its content differs."""
    routing = scored.sample.routing
    if routing is None or not routing.uri:
        return scored
    sha256 = routing.uri.rpartition("/")[2].removesuffix(".bin")
    ids = store.get_bytes(paths.routing_key(run_id, sha256))
    require_sha256(routing.uri, sha256, hashlib.sha256(ids).hexdigest())
    return replace(scored, sample=replace(scored.sample, routing=replace(routing, ids=ids, uri="")))
