"""The attention functions under torch.compile and torch.export, with meta tensors, and their ops in opcheck."""

import pytest
import torch
from attention_calls import Calling, dense, dense_oracle, op, op_arguments, packed_batch
from cases import Case, params
from compare import assert_same_but_for_rounding
from problems import check
from torch._dynamo.testing import CompileCounterWithBackend

from flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)

CU_SEQLENS = torch.tensor([0, 20, 20, 64], dtype=torch.int32)
DENSE_OPTIONS = dict(causal=True, window_size=(30, -1), softcap=2.0, return_attn_probs=True)


def graph_calls(device):
    """name -> (function of tensors only, tensors) for each public function that has gradients."""
    q, k, v, _ = Case(batch=2, seqlen_q=64, seqlen_k=64, heads_k=2).tensors(device)
    same = torch.stack([q, q + 1, q - 1], dim=2)
    cu_seqlens = CU_SEQLENS.to(device)

    def call(function, *bounds, **options):
        return lambda *tensors: function(*tensors, *bounds, **DENSE_OPTIONS, **options)

    def of_two_lengths(*tensors):
        return flash_attn_varlen_func(*tensors, cu_seqlens, cu_seqlens, 64, 64, **DENSE_OPTIONS)

    def of_two_lengths_kvpacked(*tensors):
        return flash_attn_varlen_kvpacked_func(*tensors, cu_seqlens, cu_seqlens, 64, 64, **DENSE_OPTIONS)

    def of_one_length_qkvpacked(*tensors):
        return flash_attn_varlen_qkvpacked_func(*tensors, cu_seqlens, 64, **DENSE_OPTIONS)

    def with_tensor_bounds(*tensors):
        bound = cu_seqlens.diff().max()
        return flash_attn_varlen_func(*tensors, cu_seqlens, cu_seqlens, bound, bound, causal=True)

    return {
        "func": (call(flash_attn_func), (q, k, v)),
        "kvpacked": (call(flash_attn_kvpacked_func), (q, torch.stack([k, v], dim=2))),
        "qkvpacked": (call(flash_attn_qkvpacked_func), (same,)),
        "varlen": (of_two_lengths, (q[0], k[0], v[0])),
        "varlen_kvpacked": (of_two_lengths_kvpacked, (q[0], torch.stack([k[0], v[0]], dim=1))),
        "varlen_qkvpacked": (of_one_length_qkvpacked, (same[0],)),
        "max_seqlen is a tensor": (with_tensor_bounds, (q[0], k[0], v[0])),
    }


GRAPH_CALLS = list(graph_calls("cpu"))


def differentiate(function, tensors):
    torch.manual_seed(3)
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    result = function(*leaves)
    outputs = result if isinstance(result, tuple) else (result,)
    loss = sum(x.float().sum() for x in outputs[:2])
    return *outputs, *torch.autograd.grad(loss, leaves)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", GRAPH_CALLS)
@pytest.mark.same_on_cpu("dynamic")
def test_compiles_to_one_graph(name, dynamic, device):
    function, tensors = graph_calls(device)[name]
    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    assert_same_but_for_rounding(differentiate(compiled, tensors), differentiate(function, tensors))


@pytest.mark.parametrize("name", ["func", *(pytest.param(name, marks=pytest.mark.cuda) for name in GRAPH_CALLS[1:])])
def test_compiles_with_inductor(name, device):
    function, tensors = graph_calls(device)[name]
    if device.type == "cpu":  # where casts to float32, and back, would have a compiler of C++ run for many seconds
        tensors = [x.float() for x in tensors]
    compiled = torch.compile(function, fullgraph=True)
    assert_same_but_for_rounding(differentiate(compiled, tensors), differentiate(function, tensors))


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.cuda)])
def test_compiled_dropout(backend, device):
    """A graph may draw other numbers than the code outside; out and gradients must go with the S_dmask it returns."""
    case = Case(dropout_p=0.2, heads_k=2, seqlen_q=97)
    tensors = case.tensors(device)
    compiled = torch.compile(dense(case, device), fullgraph=True, backend=backend)
    check(case, tensors, compiled, dense_oracle(case, device))

    def dropped(seed):
        torch.manual_seed(seed)
        return compiled(*tensors[:3])[2].signbit()

    assert torch.equal(dropped(1), dropped(1)) and not torch.equal(dropped(1), dropped(2))


def test_exported_dropout(device):
    case = Case(dropout_p=0.2, heads_k=2, seqlen_q=97)
    tensors = case.tensors(device)
    program = torch.export.export(Calling(dense(case, device)), tensors[:3])
    check(case, tensors, program.module(), dense_oracle(case, device), backward=False)


def test_compiles_once_for_all_lengths(device):
    """Batches of packed tokens differ in size from step to step; that must not compile anew each time."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flash_attn_varlen_func, fullgraph=True, backend=counter)
    for length in (30, 41, 52, 63, 74):
        q, k, v, _ = (x[0] for x in Case(batch=1, seqlen_q=length, seqlen_k=length).tensors(device))
        cu_seqlens = torch.tensor([0, 11, length], dtype=torch.int32, device=device)
        arguments = q.requires_grad_(), k, v, cu_seqlens, cu_seqlens, length - 11, length - 11
        torch.testing.assert_close(compiled(*arguments, causal=True), flash_attn_varlen_func(*arguments, causal=True))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("name", GRAPH_CALLS)
def test_exports(name, device):
    function, tensors = graph_calls(device)[name]
    program = torch.export.export(Calling(function), tensors)
    torch.testing.assert_close(program.module()(*tensors), function(*tensors))


@pytest.mark.parametrize("name", [name for name in GRAPH_CALLS if "tensor" not in name])
def test_meta_tensors_tell_shapes_types_and_strides(name, device):
    function, tensors = graph_calls(device)[name]
    expected = differentiate(function, tensors)
    on_meta, tensors = graph_calls("meta")[name]
    for found, real in zip(differentiate(on_meta, tensors), expected, strict=True):
        assert found.is_meta
        assert (found.shape, found.dtype, found.stride()) == (real.shape, real.dtype, real.stride())


OP_CASES = [
    Case(seqlen_q=17, seqlen_k=33, heads_k=2, causal=True),
    Case(seqlen_q=17, seqlen_k=33, layout="bhsd", window=(5, 7), alibi="bh", dtype="fp32"),
    Case(seqlen_q=17, seqlen_k=33, dropout_p=0.2, softcap=2.0),
]


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", params(OP_CASES))
def test_opcheck_fwd(case, requires_grad, device):
    q, k, v, _ = case.tensors(device)
    tensors = [x.requires_grad_(requires_grad) for x in (q, k, v)]
    torch.library.opcheck(op("fwd", case), (*tensors, *op_arguments(case, device)))


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("given", [3, 5], ids=["scores", "cu_seqlens too"])
def test_opcheck_fwd_with_fewer_arguments(given, requires_grad, device):
    case = Case(seqlen_q=17, seqlen_k=33, causal=True)
    q, k, v, _ = case.tensors(device)
    tensors = [x.requires_grad_(requires_grad) for x in (q, k, v)]
    arguments = op_arguments(case, device)
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, (*tensors, *arguments[:given]))


@pytest.mark.parametrize("cu_seqlens", [False, True], ids=["dense", "varlen"])
def test_opcheck_probabilities(cu_seqlens, device):
    case = Case(batch=3, seqlen_q=17, seqlen_k=33, causal=True, dropout_p=0.2)
    (q, k, v, _), bounds = packed_batch(case, device)
    if not cu_seqlens:
        (q, k, v, _), bounds = case.tensors(device), (None, None)
    torch.library.opcheck(torch.ops.flash_attn.probabilities.default, (q, k, v, *op_arguments(case, device, bounds)))


@pytest.mark.parametrize("packing", ["qkv", "kv"])
def test_opcheck_fwd_packed(packing, device):
    case = Case(seqlen_q=17, seqlen_k=17, causal=True)
    q, k, v, _ = case.tensors(device)
    tensors = {"qkv": (torch.stack([q, k, v], dim=2), None, None), "kv": (q, torch.stack([k, v], dim=2), None)}[packing]
    for x in tensors:
        if x is not None:
            x.requires_grad_()
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, (*tensors, *op_arguments(case, device)))


def test_opcheck_fwd_varlen(device):
    case = Case(batch=3, seqlen_q=17, seqlen_k=33, causal=True)
    (q, k, v, _), cu_seqlens = packed_batch(case, device)
    tensors = [x.requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(torch.ops.flash_attn.fwd.default, (*tensors, *op_arguments(case, device, cu_seqlens)))


@pytest.mark.parametrize("case", params(OP_CASES))
def test_opcheck_bwd(case, device):
    q, k, v, dout = case.tensors(device)
    arguments = op_arguments(case, device)
    out, lse = op("fwd", case)(q, k, v, *arguments)
    grads = [torch.zeros_like(x) for x in (q, k, v)]
    torch.library.opcheck(op("bwd", case), (dout, q, k, v, out, lse, None, None, *grads, *arguments))
