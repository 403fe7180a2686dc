"""Attention of a sequence that is divided among ranks: `cp_attn_func` and its packed forms.

    gather     each rank fetches the keys that its rows see, some heads at a time while it computes others, and calls
               attention once for each chunk of its rows; the gradients of keys are summed in float32, by the kernels
               and on the way home. Saved are q, k, v, out and softmax_lse of the rank's own rows, so the backward
               fetches keys again.
    ulysses    ranks exchange tokens for heads; each calls attention once, for some heads of the whole row.

The two methods are one op each way for torch.compile: a graph has the number of the plan as a tensor, so another plan
is not another graph.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flash_attn import _library
from flash_attn._errors import ArgumentError
from flash_attn._ops import checks, flash_attn, invariance, rng
from flash_attn._ops.flash_attn_features import SINK_DTYPES, FeatureArguments
from flash_attn.context_parallel._plan import Plan, heads_of_ranks, plan_of
from flash_attn.functional import combine

_NAMESPACE = "flash_attn_context_parallel"


def cp_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: Plan,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`flash_attn.flash_attn_func` of the whole row that `plan` divides, for the tokens of this rank.

    All ranks of the plan must call it, in the same order and with the same arguments but for their tokens. Every row of
    the batch is divided by the same plan. A token sees keys of its own document only.

    Arguments:
        q: (batch, tokens, heads, head_dim), or (tokens, heads, head_dim), where tokens is plan.tokens.
        k, v: the same with heads_k, a divisor of heads. v may have another head_dim.
        dropout_p, alibi_slopes: as in `flash_attn_func`, only with method="ulysses". With a batch of one row, and where
            ranks have the same random state, what is dropped is the same as on one GPU.
        softmax_scale, causal, window_size, softcap, attention_chunk: as in `flash_attn_func`; causal must be a bool.
            Windows and chunks count positions in the document, wherever its tokens are.
        deterministic: gradients are bitwise equal in every run.
        return_attn_probs: also return softmax_lse and an empty S_dmask. Not with dropout.
        plan: how the row is divided.
        learnable_sink: (heads,), the same on all ranks. Its gradient is that of this rank's part of the work, like the
            gradients of all parameters: data parallelism or FSDP over the ranks adds them.
        return_lse: also return softmax_lse, float32 (batch, heads, tokens) or (heads, tokens), of the whole row. It has
            a gradient.

    Returns:
        out, shaped like q with the head_dim of v; or (out, softmax_lse), or (out, softmax_lse, S_dmask). Padding gives
        0, and +inf in softmax_lse.

    Raises:
        ValueError, TypeError: before anything is sent, on all ranks that have the same arguments: for shapes and
            dtypes, and for what the method of the plan does not take.

    Example:
        >>> import tempfile, torch.distributed as dist
        >>> dist.init_process_group("gloo", f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
        >>> plan = Plan([5, 3], dist.group.WORLD)
        >>> q, k, v = (torch.randn(1, plan.tokens, 4, 16) for _ in range(3))
        >>> cp_attn_func(q, k, v, causal=True, plan=plan).shape
        torch.Size([1, 8, 4, 16])
        >>> dist.destroy_process_group()
    """
    _check_plan(plan)
    checks.alike(("q", "k", "v"), (q, k, v), dtypes=flash_attn.DTYPES)
    has_batch = q.dim() != 3
    if not has_batch:
        q, k, v = _with_batch(q, k, v)
    _check_tensors(plan, q, k, v)
    left, right = checks.window(window_size)
    checks.flag("causal", causal)
    window = left, 0 if causal else right
    if softmax_scale is None:
        softmax_scale = q.shape[-1] ** -0.5
    else:
        softmax_scale = checks.as_float("softmax_scale", softmax_scale)
        checks.number("softmax_scale", softmax_scale, softmax_scale >= 0, "at least 0")
    softcap = checks.as_float("softcap", softcap)
    chunk = checks.count("attention_chunk", attention_chunk)
    checks.flags(deterministic=deterministic, return_attn_probs=return_attn_probs, return_lse=return_lse)
    if learnable_sink is not None:
        shape = (q.shape[2],)
        checks.tensor("learnable_sink", learnable_sink, dtypes=SINK_DTYPES, shape=shape, device=q.device)
    dropout_p = checks.as_float("dropout_p", dropout_p)
    checks.number("dropout_p", dropout_p, 0 <= dropout_p < 1, "at least 0 and less than 1")
    if dropout_p and return_attn_probs:
        raise ArgumentError("return_attn_probs must be False with dropout_p > 0 under a plan, found True")
    if alibi_slopes is not None:
        _check_slopes(alibi_slopes, q)
    deterministic = bool(deterministic or invariance.level())
    wants_lse = bool(return_lse or return_attn_probs)
    if plan.method != "ulysses":
        _refuse_with_gather(plan.method, dropout_p, alibi_slopes)
    if q.shape[0] == 0:  # nothing is sent
        out, lse = _gather_fake(q, k, v)
        out = out + (q.sum() + k.sum() + v.sum())  # so that there are gradients
    elif plan.method == "gather":
        scores = softmax_scale, window, softcap, chunk, deterministic
        out, lse = _gathered_attention(q, k, v, learnable_sink, plan, *scores)
    else:
        ranks, _ = plan.ranks_of_heads
        fits = q.shape[2] >= ranks
        expected = f"at least the number of ranks that divide heads, {{}}, for method={plan.method!r}"
        checks.number("q's number of heads", q.shape[2], fits, expected, ranks)
        options = window, chunk, dropout_p, alibi_slopes, deterministic, softcap, wants_lse
        out, lse = _ulysses(q, k, v, learnable_sink, plan, softmax_scale, *options)
    results: list[Tensor] = [out] if lse is None else [out, lse]
    if not has_batch:
        results = [x[0] for x in results]
    if return_attn_probs:
        return (*results, q.new_empty(0))
    return tuple(results) if return_lse else results[0]


def _check_slopes(slopes, q):
    checks.tensor("alibi_slopes", slopes, dtypes=(torch.float32,), device=q.device)
    shapes = (q.shape[2],), (q.shape[0], q.shape[2])
    if slopes.shape not in shapes:
        raise ArgumentError(f"alibi_slopes must have shape {shapes[0]} or {shapes[1]}, found {tuple(slopes.shape)}")


def _refuse_with_gather(method, dropout_p, slopes):
    """Refuse what depends on where a key stands in the whole row other than by the mask."""
    found = {"dropout_p": dropout_p or None, "alibi_slopes": None if slopes is None else "a tensor"}
    for name, value in found.items():
        if value is not None:
            raise ArgumentError(
                f"{name} must be left out with a plan of method={method!r}, found {value}: only 'ulysses' takes it"
            )
    if flash_attn.exact_gradients:
        raise ArgumentError(f"exact gradients must be off with a plan of method={method!r}, found them on")


def cp_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: Plan,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`cp_attn_func` with keys and values in one tensor, kv (batch, tokens, 2, heads_k, head_dim).

    The other arguments, results and errors are those of `cp_attn_func`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel import Plan, cp_attn_kvpacked_func
        >>> plan = Plan([5, 3], dist.group.WORLD)
        >>> q, kv = torch.randn(1, plan.tokens, 4, 16), torch.randn(1, plan.tokens, 2, 2, 16)
        >>> cp_attn_kvpacked_func(q, kv, causal=True, plan=plan).shape
        torch.Size([1, 8, 4, 16])
        >>> dist.destroy_process_group()
    """
    checks.tensor("kv", kv)
    checks.packed(
        "kv", kv, 2, "(batch, tokens, 2, heads_k, head_dim)" if kv.dim() > 4 else "(tokens, 2, heads_k, head_dim)"
    )
    k, v = kv.unbind(-3)
    return cp_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        plan=plan,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        return_lse=return_lse,
    )


def cp_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    plan: Plan,
    learnable_sink: Tensor | None = None,
    attention_chunk: int = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """`cp_attn_func` with queries, keys and values in one tensor, qkv (batch, tokens, 3, heads, head_dim).

    The other arguments, results and errors are those of `cp_attn_func`.

    Example:
        >>> import torch.distributed as dist
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # or by torchrun
        >>> from flash_attn.context_parallel import Plan, cp_attn_qkvpacked_func
        >>> plan = Plan([5, 3], dist.group.WORLD)
        >>> cp_attn_qkvpacked_func(torch.randn(1, plan.tokens, 3, 4, 16), causal=True, plan=plan).shape
        torch.Size([1, 8, 4, 16])
        >>> dist.destroy_process_group()
    """
    checks.tensor("qkv", qkv)
    checks.packed(
        "qkv", qkv, 3, "(batch, tokens, 3, heads, head_dim)" if qkv.dim() > 4 else "(tokens, 3, heads, head_dim)"
    )
    q, k, v = qkv.unbind(-3)
    return cp_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
        plan=plan,
        learnable_sink=learnable_sink,
        attention_chunk=attention_chunk,
        return_lse=return_lse,
    )


def _with_batch(*tensors: Tensor) -> list[Tensor]:
    """The tensors (tokens, heads, head_dim) as a batch of one row."""
    for name, x in zip(("q", "k", "v"), tensors, strict=True):
        checks.ndim(name, x, "(tokens, heads, head_dim)")
    return [x[None] for x in tensors]


def _check_plan(plan):
    if not isinstance(plan, Plan):
        raise TypeError(f"plan must be a flash_attn.context_parallel.Plan, found {type(plan).__name__}")


def _check_tensors(plan, q, k, v):
    """Check the shapes of this rank's tensors."""
    layout = "(batch, tokens, heads, head_dim)"
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.ndim(name, x, layout)
    batch, _, heads, head_dim = q.shape
    most = flash_attn.MAX_HEAD_DIM
    for name, x in (("q", q), ("k", k), ("v", v)):
        checks.number(f"{name}.shape[1]", x.shape[1], x.shape[1] == plan.tokens, "plan.tokens, {}", plan.tokens)
        checks.number(f"{name}'s head_dim", x.shape[3], 1 <= x.shape[3] <= most, "between 1 and {}", most)
    checks.has_shape("k", k, (batch, None, None, head_dim))
    checks.has_shape("v", v, (batch, None, k.shape[2], None))
    divides = k.shape[2] > 0 and heads % k.shape[2] == 0
    checks.number("k's number of heads", k.shape[2], divides, "a divisor of q's, {}", heads)


def merge_attention(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Merge results of attention over parts of the keys: `flash_attn.functional.combine` of lists.

    Arguments:
        outs: each (.., seqlen_q, heads, head_dim), packed or dense.
        lses: each (.., heads, seqlen_q); +inf or -inf where a row sees no key of that part.

    Returns:
        (out, lse) over all keys, as `flash_attn.functional.combine` does. Differentiable.

    Raises:
        ValueError, TypeError: what `flash_attn.functional.combine` raises, and for lists of different lengths.

    Example:
        >>> from flash_attn import flash_attn_func
        >>> from flash_attn.context_parallel import merge_attention
        >>> q, k, v = torch.randn(3, 1, 8, 2, 16)
        >>> parts = [flash_attn_func(q, k[:, rows], v[:, rows], return_lse=True) for rows in (slice(0, 3), slice(3, 8))]
        >>> out, lse = merge_attention(*zip(*parts))
        >>> torch.allclose(out, flash_attn_func(q, k, v), atol=1e-6)
        True
    """
    checks.number("the number of lses", len(lses), len(lses) == len(outs) > 0, "that of outs, {}", len(outs))
    return combine(torch.stack(list(outs)), torch.stack(list(lses)))


# ---------------------------------------------------------------------------------------------------------------------
# gather


def _for_each_group(plan, schedule, k, v, groups, compute):
    """Call compute(i, keys, values) for each group of heads, with views (batch, fetched, heads of the group, head_dim).

    It returns None, or a function that waits for what it has sent home.

    Within a host a group waits for its transfers, and the next one for its own. Beside attention a transfer costs more
    than it takes alone: ranks end their launches at different times, and until a transfer has begun on all, it occupies
    multiprocessors of those where it has. Over slower links (plan.overlaps) the transfers of one group run beside
    another group.
    """
    tokens, batch, sizes = plan.own_tokens, k.shape[0], (k.shape[3], v.shape[3])
    heads = k.shape[2] // groups
    width = batch * heads * sum(sizes)
    rows = k.new_empty(groups, tokens, width)  # a row is what is sent of a token
    for target, x in zip(_keys_and_values(rows, batch, sizes), (k, v), strict=True):
        target.copy_(x[:, :tokens].unflatten(2, (groups, heads)).permute(2, 1, 0, 3, 4))
    ahead = int(plan.overlaps)
    arriving, returning = [], []
    for i in range(groups):
        for later in rows[i + len(arriving) : i + ahead + 1]:
            arriving.append(schedule.exchange.fetch(later))
        fetched = [x.transpose(0, 1) for x in _keys_and_values(arriving.pop(0)(), batch, sizes)]
        returning.append(compute(i, *fetched))
        del fetched
        if len(returning) > ahead and (wait := returning.pop(0)):
            wait()
    for wait in filter(None, returning):
        wait()


def _keys_and_values(rows, batch, sizes):
    """Views (.., batch, heads, size) of the keys and of the values in rows (.., width)."""
    heads = rows.shape[-1] // (batch * sum(sizes))
    parts = rows.split([batch * heads * size for size in sizes], -1)
    return [part.unflatten(-1, (batch, heads, size)) for part, size in zip(parts, sizes, strict=True)]


def _part(x, rows, launch):
    """The rows of x (batch, tokens, heads, head_dim) as a launch takes them: packed, if it has several entries.

    A view, or a copy if rows of a batch are packed.
    """
    x = x[:, rows]
    return x.flatten(0, 1) if launch.lengths else x


def _put_back(x, rows, launch, part):
    """Write what a launch has written to `_part` of x, if that is a copy."""
    if launch.lengths and x.shape[0] > 1:
        x[:, rows] = part.unflatten(0, (x.shape[0], -1))


def _unpacked_lse(lse, batch):
    """softmax_lse (batch, heads, rows) of a launch; (heads, batch * rows) if it was packed."""
    return lse if lse.dim() == 3 else lse.unflatten(1, (batch, -1)).transpose(0, 1)


def _packed_lse(lse, launch):
    """softmax_lse (batch, heads, rows) as a launch takes it."""
    return (lse.transpose(0, 1).flatten(1) if launch.lengths else lse).contiguous()


def _gathered_attention(q, k, v, sink, plan, softmax_scale, window, softcap, chunk, deterministic):
    """out and softmax_lse of attention by "gather"."""
    head_bytes = plan.total * q.shape[0] * (k.shape[3] + v.shape[3]) * q.element_size()
    groups = plan.groups_of_heads(k.shape[2], head_bytes)
    fits = k.shape[2] % groups == 0
    checks.number("head_groups of the plan", groups, fits, "a divisor of the heads of k, {}", k.shape[2])
    options = plan.handle, softmax_scale, *window, softcap, chunk, groups, deterministic
    if q.dtype in flash_attn.KERNEL_DTYPES and not _has_kernel(q):  # out is kept in float32, and so are sums
        out, lse = _gather(q.float(), k.float(), v.float(), sink, *options)
        return out.to(q.dtype), lse
    return _gather(q, k, v, sink, *options)


def _has_kernel(q):
    """Whether kernels compute attention of q, as far as a graph may know it."""
    if torch.compiler.is_compiling():
        return _library.is_where_kernels_run(q)
    return _library.runs_in_kernel("bwd", q)


@torch.library.custom_op(f"{_NAMESPACE}::gather", mutates_args=())
def _gather(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    plan: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    chunk: int,
    groups: int,
    deterministic: bool,
) -> tuple[Tensor, Tensor]:
    """out and softmax_lse of attention by "gather". plan: the handle of one. groups: of heads.

    k and v may be float32 with values of the dtype of q, so that their gradients are not rounded.
    """
    the_plan = plan_of(plan)
    batch, tokens, heads, _ = q.shape
    schedule = the_plan.schedule((window_left, window_right), chunk, batch, q.device)
    k, v = k.to(q.dtype), v.to(q.dtype)
    out, lse = _gather_fake(q, k, v)
    out[:, the_plan.own_tokens :] = 0
    lse[:, :, the_plan.own_tokens :] = math.inf
    share = heads // groups

    def compute(i: int, keys: Tensor, values: Tensor) -> None:
        own = slice(i * share, (i + 1) * share)
        for launch in schedule.launches:
            given = FeatureArguments(
                learnable_sink=None if sink is None else sink[own], key_ranges=launch.key_ranges, return_lse=True
            )
            part_q, part_out = (_part(x[:, :, own], launch.rows, launch) for x in (q, out))
            part_k, part_v = (_part(x, launch.keys, launch) for x in (keys, values))
            _, found_lse, *_ = flash_attn.forward(
                part_q, part_k, part_v, softmax_scale, False, launch.window, False, given, part_out,
                softcap=softcap, **launch.lengths,
            )  # fmt: skip
            _put_back(out[:, :, own], launch.rows, launch, part_out)
            lse[:, own, launch.rows] = _unpacked_lse(found_lse, batch)

    _for_each_group(the_plan, schedule, k, v, groups, compute)
    return out, lse


@_gather.register_fake
def _gather_fake(q, k, v, *_):
    batch, tokens, heads, _ = q.shape
    return q.new_empty(batch, tokens, heads, v.shape[3]), q.new_empty(batch, heads, tokens, dtype=torch.float32)


@torch.library.custom_op(f"{_NAMESPACE}::gather_backward", mutates_args=())
def _gather_backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    plan: Tensor,
    softmax_scale: float,
    window_left: int,
    window_right: int,
    softcap: float,
    chunk: int,
    groups: int,
    deterministic: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, and of k and v in this dtype. softmax_lse counts the sink, if there is one."""
    the_plan = plan_of(plan)
    own_tokens, batch = the_plan.own_tokens, q.shape[0]
    schedule = the_plan.schedule((window_left, window_right), chunk, batch, q.device)
    new = torch.zeros_like if own_tokens < q.shape[1] else torch.empty_like
    dq, dk, dv = new(q), new(k, dtype=dtype), new(v, dtype=dtype)
    heads, heads_k = (x.shape[2] // groups for x in (q, k))
    sizes = k.shape[3], v.shape[3]

    def compute(i: int, keys: Tensor, values: Tensor) -> Callable[[], None]:
        own, own_k = slice(i * heads, (i + 1) * heads), slice(i * heads_k, (i + 1) * heads_k)
        sums = q.new_empty(schedule.exchange.num_sums, batch * heads_k * sum(sizes), dtype=torch.float32)
        dk_sums, dv_sums = (x.transpose(0, 1) for x in _keys_and_values(sums, batch, sizes))
        written = schedule.launches[0].keys if schedule.launches else slice(0, 0)  # the others add to it, or to zeros
        sums[: written.start].zero_()
        sums[written.stop :].zero_()
        for launch in schedule.launches:
            part_dout, part_q, part_out = (_part(x[:, :, own], launch.rows, launch) for x in (dout, q, out))
            part_k, part_v = (_part(x, launch.keys, launch) for x in (keys, values))
            part_lse = _packed_lse(softmax_lse[:, own, launch.rows], launch)
            part_dlse = None if dlse is None else _packed_lse(dlse[:, own, launch.rows], launch)
            targets = (dq[:, :, own], launch.rows), (dk_sums, launch.keys), (dv_sums, launch.keys)
            grads = part_dq, part_dk, part_dv = [_part(x, rows, launch) for x, rows in targets]
            given = FeatureArguments(key_ranges=launch.key_ranges)
            flash_attn.backward(
                part_dout, part_q, part_k, part_v, part_out, part_lse, part_dq, part_dk, part_dv,
                softmax_scale, False, launch.window, None, part_dlse, given,
                launch is not schedule.launches[0], softcap=softcap, deterministic=deterministic, **launch.lengths,
            )  # fmt: skip
            for (x, rows), grad in zip(targets, grads, strict=True):
                _put_back(x, rows, launch, grad)
        home = schedule.exchange.give_back(sums)

        def arrive() -> None:
            for x, part in zip((dk, dv), _keys_and_values(home(), batch, sizes), strict=True):
                x[:, :own_tokens, own_k] = part.transpose(0, 1)

        return arrive

    _for_each_group(the_plan, schedule, k, v, groups, compute)
    return dq, dk, dv


@_gather_backward.register_fake
def _(dout, dlse, q, k, v, *others):
    dtype = others[-1]
    return torch.empty_like(q), torch.empty_like(k, dtype=dtype), torch.empty_like(v, dtype=dtype)


def _kept(handle):
    """The plan with this handle, for a backward to hold on to; None in a trace, where the handle has no value."""
    return plan_of(handle) if type(handle) is Tensor else None


def _keep_for_backward(ctx, inputs, output):
    q, k, v, sink, plan, *options = inputs
    ctx.save_for_backward(q, k.to(q.dtype), v.to(q.dtype), sink, plan, *output)
    ctx.options = options
    ctx.dtype = k.dtype
    ctx.plan = _kept(plan)
    ctx.set_materialize_grads(False)


def _backward_of_gather(ctx, dout, dlse):
    q, k, v, sink, plan, out, lse = ctx.saved_tensors
    dout = torch.zeros_like(out) if dout is None else dout
    if dout.stride(-1) != 1:
        dout = dout.contiguous()
    grads = _gather_backward(dout, dlse, q, k, v, out, lse, plan, *ctx.options, ctx.dtype)
    dsink = None
    if sink is not None and ctx.needs_input_grad[3]:
        delta = torch.einsum("bthd,bthd->bht", dout.float(), out.float())
        delta = delta if dlse is None else delta - dlse
        weight = (sink.float()[:, None] - lse).exp()  # 0 where lse is +inf
        dsink = -(weight * delta).sum((0, 2)).to(sink.dtype)
    return *grads, dsink, *(None,) * (1 + len(ctx.options))


_gather.register_autograd(_backward_of_gather, setup_context=_keep_for_backward)


# ---------------------------------------------------------------------------------------------------------------------
# ulysses


@torch.library.custom_op(f"{_NAMESPACE}::exchange", mutates_args=())
def _exchange(
    x: Tensor,
    plan: Tensor,
    heads: int,
    heads_k: int,
    of_keys: bool,
    to_heads: bool,
    rows: int,
    count: int,
    dtype: torch.dtype,
) -> Tensor:
    """x with tokens exchanged for heads, or back: (batch, rows, count, width). plan: the handle of one.

    heads, heads_k: those of q and k. of_keys: whether x are keys or values. dtype: of the result; sent is that of x.
    """
    exchange = plan_of(plan).head_exchange(heads, heads_k, of_keys, x.device)
    return (exchange.to_heads if to_heads else exchange.to_tokens)(x).to(dtype).contiguous()


@_exchange.register_fake
def _(x, plan, heads, heads_k, of_keys, to_heads, rows, count, dtype):
    return x.new_empty(x.shape[0], rows, count, x.shape[3], dtype=dtype)


def _keep_exchange(ctx, inputs, output):
    x, ctx.handle, *ctx.how, to_heads, _, _, _ = inputs
    ctx.back = not to_heads, x.shape[1], x.shape[2], x.dtype
    ctx.plan = _kept(ctx.handle)


def _backward_of_exchange(ctx, grad):
    return _exchange(grad, ctx.handle, *ctx.how, *ctx.back), *(None,) * 8


_exchange.register_autograd(_backward_of_exchange, setup_context=_keep_exchange)


def _ulysses(q, k, v, sink, plan, softmax_scale, window, chunk, dropout_p, slopes, deterministic, softcap, wants_lse):
    """out and softmax_lse, or None if that is not wanted, of attention by "ulysses", or within "usp" by "gather".

    Where a key head comes several times, the gradients of its copies are added on the way home. They must not be
    rounded before, so the copies are float32: as keys and values they are rounded back at once, without loss.
    """
    batch, _, heads, _ = q.shape
    sizes = heads, k.shape[2]
    ranks, rank = plan.ranks_of_heads
    queries, keys = heads_of_ranks(*sizes, ranks)
    own = queries[rank]
    rows = plan.total if plan.inner is None else plan.inner.tokens
    has_copies = sum(map(len, keys)) > k.shape[2]
    in_float = has_copies and torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    dtype = torch.float32 if in_float else k.dtype
    q = _exchange(q, plan.handle, *sizes, False, True, rows, len(own), q.dtype)
    k, v = (_exchange(x, plan.handle, *sizes, True, True, rows, len(keys[rank]), dtype) for x in (k, v))
    part = slice(own[0], own[-1] + 1)
    sink = None if sink is None else sink[part]
    if plan.inner is not None:
        scores = softmax_scale, window, softcap, chunk, deterministic
        out, lse = _gathered_attention(q, k, v, sink, plan.inner, *scores)
    else:
        options: dict[str, Any] = dict(softcap=softcap, deterministic=deterministic, dropout_p=dropout_p)
        if slopes is not None:
            options["alibi_slopes"] = slopes[..., part].contiguous()
        if dropout_p:
            options["rng_state"] = rng.draw_state(q.device) + _SKIPPED.to(q.device) * batch * own[0]
        out, lse = _whole_attention(q, k, v, sink, plan, softmax_scale, window, chunk, options)
    out = _exchange(out, plan.handle, *sizes, False, False, plan.tokens, heads, out.dtype)
    if not wants_lse:
        return out, None
    lse = _exchange(lse.transpose(1, 2)[..., None], plan.handle, *sizes, False, False, plan.tokens, heads, lse.dtype)
    lse = lse[..., 0].transpose(1, 2)[..., : plan.own_tokens]
    return out, F.pad(lse, (0, plan.tokens - plan.own_tokens), value=math.inf)


def _whole_attention(q, k, v, sink, plan, softmax_scale, window, chunk, options):
    """out and softmax_lse of whole rows (batch, positions, heads, head_dim), whose documents are those of the plan."""
    batch = q.shape[0]
    if plan.is_packed:  # not read from seqlens: a graph would be of one number of documents
        starts, longest = plan.cu_seqlens(batch, q.device), plan.longest
        q, k, v = (x.flatten(0, 1) for x in (q, k, v))
        options = options | dict(cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=longest, max_seqlen_k=longest)
    given = FeatureArguments(sink, attention_chunk=chunk, return_lse=True)
    in_float = k.dtype != q.dtype
    out, lse, *_ = flash_attn.forward(q, k, v, softmax_scale, False, window, False, given, None, in_float, **options)
    if plan.is_packed:
        out, lse = out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)
    return out, lse


# How far the random numbers of a head are apart, in (seed, offset): those of another rank must not be the same.
_SKIPPED = torch.tensor([0, 32])
