"""Where the rows of one pass go and how their results come back: pure index arithmetic, and one exchange of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe.dispatch.exchange import Peers, sum_rows, take_rows
from moe.dispatch.monitor import LayerExchange


@dataclass(frozen=True)
class UnitPlan:
    """The rows that cross between ranks. A *unit* is a token on its way to one peer; the *table* holds the tokens that
    a rank can compute with: its own T, then the units that it received, in the order of peers."""

    peers: Peers
    num_tokens: int
    token_U: Tensor
    """Token of each sent unit, in the order of peers."""
    by_token_U: Tensor
    """Sent units, sorted by token; those of token t begin at `ends_T[t]`."""
    ends_T: Tensor
    send: Sequence[int]
    receive: Sequence[int]

    @staticmethod
    def of(peers: Peers, num_tokens: int, token_U: Tensor, send: Sequence[int], receive: Sequence[int]) -> "UnitPlan":
        sorted_U, by_token_U = torch.sort(token_U, stable=True)
        return UnitPlan(peers, num_tokens, token_U, by_token_U, _ends(sorted_U, num_tokens), send, receive)

    @property
    def table_rows(self) -> int:
        return self.num_tokens + sum(self.receive)

    def spread(self, hidden_TH: Tensor, table_RH: Tensor, record: LayerExchange) -> Tensor:
        """Fill the table, (table_rows, hidden), and return it."""
        peers = self.peers
        table_RH[: self.num_tokens].copy_(hidden_TH)
        arrivals_UH = table_RH[self.num_tokens :]
        wire_TH = hidden_TH.to(peers.wire_dtype or hidden_TH.dtype).contiguous()
        sent_UH = peers.staging.rows("sent", len(self.token_U), wire_TH)
        torch.index_select(wire_TH, 0, self.token_U, out=sent_UH)
        if wire_TH.dtype == table_RH.dtype:
            peers.swap(arrivals_UH, sent_UH, self.receive, self.send, record)
        else:
            wire_UH = peers.staging.rows("received", len(arrivals_UH), wire_TH)
            peers.swap(wire_UH, sent_UH, self.receive, self.send, record)
            arrivals_UH.copy_(wire_UH)
        return table_RH

    def collect(self, results_UH: Tensor, total_TH: Tensor, record: LayerExchange) -> Tensor:
        """The transpose of `spread`, the table's own tokens left out: results of the received units go back to where
        they came from and are added to `total_TH`, (T, hidden), which is returned."""
        wire_UH = results_UH.to(self.peers.wire_dtype or results_UH.dtype)
        back_UH = self.peers.staging.rows("received", len(self.token_U), wire_UH)
        self.peers.swap(back_UH, wire_UH, self.send, self.receive, record)
        return sum_rows(total_TH, back_UH.to(results_UH.dtype), self.by_token_U, self.ends_T, add=True)


@dataclass(frozen=True)
class RoutePlan:
    """The routes computed on this rank, S of them, grouped by local expert; each reads a row of the units' table."""

    units: UnitPlan
    merged: bool
    """Whether a unit may have several routes."""
    layer: int
    top_k: int
    ends_E: Tensor
    source_S: Tensor
    """Row of the table that each route reads."""
    weights_S: Tensor
    own_at_R: Tensor
    """Place among S of the routes of this rank's own tokens, by token; those of token t begin at `own_ends_T[t]`."""
    own_ends_T: Tensor
    arrived_at_R: Tensor
    """Place among S of the routes that arrived, by unit; those of unit u begin at `arrived_ends_U[u]`."""
    arrived_ends_U: Tensor
    own_route_R: Tensor
    """Place among the T * K routes of the ones that stay, in the order of `own_at_R`."""
    sent_route_R: Tensor
    """Place among the T * K routes of the ones that are sent, in the order of peers."""
    send: Sequence[int]
    """Routes to each peer, as `receive` from each."""
    receive: Sequence[int]

    def add_up(self, rows_SH: Tensor, weights_S: Tensor | None, record: LayerExchange) -> Tensor:
        """The transpose of reading the table: each token's rows, times their weights, summed: (T, hidden)."""
        staging = self.units.peers.staging
        own_weights_R = None if weights_S is None else weights_S[self.own_at_R]
        total_TH = staging.result("tokens", self.units.num_tokens, rows_SH)
        sum_rows(total_TH, rows_SH, self.own_at_R, self.own_ends_T, own_weights_R)
        weights_R = None if weights_S is None else weights_S[self.arrived_at_R].to(rows_SH.dtype)
        results_UH = staging.rows("sent", sum(self.units.receive), rows_SH)
        if self.merged:
            sum_rows(results_UH, rows_SH, self.arrived_at_R, self.arrived_ends_U, weights_R)
        else:
            take_rows(results_UH, rows_SH, self.arrived_at_R, weights_R)
        return self.units.collect(results_UH, total_TH, record)

    def return_weights(self, grads_S: Tensor, record: LayerExchange) -> Tensor:
        """Gradients of the routes' weights, back where the weights came from: (T, top_k), zero where masked."""
        back_R = grads_S.new_empty(len(self.sent_route_R))
        self.units.peers.swap(back_R, grads_S[self.arrived_at_R], self.send, self.receive, record)
        grads_TK = grads_S.new_zeros(self.units.num_tokens * self.top_k)
        grads_TK[self.own_route_R] = grads_S[self.own_at_R]
        grads_TK[self.sent_route_R] = back_R
        return grads_TK.view(-1, self.top_k)


def plan_routes(
    peers: Peers,
    ids_TK: Tensor,
    weights_TK: Tensor,
    num_experts: int,
    *,
    merge: bool,
    layer: int,
    record: LayerExchange,
) -> RoutePlan:
    """Agree with the peers on the rows of this pass; peer p owns the p-th block of the `num_experts` experts.

    With `merge` a token crosses once to each peer, else once for each of its routes. Two exchanges: the counts, then
    for each route 4 bytes and its weight.
    """
    top_k, num_local = ids_TK.shape[1], num_experts // peers.size
    flat_R = ids_TK.reshape(-1)
    own, sent = _by_peer(peers, flat_R, top_k, num_local, merge)
    counts_PC = torch.stack([sent.units_P, sent.routes_P], 1)
    received_PC = peers.swap_counts(counts_PC, record)
    (units, routes), (received_units, received_routes) = counts_PC.T.tolist(), received_PC.T.tolist()
    local_R = flat_R % num_local
    weights_R = weights_TK.detach().reshape(-1)
    arrived_R, opens_unit_R, arrived_weights_R = _swap_routes(
        peers, local_R[sent.route_R], sent.opens_unit_R, weights_R[sent.route_R], (received_routes, routes), record
    )
    unit_R = opens_unit_R.cumsum(0) - 1
    own_token_R = torch.div(own, top_k, rounding_mode="floor")
    experts_S, order_S = torch.sort(torch.cat([local_R[own], arrived_R]), stable=True)
    at_S = torch.empty_like(order_S)
    at_S[order_S] = torch.arange(len(order_S), device=order_S.device)
    sent_token_U = torch.div(sent.route_R[sent.opens_unit_R], top_k, rounding_mode="floor")
    return RoutePlan(
        units=UnitPlan.of(peers, len(ids_TK), sent_token_U, units, received_units),
        merged=merge,
        layer=layer,
        top_k=top_k,
        ends_E=_ends(experts_S, num_local)[1:].int(),
        source_S=torch.cat([own_token_R, unit_R + len(ids_TK)])[order_S],
        weights_S=torch.cat([weights_R[own], arrived_weights_R])[order_S],
        own_at_R=at_S[: len(own)],
        own_ends_T=_ends(own_token_R, len(ids_TK)),
        arrived_at_R=at_S[len(own) :],
        arrived_ends_U=_ends(unit_R, sum(received_units)),
        own_route_R=own,
        sent_route_R=sent.route_R,
        send=routes,
        receive=received_routes,
    )


@dataclass(frozen=True)
class _Sent:
    """Routes to other ranks, sorted by peer and token."""

    route_R: Tensor
    opens_unit_R: Tensor
    """Whether the route is the first of its unit."""
    units_P: Tensor
    routes_P: Tensor


def _by_peer(peers: Peers, flat_R: Tensor, top_k: int, num_local: int, merge: bool) -> tuple[Tensor, _Sent]:
    """Places among the T * K routes of the routes that stay, by token, and the routes that are sent."""
    peer_R = torch.div(flat_R, num_local, rounding_mode="floor")
    own_R = (peer_R == peers.rank).nonzero().squeeze(1)
    # Masked routes and the rank's own ones sort behind the last peer, and are cut off.
    away_R = torch.where((flat_R < 0) | (peer_R == peers.rank), peers.size, peer_R)
    away_R, route_R = torch.sort(away_R, stable=True)
    routes_P = torch.bincount(away_R, minlength=peers.size + 1)[: peers.size]
    num_sent = int(routes_P.sum())
    away_R, route_R = away_R[:num_sent], route_R[:num_sent]
    opens_unit_R = torch.ones_like(away_R, dtype=torch.bool)
    if merge:
        token_R = torch.div(route_R, top_k, rounding_mode="floor")
        opens_unit_R[1:] = (away_R[1:] != away_R[:-1]) | (token_R[1:] != token_R[:-1])
    units_P = torch.bincount(away_R[opens_unit_R], minlength=peers.size)
    return own_R, _Sent(route_R, opens_unit_R, units_P, routes_P)


def _swap_routes(
    peers: Peers,
    local_R: Tensor,
    opens_unit_R: Tensor,
    weights_R: Tensor,
    counts: tuple[Sequence[int], Sequence[int]],
    record: LayerExchange,
) -> tuple[Tensor, Tensor, Tensor]:
    """The routes that arrive: local expert, whether it opens a unit, weight; packed into one exchange of bytes."""
    code_R = (local_R * 2 + opens_unit_R).int()
    sent_RB = torch.cat([x.unsqueeze(1).view(torch.uint8) for x in (code_R, weights_R)], 1)
    received_RB = sent_RB.new_empty(sum(counts[0]), sent_RB.shape[1])
    peers.swap(received_RB, sent_RB, *counts, record)
    code_RB, weights_RB = received_RB[:, : code_R.itemsize], received_RB[:, code_R.itemsize :]
    code_R = code_RB.clone(memory_format=torch.contiguous_format).view(torch.int32).squeeze(1).long()
    weights_R = weights_RB.clone(memory_format=torch.contiguous_format).view(weights_R.dtype).squeeze(1)
    return torch.div(code_R, 2, rounding_mode="floor"), (code_R % 2).bool(), weights_R


def _ends(sorted_R: Tensor, count: int) -> Tensor:
    """(count + 1,): where the values 0, 1, ... begin in an ascending tensor of values below `count`, and its end."""
    return torch.searchsorted(sorted_R, torch.arange(count + 1, device=sorted_R.device))
