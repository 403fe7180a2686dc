"""`RotaryEmbedding`: what it computes, when it makes its tables, where they go."""

import copy
import pickle

import numpy
import pytest
import torch
from compare import identical
from overwriting import Overwriting

from flash_attn import _torch_private
from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb, apply_rotary_emb_qkv_
from flash_attn.ops.triton.rotary import apply_rotary


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("offset", [0, 11])
def test_module(offset, interleaved, device):
    qkv = torch.randn(2, 21, 3, 4, 64, device=device)
    q, k, v = qkv.clone().unbind(2)
    module = RotaryEmbedding(32, interleaved=interleaved, device=device)
    assert not module.state_dict()
    assert not list(module.parameters())
    out = module(qkv, seqlen_offset=offset)
    assert module._cos_cached.shape == (21 + offset, 16)
    position = torch.arange(21 + offset, dtype=torch.float64)
    angles = torch.outer(position, 10000 ** -(torch.arange(0, 32, 2, dtype=torch.float64) / 32)).to(device)
    torch.testing.assert_close(module._cos_cached.double(), angles.cos(), rtol=0, atol=1e-5)
    torch.testing.assert_close(module._sin_cached.double(), angles.sin(), rtol=0, atol=1e-5)
    tables = module._cos_cached, module._sin_cached
    assert identical(out[:, :, 0], apply_rotary(q, *tables, offset, interleaved=interleaved))
    assert identical(out[:, :, 1], apply_rotary(k, *tables, offset, interleaved=interleaved))
    assert identical(out[:, :, 2], v)


@pytest.mark.parametrize("scale_base", [None, 512])
@pytest.mark.parametrize("shape", [(12, 3, 4, 32), (12, 8, 32)])
def test_module_with_packed_sequences(shape, scale_base, device):
    qkv, grad = torch.randn(2, *shape, device=device)
    num_heads_q = 4 if len(shape) == 3 else None
    cu_seqlens = torch.tensor([0, 5, 5, 12], dtype=torch.int32, device=device)
    module = RotaryEmbedding(32, scale_base=scale_base, device=device)

    def rotated(x, *, grad, **options):
        leaf = x.clone().requires_grad_()
        out = module(leaf * 1, max_seqlen=9, num_heads_q=num_heads_q, **options)
        return out.detach(), *torch.autograd.grad(out, leaf, grad)

    found = rotated(qkv, cu_seqlens=cu_seqlens, grad=grad)
    parts = [rotated(qkv[None, rows], grad=grad[None, rows]) for rows in (slice(5), slice(5, 12))]
    for one, others in zip(found, zip(*parts)):
        assert identical(one, torch.cat(others, dim=1)[0])


def test_module_with_keys_and_values_apart(device):
    q, kv = torch.randn(2, 5, 4, 32, device=device), torch.randn(2, 5, 2, 2, 32, device=device)
    module = RotaryEmbedding(32, device=device)
    packed = module(torch.cat([q, *kv.unbind(2)], dim=2), num_heads_q=4)
    q_out, kv_out = module(q, kv)
    assert identical(torch.cat([q_out, *kv_out.unbind(2)], dim=2), packed)


def test_module_with_more_keys_than_queries(device):
    q, kv = torch.randn(2, 3, 4, 32, device=device), torch.randn(2, 5, 2, 2, 32, device=device)
    k = kv[:, :, 0].clone()
    module = RotaryEmbedding(32, device=device)
    module(q, kv, seqlen_offset=2)
    assert identical(kv[:, :, 0], apply_rotary(k, module._cos_cached, module._sin_cached, 2))


def test_module_reads_max_seqlen_at_each_call(device):
    """Though it is the same tensor, the tables grow with its value."""
    x, max_seqlen = torch.randn(8, 3, 2, 32, device=device), torch.tensor(4, device=device)
    module = RotaryEmbedding(32, device=device)
    module(x.clone(), cu_seqlens=torch.tensor([0, 4, 8], dtype=torch.int32, device=device), max_seqlen=max_seqlen)
    max_seqlen.fill_(8)
    whole = torch.tensor([0, 8], dtype=torch.int32, device=device)
    found = module(x.clone(), cu_seqlens=whole, max_seqlen=max_seqlen)
    assert identical(found, RotaryEmbedding(32, device=device)(x[None].clone())[0])


def test_module_with_offsets_in_a_tensor(device):
    qkv = torch.randn(2, 5, 3, 2, 32, device=device)
    module = RotaryEmbedding(32, device=device)
    offsets = torch.tensor([3, 0], device=device)
    with pytest.raises(ValueError, match="max_seqlen"):
        module(qkv, seqlen_offset=offsets)
    expected = [module(qkv[n : n + 1].clone(), seqlen_offset=n_offset) for n, n_offset in enumerate((3, 0))]
    table = module._cos_cached
    assert identical(module(qkv.clone(), seqlen_offset=offsets), torch.cat(expected))
    assert module._cos_cached is table
    module(qkv, seqlen_offset=offsets, max_seqlen=40)
    assert len(module._cos_cached) == 40


def test_module_scales_like_xpos(device):
    """Products of queries and keys keep to relative positions, and the scale cancels at distance 0."""
    module = RotaryEmbedding(32, scale_base=8, device=device)
    qkv = torch.randn(1, 1, 3, 1, 32, device=device).expand(1, 24, 3, 1, 32).clone()
    q, k, _ = module(qkv.clone()).unbind(2)
    products = torch.einsum("bihd,bjhd->ij", q.double(), k.double())
    for distance in range(-23, 24):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-3)
    plain = (qkv[0, 0, 0] * qkv[0, 0, 1]).sum().double()
    torch.testing.assert_close(products[0, 0], plain, rtol=1e-4, atol=1e-4)
    zeta = (torch.arange(0, 32, 2, dtype=torch.float64) + 0.4 * 32) / (1.4 * 32)
    gain = zeta ** ((torch.arange(24, dtype=torch.float64) - 12) / 8)[:, None]
    angles = torch.outer(torch.arange(24, dtype=torch.float64), 10000 ** -(torch.arange(0, 32, 2).double() / 32))
    torch.testing.assert_close(module._cos_cached.cpu().double(), angles.cos() * gain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(module._sin_k_cached.cpu().double(), angles.sin() / gain, rtol=1e-4, atol=1e-5)


def test_module_rebuilds_tables_only_when_needed(device):
    module = RotaryEmbedding(16, device=device)

    def table(seqlen, dtype=torch.float32):
        module._update_cos_sin_cache(seqlen, device=device, dtype=dtype)
        return module._cos_cached

    first = table(10)
    assert table(10) is first
    assert table(4) is first
    assert len(table(11)) == 11
    assert table(5, torch.float16).dtype == torch.float16
    assert len(table(5, torch.float16)) == 5
    with torch.inference_mode():
        inferred = table(30)
        assert table(30) is inferred
    assert table(30) is not inferred


@pytest.mark.parametrize("training", [False, True])
def test_gradient_behind_inference_mode(training, device):
    module, qkv = RotaryEmbedding(16, device=device).train(training), torch.randn(1, 5, 3, 2, 16, device=device)
    with torch.inference_mode():
        expected = module(qkv.clone())
    leaf = qkv.clone().requires_grad_()
    out = module(leaf * 1)
    assert identical(out, expected)
    torch.testing.assert_close(torch.autograd.grad(out, leaf, out.detach())[0], qkv)


def test_module_cast_to_half_keeps_exact_angles(device):
    module, cast = RotaryEmbedding(32, scale_base=8, device=device), RotaryEmbedding(32, scale_base=8, device=device)
    cast.half()
    for each in (module, cast):
        each._update_cos_sin_cache(500, device=device, dtype=torch.float32)
    assert identical(cast._cos_cached, module._cos_cached)
    assert identical(cast._sin_k_cached, module._sin_k_cached)


@pytest.mark.parametrize("scale_base", [None, 8])
def test_module_materialised_from_meta(scale_base, device):
    module = RotaryEmbedding(32, scale_base=scale_base, device="meta").to_empty(device=device)
    expected = RotaryEmbedding(32, scale_base=scale_base, device=device)
    qkv = torch.randn(2, 5, 3, 2, 32, device=device)
    assert identical(module(qkv.clone()), expected(qkv.clone()))


class Scaled(RotaryEmbedding):
    """Frequencies of its own, as models with longer contexts have them."""

    def _compute_inv_freq(self, device=None):
        return super()._compute_inv_freq(device) / 4


def rotated_by(inv_freq, qkv):
    """qkv rotated by these frequencies."""
    angles = torch.outer(torch.arange(qkv.shape[1], device=qkv.device).float(), inv_freq.to(qkv.device))
    return apply_rotary_emb_qkv_(qkv.clone(), angles.cos(), angles.sin())


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("change", ["replaced", "in place", "registered"])
def test_module_with_other_frequencies(change, used, device):
    module, qkv = RotaryEmbedding(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    if used:
        module(qkv.clone())
    slower = module.inv_freq / 4
    if change == "replaced":
        module.inv_freq = slower
    elif change == "in place":
        module.inv_freq.div_(4)
    else:
        module.register_buffer("inv_freq", slower, persistent=False)
    assert identical(module(qkv.clone()), rotated_by(slower, qkv))
    assert identical(copy.deepcopy(module)(qkv.clone()), rotated_by(slower, qkv))
    assert identical(module.half()(qkv.clone()), rotated_by(slower, qkv))  # though a cast would round them


@pytest.mark.parametrize("offset", [3.0, numpy.int64(3), torch.tensor(3), torch.tensor(3, dtype=torch.int32)], ids=repr)
def test_one_offset_may_be_any_whole_number(offset, device):
    module, qkv = RotaryEmbedding(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    offset = offset.to(device) if isinstance(offset, torch.Tensor) else offset
    expected = module(qkv.clone(), seqlen_offset=3, max_seqlen=9)
    assert identical(module(qkv.clone(), seqlen_offset=offset, max_seqlen=9.0), expected)
    tables, x = (module._cos_cached, module._sin_cached), qkv[:, :, 0]
    expected = apply_rotary_emb(x, *tables, seqlen_offsets=3)
    assert identical(apply_rotary_emb(x, *tables, seqlen_offsets=offset), expected)


@pytest.mark.parametrize("change", ["values", "dtype of the input"])
def test_tables_follow_their_source_with_offsets_in_a_tensor(change, device):
    module, qkv = RotaryEmbedding(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    module(qkv.clone())
    if change == "values":
        module.inv_freq = module.inv_freq / 4
    else:
        qkv = qkv.bfloat16()
    found = module(qkv.clone(), seqlen_offset=torch.zeros(2, dtype=torch.int32, device=device))
    angles = torch.outer(torch.arange(5.0, device=device), module.inv_freq)
    cos, sin = angles.cos().to(qkv.dtype), angles.sin().to(qkv.dtype)
    assert identical(found, apply_rotary_emb_qkv_(qkv.clone(), cos, sin))


def test_frequencies_in_float64(device):
    module, qkv = RotaryEmbedding(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    module.inv_freq = module.inv_freq.double() / 4
    assert identical(module(qkv.clone()), rotated_by(module.inv_freq.float(), qkv))


def test_tables_of_float64(device):
    """Angles far from 0 have the digits of float64; the tables follow the dtype of the input."""
    module, qkv = RotaryEmbedding(8, device=device).double(), torch.randn(1, 3000, 3, 1, 8, device=device)
    found = module(qkv.double())
    angles = torch.outer(torch.arange(3000, device=device, dtype=torch.float64), module.inv_freq.double())
    right = apply_rotary_emb_qkv_(qkv.double(), angles.cos(), angles.sin())
    torch.testing.assert_close(found, right, rtol=0, atol=1e-12)
    assert module.inv_freq.dtype == torch.float32
    torch.testing.assert_close(module(qkv.clone()).double(), right, rtol=0, atol=2e-3)


def test_module_with_another_scale(device):
    module, qkv = RotaryEmbedding(32, scale_base=8, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    before = module(qkv.clone())
    module.scale.fill_(1)
    plain = RotaryEmbedding(32, device=device)(qkv.clone())
    assert identical(module(qkv.clone()), plain) and not identical(before, plain)


@pytest.mark.parametrize("source", ["constructed", "from meta", "from meta, with what memory holds", "cast by data"])
def test_module_that_computes_its_own_frequencies(source, device):
    qkv = torch.randn(2, 5, 3, 2, 32, device=device)
    expected = rotated_by(RotaryEmbedding(32, device=device).inv_freq / 4, qkv)
    module = Scaled(32, device="meta" if "meta" in source else device)
    if source == "from meta":
        module.to_empty(device=device)
    elif "meta" in source:  # as some loaders of checkpoints do for buffers that have no values there
        module.inv_freq = torch.full((16,), float("nan"), device=device)
    elif source == "cast by data":  # as FSDP does
        module.inv_freq.data = module.inv_freq.bfloat16()
    assert identical(module(qkv.clone()), expected)
    assert identical(module(qkv.clone()), expected)


@pytest.mark.parametrize("layer", [Scaled, RotaryEmbedding])
def test_compiled_module_with_other_frequencies(layer, device, compile_whole):
    module, qkv = layer(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    compiled = compile_whole(module, backend="aot_eager")
    assert identical(compiled(qkv.clone()), rotated_by(module.inv_freq, qkv))
    module.inv_freq.div_(2)
    assert identical(compiled(qkv.clone()), rotated_by(module.inv_freq, qkv))


def test_compiled_module_that_computes_its_own_tables(device, compile_whole):
    class Still(RotaryEmbedding):
        def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
            self._cos_cached = torch.ones(seqlen, 16, device=device, dtype=dtype)
            self._sin_cached = torch.zeros(seqlen, 16, device=device, dtype=dtype)

    module, qkv = Still(32, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    assert identical(module(qkv.clone()), qkv)
    assert identical(compile_whole(module, backend="aot_eager")(qkv.clone()), qkv)


class Counted(RotaryEmbedding):
    """Makes its tables by itself, and keeps by itself how long they are."""

    longest = 0

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        if seqlen > self.longest or self._cos_cached.dtype != dtype:
            self.longest = max(seqlen, self.longest)
            angles = torch.arange(self.longest, device=device)[:, None] * self.inv_freq
            self._cos_cached, self._sin_cached = angles.cos().to(dtype), angles.sin().to(dtype)


class Registered(RotaryEmbedding):
    """Makes its tables by itself, in a buffer that is replaced and one that is registered anew."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.register_buffer("tables", None, persistent=False)

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        if self.tables is None or self.tables.shape[1] < seqlen or self.tables.dtype != dtype:
            angles = torch.arange(seqlen, device=device)[:, None] * self.inv_freq
            self.tables = torch.stack([angles.cos(), angles.sin()]).to(dtype)
            self.register_buffer("latest", self.tables * 1, persistent=False)
        self._cos_cached, self._sin_cached = self.latest


class OfTypes(RotaryEmbedding):
    """Makes its tables by itself, and keeps those of each dtype."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.tables = {}

    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        if dtype not in self.tables or len(self.tables[dtype][0]) < seqlen:
            angles = torch.arange(seqlen, device=device)[:, None] * self.inv_freq
            self.tables[dtype] = angles.cos().to(dtype), angles.sin().to(dtype)
        self._cos_cached, self._sin_cached = self.tables[dtype]


class Longer(RotaryEmbedding):
    def _update_cos_sin_cache(self, seqlen, device=None, dtype=None):
        super()._update_cos_sin_cache(seqlen + 3, device, dtype)


def with_tables_of_its_own(module):
    """A function that has the tables made, and then takes them, as code for older versions does."""

    def rotate(qkv):
        module._update_cos_sin_cache(qkv.shape[1], device=qkv.device, dtype=qkv.dtype)
        return apply_rotary_emb_qkv_(qkv, module._cos_cached, module._sin_cached)

    return rotate


KEEPERS = {
    "module": lambda device: RotaryEmbedding(32, device=device),
    "own tables": lambda device: Counted(32, device=device),
    "own buffers": lambda device: Registered(32, device=device),
    "own dictionary": lambda device: OfTypes(32, device=device),
    "longer tables": lambda device: Longer(32, device=device),
    "direct call": lambda device: with_tables_of_its_own(RotaryEmbedding(32, device=device)),
}


@pytest.mark.parametrize("make", KEEPERS.values(), ids=KEEPERS)
def test_no_table_of_a_graph_is_used_again(make, device):
    """A CUDA graph overwrites it in the next step."""
    rotary = make(device)
    overrides = isinstance(rotary, RotaryEmbedding) and type(rotary) is not RotaryEmbedding
    if overrides and not _torch_private.graphs_see_attributes:
        pytest.skip("graphs of this torch cannot undo what a subclass does")
    torch._dynamo.reset()
    backend, function, plain = Overwriting(), make(device), RotaryEmbedding(32, device=device)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    for rotate, seqlen, training in (
        (compiled, 5, True),
        (compiled, 9, True),
        (compiled, 7, True),
        (compiled, 14, False),
        (function, 12, True),
        (compiled, 6, True),
    ):
        backend.step()
        qkv, dout = torch.randn(2, 1, seqlen, 3, 2, 32, device=device)
        found, expected = (with_gradient(each, qkv, dout, training) for each in (rotate, plain))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert backend.graphs <= 5


def with_gradient(rotate, qkv, dout, training):
    if not training:
        return rotate(qkv.clone())
    leaf = qkv.clone().requires_grad_()
    out = rotate(leaf * 1)
    return out, *torch.autograd.grad(out, leaf, dout)


@pytest.mark.parametrize("used", [False, True])
def test_module_survives_a_failure_while_its_tables_grow(used, device, monkeypatch):
    """As where memory runs out, after which a caller may try a shorter sequence, or the same again."""
    module, qkv = RotaryEmbedding(32, device=device), torch.randn(2, 9, 3, 2, 32, device=device)
    expected = module(qkv.clone())
    module = RotaryEmbedding(32, device=device)
    if used:
        module(qkv[:, :4].clone())

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    for name in ("cos", "sin", "to"):  # each step of the way
        with monkeypatch.context() as patched:
            patched.setattr(torch.Tensor, name, fail)
            with pytest.raises(torch.OutOfMemoryError):
                module(qkv.clone())
    assert identical(module(qkv[:, :4].clone()), expected[:, :4])
    assert identical(module(qkv.clone()), expected)


@pytest.mark.parametrize("dim", [32, 32.0, numpy.int64(32), numpy.float32(32), torch.tensor(32)], ids=repr)
def test_module_takes_whole_numbers(dim, device):
    module, qkv = RotaryEmbedding(dim, device=device), torch.randn(2, 5, 3, 2, 32, device=device)
    assert type(module.dim) is int
    assert identical(module(qkv.clone()), RotaryEmbedding(32, device=device)(qkv.clone()))


def test_module_takes_numbers_in_tensors():
    module = RotaryEmbedding(32, base=torch.tensor(500.0), scale_base=numpy.array(8.0))
    assert (type(module.base), type(module.scale_base)) == (float, float)
    assert (module.base, module.scale_base) == (500.0, 8.0)


@pytest.mark.parametrize("pos_idx_in_fp32", [False, True])
def test_positions_are_in_float32(pos_idx_in_fp32, device):
    module = RotaryEmbedding(32, pos_idx_in_fp32=pos_idx_in_fp32, device=device)
    qkv = torch.randn(1, 700, 3, 2, 32, device=device)  # in bfloat16, positions past 256 would be rounded
    assert module.pos_idx_in_fp32 is pos_idx_in_fp32
    assert identical(module.bfloat16()(qkv.clone()), RotaryEmbedding(32, device=device)(qkv.clone()))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_module_is_copied_with_its_tables(duplicate, device):
    qkv = torch.randn(2, 5, 3, 2, 32, device=device)
    for used in (False, True):
        module = RotaryEmbedding(32, base=500, interleaved=True, scale_base=8, device=device)
        expected = module(qkv.clone()) if used else None
        copied = duplicate(module)
        assert (copied._cos_cached is not None) == used
        assert identical(copied(qkv.clone()), module(qkv.clone()) if expected is None else expected)
