"""Ops that write into an argument leave alone what shares memory with it until one of the two is written."""

import pytest
import torch

from flash_attn._ops import rotary, xentropy
from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
from flash_attn.ops.triton.layer_norm import layer_norm_fn
from flash_attn.ops.triton.rotary import apply_rotary

ROWS = torch.randn(4, 6, 3, 64)
TABLE = torch.rand(6, 16)


def rotated_in_place(x, device):
    table = TABLE.to(device)
    rotary.rotary_(x, table, table, None, 0, None, False, False)


def rotated_into(x, device):
    table = TABLE.to(device)
    rotary.rotary_into(torch.ones_like(x), x, table, table, None, 0, None, False, False)


def normalised_into(x, device):
    layer_norm_fn(torch.rand_like(x), torch.ones(64, device=device), None, prenorm=True, out=x)


def summed_into(x, device):
    layer_norm_fn(torch.rand_like(x), torch.ones(64, device=device), None, residual=ROWS.to(device), residual_out=x)


def differentiated_in_place(x, device):
    logits = x.view(-1, 64)
    labels, ones = torch.arange(len(logits), device=device) % 64, torch.ones(len(logits), device=device)
    xentropy.bwd_(ones, logits, labels, logits.double().logsumexp(1), 0.0, 1.0, 0.0, -100, 0, 64)


def differentiated_in_forward(x, device):
    logits = x.view(-1, 64)
    labels, ones = torch.arange(len(logits), device=device) % 64, torch.ones(len(logits), device=device)
    xentropy.fwd_bwd_(ones, logits, labels, 0.0, 1.0, 0.0, -100, 0, 64)


def scaled(x, device):
    ones = torch.ones(x.numel() // 64, device=device)
    xentropy.scale_(x.view(-1, 64), 3 * ones, ones, ones > 0)


WRITERS = [
    rotated_in_place,
    rotated_into,
    normalised_into,
    summed_into,
    differentiated_in_place,
    differentiated_in_forward,
    scaled,
    lambda x, device: apply_rotary(x, TABLE.to(device), TABLE.to(device), inplace=True),
    lambda x, device: apply_rotary_emb(x, TABLE.to(device), TABLE.to(device), inplace=True),
    lambda x, device: apply_rotary_emb_qkv_(x, TABLE.to(device), TABLE.to(device), num_heads_q=1),
]


@pytest.mark.parametrize("clones", [1, 2])
@pytest.mark.parametrize("write", WRITERS)
def test_what_is_written_is_the_clone_alone(write, clones, device):
    base = ROWS.to(device).clone()
    before, plain = base.clone(), base.clone()
    lazy = [torch._lazy_clone(base) for _ in range(clones)]
    torch.manual_seed(0)
    write(lazy[0], device)
    torch.manual_seed(0)
    write(plain, device)
    assert torch.equal(lazy[0], plain)
    assert not torch.equal(plain, before)
    for other in (base, *lazy[1:]):
        assert torch.equal(other, before)


def test_gradient_in_the_place_of_a_lazily_cloned_leaf(device):
    base = torch.randn(5, 64, device=device)
    before, labels = base.clone(), torch.arange(5, device=device)
    leaf = torch._lazy_clone(base).requires_grad_()
    losses, _ = cross_entropy_loss(leaf, labels, inplace_backward=True)
    (dlogits,) = torch.autograd.grad(losses.sum(), leaf)
    assert torch.equal(base, before) and not torch.equal(dlogits, before)
