"""MaxMin's own backward pass: the slopes that autograd finds by itself, under every transform."""

import torch

from certcli.nn.layers import MaxMin


def test_the_backward_pass_of_maxmin_is_that_of_its_formula() -> None:
    torch.manual_seed(0)
    act = MaxMin()
    x = torch.randn(3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(act, x)
    assert torch.autograd.gradgradcheck(act, x)
    with torch.no_grad():
        plain = act(x)
    assert torch.equal(act(x), plain)
    columns = torch.func.vmap(torch.func.jacrev(act))(x.detach())
    ties = torch.func.jacrev(act)(torch.ones(8, dtype=torch.float64))
    for jacobian in (*columns, ties):  # a permutation, also where two entries are equal
        assert torch.equal(jacobian @ jacobian.mT, torch.eye(8, dtype=torch.float64))
