"""What other packages rely on: import lines, signatures, positional calls, ways of use. None of them is needed here."""

import importlib.metadata
import importlib.util
import inspect

import interpreters
import oracle
import pytest
import torch
from cases import Case
from compare import assert_error_ratio, assert_same_but_for_rounding
from packaging.version import Version
from signatures import SIGNATURES

import flash_attn
import flash_attn_2_cuda
from flash_attn import flash_attn_interface as interface

IMPORTS = {
    "transformers 5": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.bert_padding import pad_input, unpad_input""",
    "transformers 4": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input
        from flash_attn.flash_attn_interface import flash_attn_varlen_qkvpacked_func
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
        from flash_attn.ops.triton.rotary import apply_rotary""",
    "TransformerEngine": """
        from flash_attn_2_cuda import varlen_bwd
        from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import _flash_attn_forward, _flash_attn_backward
        from flash_attn.flash_attn_interface import _flash_attn_varlen_forward, _flash_attn_varlen_backward""",
    "text-generation-inference": """
        import dropout_layer_norm, flash_attn_2_cuda
        dropout_layer_norm.dropout_add_ln_fwd, flash_attn_2_cuda.varlen_fwd""",
    "xformers": "from flash_attn.flash_attn_interface import flash_attn_gpu",
    "xtuner": """
        from flash_attn.flash_attn_interface import flash_attn_gpu
        flash_attn_gpu.varlen_fwd, flash_attn_gpu.varlen_bwd""",
    "diffusers": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func
        from flash_attn.flash_attn_interface import _wrapped_flash_attn_forward, _wrapped_flash_attn_backward""",
    "Megatron-LM": """
        from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache
        from flash_attn.layers.rotary import apply_rotary_emb
        from flash_attn import __version__""",
    "verl": "from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input, rearrange",
    "OpenRLHF": "from flash_attn.utils.distributed import all_gather",
    "llm-foundry": """
        from flash_attn.bert_padding import unpad_input_for_concatenated_sequences
        from flash_attn.layers.rotary import RotaryEmbedding""",
    "OLMo-core": """
        from flash_attn.layers.rotary import apply_rotary_emb_qkv_
        from flash_attn.ops.triton.layer_norm import rms_norm_fn""",
    "nanotron": """
        from flash_attn.layers.rotary import RotaryEmbedding, apply_rotary_emb
        from flash_attn.ops.triton.layer_norm import layer_norm_fn
        from flash_attn.modules.mha import flash_attn_varlen_kvpacked_func""",
    "modules.mha with names from elsewhere": """
        from flash_attn.modules.mha import ColumnParallelLinear, FusedDense, RowParallelLinear, RotaryEmbedding
        from flash_attn.modules.mha import get_dim_for_local_rank""",
    "modules of 2.8": """
        from flash_attn.layers.patch_embed import PatchEmbed
        from flash_attn.modules.block import Block, ParallelBlock
        from flash_attn.modules.embedding import BertEmbeddings, GPT2Embeddings, ParallelGPT2Embeddings
        from flash_attn.modules.mha import MHA, CrossAttention, FlashCrossAttention, FlashSelfAttention, ParallelMHA
        from flash_attn.modules.mha import LinearResidual, SelfAttention, _update_kv_cache, get_alibi_slopes
        from flash_attn.modules.mlp import FusedMLP, GatedMlp, Mlp, ParallelFusedMLP, ParallelGatedMlp, ParallelMLP
        from flash_attn.utils.benchmark import benchmark_all, benchmark_combined, benchmark_fwd_bwd, benchmark_memory
        from flash_attn.utils.benchmark import benchmark_backward, benchmark_forward, pytorch_profiler
        from flash_attn.utils.distributed import all_gather_raw, all_reduce, all_reduce_raw, get_dim_for_local_rank
        from flash_attn.utils.distributed import reduce_scatter, reduce_scatter_raw, sync_shared_params
        from flash_attn.utils.distributed import allreduce_sequence_parallel_grad
        from flash_attn.utils.generation import GenerationMixin, InferenceParams, decode, update_graph_cache
        from flash_attn.utils.pretrained import state_dict_from_pretrained
        from flash_attn.utils.testing import attention_ref, construct_chunk_mask, construct_local_mask
        from flash_attn.utils.testing import generate_qkv, generate_random_padding_mask
        from flash_attn.utils.torch import custom_bwd, custom_fwd
        from flash_attn.utils.library import triton_op""",
    "ColossalAI": """
        from flash_attn import flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_with_kvcache
        from flash_attn import flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func""",
    "tests of 2.8": "from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM",
    "autograd functions": """
        from flash_attn.flash_attn_interface import FlashAttnFunc, FlashAttnKVPackedFunc, FlashAttnQKVPackedFunc
        from flash_attn.flash_attn_interface import FlashAttnVarlenFunc, FlashAttnVarlenKVPackedFunc
        from flash_attn.flash_attn_interface import FlashAttnVarlenQKVPackedFunc""",
    "helpers": "from flash_attn.flash_attn_interface import maybe_contiguous, round_multiple",
    "cross entropy": """
        from flash_attn.losses.cross_entropy import CrossEntropyLoss
        from flash_attn.ops.triton.cross_entropy import cross_entropy_loss
        import xentropy_cuda_lib
        xentropy_cuda_lib.forward, xentropy_cuda_lib.backward""",
    "softmax": """
        from flash_attn.fused_softmax import FusedScaleMaskSoftmax, ScaledMaskedSoftmax, ScaledUpperTriangMaskedSoftmax
        from fused_softmax_lib import scaled_masked_softmax_forward, scaled_masked_softmax_backward
        from fused_softmax_lib import scaled_masked_softmax_get_batch_per_block
        from fused_softmax_lib import scaled_upper_triang_masked_softmax_forward
        from fused_softmax_lib import scaled_upper_triang_masked_softmax_backward""",
    "dense layers": """
        from flash_attn.ops.fused_dense import ColumnParallelLinear, FusedDense, FusedDenseFunc, FusedMLP, FusedMLPFunc
        from flash_attn.ops.fused_dense import ParallelFusedMLP, RowParallelLinear, fused_dense_func, fused_mlp_func
        import fused_dense_lib
        fused_dense_lib.linear_bias_wgrad, fused_dense_lib.linear_act_forward
        fused_dense_lib.bias_act_linear_dgrad_bgrad""",
    "gpt-neox": """
        from flash_attn.ops.activations import swiglu, bias_gelu_impl, fast_gelu_impl
        from flash_attn.ops.activations import gelu_bwd, relu_bwd, sqrelu_bwd, sqrelu_fwd""",
    "Triton layers": """
        from flash_attn.ops.triton.k_activations import Activation, get_triton_activation_kernel
        from flash_attn.ops.triton.linear import triton_dgrad_act, triton_linear_act
        from flash_attn.ops.triton.mlp import FusedDenseSqreluDense, fused_dense_sqrelu_dense_function""",
    "rotary": """
        import rotary_emb
        rotary_emb.apply_rotary""",
    "bert_padding": """
        from flash_attn.bert_padding import IndexFirstAxis, IndexFirstAxisResidual, IndexPutFirstAxis
        from flash_attn.bert_padding import index_first_axis_residual, index_put_first_axis, repeat""",
}


@pytest.mark.parametrize("lines", IMPORTS.values(), ids=IMPORTS)
def test_import_lines(lines):
    exec(inspect.cleandoc(lines), {})


# ---------------------------------------------------------------------------------------------------------------------
# Public and private functions

FUNCTIONS = list(SIGNATURES["flash_attn.flash_attn_interface"])


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if "flash_attn" in name])
def test_functions_can_be_inspected(name):
    """Callers look at the parameters, by signature or by getfullargspec, and leave out what they do not find."""
    function = getattr(interface, name)
    assert inspect.isfunction(function)
    names = inspect.getfullargspec(function)
    assert names.args + names.kwonlyargs == list(inspect.signature(function).parameters)
    assert names.varkw is None


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("flash_attn")])
def test_top_level_names(name):
    assert getattr(flash_attn, name) is getattr(interface, name)


def test_another_distribution_may_add_subpackages(tmp_path):
    """flash_attn.cute belongs to a distribution of its own; the first one on the path is found."""
    (tmp_path / "flash_attn" / "cute").mkdir(parents=True)
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("here = True")
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import flash_attn.cute; assert flash_attn.cute.here"
    interpreters.run(code)


# ---------------------------------------------------------------------------------------------------------------------
# Versions and metadata


def test_version_is_one_that_others_accept():
    """transformers asks for at least 2.3.3, TransformerEngine for less than 2.8.4."""
    assert Version("2.8.3") <= Version(flash_attn.__version__) < Version("2.8.4")


def test_metadata_that_transformers_looks_for():
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs flash-attn to be installed, not only on the path")
    assert version == flash_attn.__version__ == importlib.metadata.version("flash_attn")
    assert importlib.util.find_spec("flash_attn") is not None
    names = importlib.metadata.packages_distributions()["flash_attn"]
    assert "flash-attn" in [name.replace("_", "-") for name in names]


# ---------------------------------------------------------------------------------------------------------------------
# flash_attn_2_cuda: positional, as the callers write it

CASE = Case(seqlen_q=33, seqlen_k=65, heads_k=2, causal=True, window=(20, -1), alibi="h")


@pytest.fixture
def problem(device):
    """q, k, v, dout, alibi_slopes, and (out, lse, dq, dk, dv) of the public function."""
    *inputs, dout = CASE.with_stored_out(device).tensors(device)
    return *inputs, dout, CASE.alibi_slopes(device), answer(inputs, dout, CASE.options(device))


def answer(inputs, dout, options):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse, _ = flash_attn.flash_attn_func(*leaves, deterministic=True, return_attn_probs=True, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)


def assert_all_equal(found, expected):
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))


@pytest.mark.parametrize("given", [False, True])
def test_fwd_and_bwd(given, problem):
    q, k, v, dout, slopes, (out, lse, *grads) = problem
    target = torch.empty_like(q) if given else None
    results = flash_attn_2_cuda.fwd(q, k, v, target, slopes, 0.0, 0.125, True, 20, 0, 0.0, False, None)
    assert isinstance(results, list) and len(results) == 4
    assert_all_equal(results[:2], (out, lse))
    assert target is None or results[0].data_ptr() == target.data_ptr()
    targets = [torch.full_like(x, float("nan")) for x in (q, k, v)] if given else [None] * 3
    args = 0.0, 0.125, True, 20, 0, 0.0, True, None, results[3]
    found = flash_attn_2_cuda.bwd(dout, q, k, v, out, lse, *targets, slopes, *args)
    assert isinstance(found, list) and len(found) == 4
    assert_all_equal(found[:3], grads)
    assert all(x is None or x.data_ptr() == y.data_ptr() for x, y in zip(targets, found))


@pytest.mark.parametrize("last", [(None,), (None, 0)], ids=["2.8", "with num_splits"])
def test_varlen_fwd_and_varlen_bwd(last, problem, device):
    q, k, v, dout, slopes, (out, lse, *grads) = problem
    packed = [x.flatten(0, 1) for x in (q, k, v)]
    bounds = [torch.arange(3, dtype=torch.int32, device=device) * n for n in (33, 65)]
    options = 0.0, 0.125, False, True, 20, 0, 0.0
    args = None, *bounds, None, None, None, slopes, 33, 65, *options, False, *last
    results = flash_attn_2_cuda.varlen_fwd(*packed, *args)
    assert isinstance(results, list) and len(results) == 4
    packed_lse = lse.transpose(0, 1).flatten(1)
    torch.testing.assert_close(results[0], out.flatten(0, 1))
    torch.testing.assert_close(results[1], packed_lse)
    args = out.flatten(0, 1), packed_lse, None, None, None, *bounds, slopes, 33, 65, *options, True, None, results[3]
    found = flash_attn_2_cuda.varlen_bwd(dout.flatten(0, 1), *packed, *args)
    assert isinstance(found, list) and len(found) == 4
    for one, other in zip(found, grads):
        torch.testing.assert_close(one, other.flatten(0, 1))


@pytest.mark.parametrize("given", [False, True])
def test_fwd_kvcache(given, problem):
    q, k, v, _, slopes, (out, lse, *_) = problem
    target = torch.empty_like(q) if given else None
    args = None, None, None, None, None, None, None, None, slopes, target, 0.125, True, 20, 0, 0.0, True, 1
    found = flash_attn_2_cuda.fwd_kvcache(q, k, v, *args)
    assert isinstance(found, list) and len(found) == 2
    assert_same_but_for_rounding(found, (out, lse))
    assert target is None or found[0].data_ptr() == target.data_ptr()


@pytest.mark.parametrize("function", ["fwd", "varlen_fwd", "bwd", "varlen_bwd", "fwd_kvcache"])
def test_arguments_are_positional(function):
    kinds = {p.kind for p in inspect.signature(getattr(flash_attn_2_cuda, function)).parameters.values()}
    assert kinds == {inspect.Parameter.POSITIONAL_ONLY}


@pytest.mark.parametrize(
    ("change", "error"), [(lambda x: x.repeat(2, 1, 1, 1, 1), ValueError), (lambda x: x.int(), TypeError)]
)
def test_a_given_out_must_fit(change, error, problem):
    """Before anything is written: not to `out`, and not to the caches."""
    q, k, v, *_ = problem
    out, caches, new = change(torch.zeros_like(q)), [torch.zeros_like(x) for x in (k, v)], k[:, :1]
    with pytest.raises(error, match="out must have"):
        flash_attn_2_cuda.fwd(q, k, v, out, None, 0.0, 0.125, False, -1, -1, 0.0, False)
    args = new, new, torch.zeros(2, dtype=torch.int32, device=q.device), *[None] * 6, out, 0.125, False, -1, -1, 0.0
    with pytest.raises(error, match="out must have"):
        flash_attn_2_cuda.fwd_kvcache(q, *caches, *args, True, 1)
    assert not any(x.any() for x in (out, *caches))


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_generator_must_be_none(error, problem):
    q, k, v, *_ = problem
    with pytest.raises(error, match="generator` argument is no longer supported"):
        flash_attn_2_cuda.fwd(q, k, v, None, None, 0.0, 0.125, False, -1, -1, 0.0, False, torch.Generator())


def test_splits_of_pages(device):
    """varlen_fwd chooses its splits by itself: with pages, a wish for more than one is refused."""
    pages, q = torch.randn(2, 2, 16, 2, 16, device=device).half(), torch.randn(3, 2, 16, device=device).half()
    bounds = [torch.tensor([0, n], dtype=torch.int32, device=device) for n in (3, 20)]
    table = torch.tensor([[1, 0]], dtype=torch.int32, device=device)

    def run(num_splits):
        options = 3, 20, 0.0, 0.25, False, True, -1, -1, 0.0, False, None, num_splits
        return flash_attn_2_cuda.varlen_fwd(q, *pages, None, *bounds, None, None, table, None, *options)

    assert_all_equal(run(0)[:2], run(1)[:2])
    with pytest.raises(RuntimeError, match="num_splits > 1 is not supported"):
        run(2)


REMOVED = {  # names of older releases, and what the error says
    "flash_attn_unpadded_func": "use flash_attn_varlen_func",
    "flash_attn_unpadded_kvpacked_func": "use flash_attn_varlen_kvpacked_func",
    "flash_attn_unpadded_qkvpacked_func": "use flash_attn_varlen_qkvpacked_func",
    "flash_attn_unpadded_qkvpacked_split_func": "use flash_attn_varlen_qkvpacked_func",
}


@pytest.mark.parametrize("module", [flash_attn, interface], ids=lambda module: module.__name__)
@pytest.mark.parametrize("name", REMOVED)
def test_errors_for_removed_names_say_what_to_use(name, module):
    with pytest.raises(ImportError, match=f"{name}.*{module.__name__}.*{REMOVED[name]}$"):
        exec(f"from {module.__name__} import {name}")
    assert not hasattr(module, name) and getattr(module, name, 5) == 5
    with pytest.raises(AttributeError, match=REMOVED[name]):
        getattr(module, name)


@pytest.mark.parametrize("module", [flash_attn, interface], ids=lambda module: module.__name__)
def test_errors_for_unknown_names(module):
    with pytest.raises(ImportError, match="cannot import name 'flash_attn_nothing'"):
        exec(f"from {module.__name__} import flash_attn_nothing")
    assert not hasattr(module, "flash_attn_nothing")


UNKNOWN = {  # what is imported from where, and what the error says that there is
    "flash_attn": {"flash_attn_fun": "flash_attn_func", "Nothing": "bert_padding, .*flash_attn_func, .*ops"},
    "flash_attn.ops": {"rmsnorm": "rms_norm", "x": "activations, .*triton"},
    "flash_attn.modules.mha": {"FlashMHA": "MHA", "FlashSelfAtention": "FlashSelfAttention"},
    "flash_attn.flash_attn_interface": {"flash_attention": "flash_attn_func"},
    "flash_attn.losses": {"cross_entropy_loss": "cross_entropy"},
    "flash_attn.models": {"lama": "llama"},
}


@pytest.mark.parametrize(
    ("module", "name", "there_are"),
    [(module, name, there_are) for module, names in UNKNOWN.items() for name, there_are in names.items()],
)
def test_errors_for_unknown_names_say_what_there_is(module, name, there_are):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}': there are .*{there_are}"):
        exec(f"from {module} import {name}")


@pytest.mark.parametrize(
    ("module", "name", "home"),
    [
        ("flash_attn", "apply_rotary_emb", "flash_attn.layers.rotary"),
        ("flash_attn", "MHA", "flash_attn.modules.mha"),
        ("flash_attn.losses", "CrossEntropyLoss", "flash_attn.losses.cross_entropy"),
        ("flash_attn.models", "GPTLMHeadModel", "flash_attn.models.gpt"),
    ],
)
def test_errors_for_names_of_other_modules_say_where_they_are(module, name, home):
    with pytest.raises(ImportError, match=f"cannot import name '{name}' from '{module}': it is in {home}$"):
        exec(f"from {module} import {name}")
    exec(f"from {home} import {name}")


def test_submodules_are_still_found():
    """Python asks the package for the name before it looks for a module of that name."""
    code = "from flash_attn import bert_padding; from flash_attn.ops import activations, triton"
    interpreters.run(code)


def test_flash_attn_gpu_has_the_same_functions():
    names = flash_attn_2_cuda.__all__
    assert sorted(names) == ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
    assert all(getattr(interface.flash_attn_gpu, name) is getattr(flash_attn_2_cuda, name) for name in names)


@pytest.mark.parametrize("flag", [(), (True,), (False,)], ids=["short", "with grad", "without grad"])
def test_autograd_function_classes(flag, problem):
    """`apply` takes the public arguments by position, and whether a gradient is wanted."""
    q, k, v, _, slopes, (out, *_) = problem
    q = q.requires_grad_()
    found = interface.FlashAttnFunc.apply(q, k, v, 0.0, None, True, (20, 0), 0.0, slopes, True, False, *flag)
    assert torch.equal(found, out)
    assert found.requires_grad == (flag != (False,))


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("_flash_attn")])
def test_private_functions_are_in_torch_ops(name):
    """The ops have the same arguments and defaults."""
    expected = inspect.signature(getattr(interface, name)).parameters.values()
    found = getattr(torch.ops.flash_attn, name).default._schema.arguments
    assert [argument.name for argument in found] == [p.name for p in expected]
    defaults = [
        argument.default_value if argument.has_default_value() else inspect.Parameter.empty for argument in found
    ]
    assert defaults == [p.default for p in expected]


def test_private_functions_in_torch_ops_compile(device):
    q, k, v, dout = (x[0] for x in Case(batch=1, seqlen_q=40, seqlen_k=40, heads_k=2).tensors(device))
    cu_seqlens = torch.tensor([0, 15, 40], dtype=torch.int32, device=device)

    def run(namespace):
        bounds, scores = (cu_seqlens, cu_seqlens, 25, 25), (0.0, 0.125, True, -1, -1, 2.0, None)
        out, lse, _, rng_state = namespace._flash_attn_varlen_forward(q, k, v, *bounds, *scores)
        grads = [torch.empty_like(x) for x in (q, k, v)]
        namespace._flash_attn_varlen_backward(dout, q, k, v, out, lse, *grads, *bounds, *scores, True, rng_state)
        return out, lse, *grads

    expected = run(interface)
    assert_all_equal(run(torch.ops.flash_attn), expected)
    compiled = torch.compile(lambda: run(torch.ops.flash_attn), fullgraph=True, backend="aot_eager")
    assert_all_equal(compiled(), expected)


# ---------------------------------------------------------------------------------------------------------------------
# Ways of use


@pytest.mark.parametrize("namespace", [interface, torch.ops.flash_attn], ids=["functions", "ops"])
def test_private_forward_and_backward_by_keyword(namespace, problem):
    """Context parallelism as in TransformerEngine: results 0, 1, 3; gradients into slices of larger buffers."""
    q, k, v, dout, slopes, (out, lse, *grads) = problem
    options = dict(
        causal=True,
        softmax_scale=0.125,
        dropout_p=0.0,
        window_size_left=20,
        window_size_right=0,
        alibi_slopes=slopes,
        softcap=0.0,
    )
    results = namespace._flash_attn_forward(q, k, v, return_softmax=False, **options)
    assert_all_equal((results[0], results[1]), (out, lse))
    rng_state = results[3]
    buffers = [torch.full((3, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device) for x in (q, k, v)]
    dq, dk, dv = (x[1:] for x in buffers)
    namespace._flash_attn_backward(
        dout, q, k, v, out, lse, dq, dk, dv, deterministic=True, rng_state=rng_state, **options
    )
    assert_all_equal((dq, dk, dv), grads)
    assert all(x[0].isnan().all() for x in buffers)


def test_private_backward_drops_what_the_forward_dropped(device):
    case = Case(seqlen_q=33, seqlen_k=65, dropout_p=0.3)
    q, k, v, dout = case.tensors(device)
    options = dict(
        causal=False,
        softmax_scale=0.125,
        dropout_p=0.3,
        window_size_left=-1,
        window_size_right=-1,
        alibi_slopes=None,
        softcap=0.0,
    )
    out, lse, s_dmask, rng_state = interface._flash_attn_forward(q, k, v, return_softmax=True, **options)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    interface._flash_attn_backward(dout, q, k, v, out, lse, *grads, deterministic=False, rng_state=rng_state, **options)

    def reference(*inputs):
        return oracle.attention(*inputs, keep=~s_dmask.signbit(), dropout_p=0.3)

    exact = oracle.gradients(reference, [x.double() for x in (q, k, v)], dout)[2]
    plain = oracle.gradients(reference, (q, k, v), dout)[2]
    for found, one, other in zip(grads, exact, plain):
        assert_error_ratio(found, one, other)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "varlen"])
def test_ring_attention(packed, device):
    """Blocks of keys one by one, results merged by lse; backward of each block with the merged out and lse."""
    blocks, length = 3, 32
    case = Case(batch=1, seqlen_q=blocks * length, seqlen_k=blocks * length, heads_k=2, causal=True)
    *inputs, dout = case.tensors(device)
    step = (_varlen_block if packed else _dense_block)(length, device)
    q, k, v, dout_blocks = (x.split(length, dim=1) for x in (*inputs, dout))
    pairs = [(i, j) for i in range(blocks) for j in range(i + 1)]
    outs, lses = [0.0] * blocks, [torch.full((), float("-inf"), device=device)] * blocks
    for i, j in pairs:
        out, lse = step.forward(q[i], k[j], v[j], causal=i == j)
        merged = torch.logaddexp(lses[i], lse)
        outs[i] = outs[i] * _weight(lses[i] - merged) + out.float() * _weight(lse - merged)
        lses[i] = merged
    grads = [torch.zeros_like(x, dtype=torch.float32) for x in inputs]
    dq, dk, dv = (x.split(length, dim=1) for x in grads)
    for i, j in pairs:
        out = outs[i].to(q[i].dtype)
        parts = step.backward(dout_blocks[i], q[i], k[j], v[j], out, lses[i].contiguous(), causal=i == j)
        for total, part in zip((dq[i], dk[j], dv[j]), parts):
            total += part
    exact_out, _, exact_grads = oracle.gradients(_causal, [x.double() for x in inputs], dout)
    plain_out, _, plain_grads = oracle.gradients(_causal, inputs, dout)
    found = torch.cat(outs, dim=1).to(dout.dtype), *(x.to(dout.dtype) for x in grads)
    for name, *three in zip(("out", "dq", "dk", "dv"), found, (exact_out, *exact_grads), (plain_out, *plain_grads)):
        assert_error_ratio(*three, name=name)


def _causal(q, k, v):
    return oracle.attention(q, k, v, causal=True)


def _weight(log):
    """exp of (batch, heads, seqlen) as a factor for (batch, seqlen, heads, head_dim)."""
    return log.exp().reshape(-1, *log.shape[-2:]).transpose(1, 2)[..., None] if log.dim() else log.exp()


class _dense_block:
    def __init__(self, length, device):
        self.options = dict(
            dropout_p=0.0,
            softmax_scale=0.125,
            window_size_left=-1,
            window_size_right=-1,
            softcap=0.0,
            alibi_slopes=None,
        )

    def forward(self, q, k, v, causal):
        return interface._flash_attn_forward(q, k, v, causal=causal, return_softmax=False, **self.options)[:2]

    def backward(self, dout, q, k, v, out, lse, causal):
        grads = [torch.empty_like(x, dtype=q.dtype) for x in (q, k, v)]
        interface._flash_attn_backward(
            dout, q, k, v, out, lse, *grads, causal=causal, deterministic=False, rng_state=None, **self.options
        )
        return grads


class _varlen_block(_dense_block):
    def __init__(self, length, device):
        super().__init__(length, device)
        cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=device)
        names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
        self.options |= dict(zip(names, (cu_seqlens, cu_seqlens, length, length)))

    def forward(self, q, k, v, causal):
        out, lse, *_ = interface._flash_attn_varlen_forward(q[0], k[0], v[0], causal=causal, **self.options)
        return out[None], lse

    def backward(self, dout, q, k, v, out, lse, causal):
        grads = [torch.empty_like(x[0]) for x in (q, k, v)]
        interface._flash_attn_varlen_backward(
            dout[0], q[0], k[0], v[0], out[0], lse, *grads, causal=causal, deterministic=False, **self.options
        )
        return [x[None] for x in grads]


def test_transformers_calls(device):
    """Transposed views, max_seqlen as a tensor, decoding in pages by keyword."""
    case = Case(seqlen_q=40, seqlen_k=40, heads_k=2, layout="bhsd")
    q, k, v, _ = case.tensors(device)
    options = dict(causal=True, softmax_scale=0.125, dropout_p=0.0, deterministic=False)
    dense = flash_attn.flash_attn_func(q, k, v, window_size=(15, 15), softcap=30.0, **options)
    cu_seqlens = torch.tensor([0, 40, 80], dtype=torch.int32, device=device)
    longest = cu_seqlens.diff().max()
    bounds = dict(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, max_seqlen_q=longest, max_seqlen_k=longest)
    packed = [x.reshape(80, -1, 64) for x in (q, k, v)]
    ragged = flash_attn.flash_attn_varlen_func(*packed, **bounds, window_size=(15, 15), softcap=30.0, **options)
    torch.testing.assert_close(ragged.view_as(dense), dense)
    caches = [x.reshape(10, 8, 2, 64).contiguous() for x in (k, v)]
    paged = flash_attn.flash_attn_with_kvcache(
        q[:, -1:],
        *caches,
        k[:, -1:],
        v[:, -1:],
        causal=True,
        softmax_scale=0.125,
        window_size=(15, 15),
        softcap=30.0,
        block_table=torch.arange(10, dtype=torch.int32, device=device).reshape(2, 5),
        cache_seqlens=torch.tensor([39, 39], dtype=torch.int32, device=device),
    )
    torch.testing.assert_close(paged, dense[:, -1:], rtol=2**-7, atol=2**-8)


@pytest.mark.cuda
def test_transformers_generates_from_a_padded_batch(device):
    """Prompts and then one token after the other: logits as exact as those of transformers' own attention."""
    transformers = pytest.importorskip("transformers")
    if not transformers.utils.is_flash_attn_2_available():
        pytest.skip("transformers does not find this package: it is not installed")
    config = transformers.LlamaConfig(
        vocab_size=101,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=0,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.LlamaForCausalLM(config).to(device).eval()
    prompts = torch.randint(1, 101, (3, 17), device=device)
    padding = [0, 5, 16]  # on the left
    mask = torch.arange(17, device=device) >= torch.tensor(padding, device=device)[:, None]
    model.to(torch.bfloat16).set_attn_implementation("flash_attention_2")
    found = model.generate(
        prompts * mask,
        attention_mask=mask.long(),
        max_new_tokens=12,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )

    def logits(dtype):
        """The logits of each sequence by itself, in one pass."""
        model.to(dtype).set_attn_implementation("eager")
        with torch.no_grad():
            each = [model(tokens[None, pad:]).logits for tokens, pad in zip(found.sequences, padding)]
        return torch.cat([x[:, -13:-1] for x in each])

    assert_error_ratio(torch.stack(found.logits, dim=1), logits(torch.float64), logits(torch.bfloat16))


def test_diffusers_calls(problem):
    """A dropout of 1e-30 asks for lse; the wrapped functions are called by position."""
    q, k, v, dout, slopes, (out, lse, *grads) = problem
    args = 0.125, True, 20, 0, 0.0, slopes
    found, found_lse, s_dmask, rng_state = interface._wrapped_flash_attn_forward(q, k, v, 1e-30, *args, True)
    torch.testing.assert_close(found, out)
    torch.testing.assert_close(found_lse, lse)
    assert s_dmask.numel() > 0
    targets = [torch.empty_like(x) for x in (q, k, v)]
    interface._wrapped_flash_attn_backward(dout, q, k, v, out, lse, *targets, 1e-30, *args, False, rng_state)
    for one, other in zip(targets, grads):
        torch.testing.assert_close(one, other)


def test_helpers(device):
    x = torch.randn(4, 6, device=device)
    assert interface.maybe_contiguous(x) is x and interface.maybe_contiguous(None) is None
    assert interface.maybe_contiguous(x.T).is_contiguous() and torch.equal(interface.maybe_contiguous(x.T), x.T)
    assert [interface.round_multiple(n, 128) for n in (0, 1, 128, 129)] == [0, 128, 128, 256]
