import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe.dispatch.expert_major import local_routes, rows_by_expert, weighted_sum

torch.set_num_threads(1)
EXPERTS, TOP_K, HIDDEN = 3, 2, 4


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.integers(0, 2**31), st.sampled_from([0.0, 0.5, 1.0]))
def test_rows_and_their_weighted_sum_equal_the_dense_form_with_gradients(
    tokens: int, seed: int, elsewhere: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ids_NK = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, -1).indices
    ids_NK = ids_NK.masked_fill(torch.rand(tokens, TOP_K, generator=generator) < elsewhere, -1)
    received_NH = torch.randn(tokens, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
    weights_NK = torch.rand(tokens, TOP_K, dtype=torch.float64, generator=generator).requires_grad_()
    scale_E = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    counts = torch.bincount(ids_NK[ids_NK >= 0], minlength=EXPERTS)

    routes = local_routes(ids_NK, counts.tolist())
    assert torch.equal(routes.ends_E, counts.cumsum(0).int())
    rows_SH = rows_by_expert(received_NH, routes) * scale_E.repeat_interleave(counts).unsqueeze(1)
    ours_NH = weighted_sum(rows_SH, weights_NK, routes)
    gate_NE = (torch.nn.functional.one_hot(ids_NK + 1, EXPERTS + 1)[..., 1:] * weights_NK.unsqueeze(-1)).sum(1)
    dense_NH = received_NH * (gate_NE @ scale_E).unsqueeze(1)

    torch.testing.assert_close(ours_NH, dense_NH, rtol=0, atol=1e-12)
    grads = [torch.autograd.grad(form.square().sum(), (received_NH, weights_NK)) for form in (ours_NH, dense_NH)]
    for mine, reference in zip(*grads, strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_what_is_not_routed_here_cannot_spoil_a_sum() -> None:
    routes = local_routes(torch.tensor([[-1, 0], [-1, -1]]), [1])
    rows_SH = torch.full((1, HIDDEN), float("inf"))
    total_NH = weighted_sum(rows_SH, torch.ones(2, 2), routes)
    assert total_NH[0].isinf().all() and torch.equal(total_NH[1], torch.zeros(HIDDEN))


def test_bfloat16_rows_are_summed_in_float32() -> None:
    routes = local_routes(torch.tensor([[0, 1, 2]]), [1, 1, 1])
    rows_SH = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert weighted_sum(rows_SH, torch.ones(1, 3), routes).item() == 258.0  # bfloat16 has no 257: 256 + 1 is 256 there
