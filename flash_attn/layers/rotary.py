"""Rotary position embedding: functions with autograd and the module that keeps their tables.

Each pair (a, b) of channels of a token at position m turns by the angles t of row m of the tables,

    (a, b) -> (a cos t - b sin t, a sin t + b cos t),

so that products of queries and keys depend on relative positions (Su et al., RoFormer, arXiv:2104.09864). The tables
cos and sin have shape (positions, rotary_dim / 2); channels past rotary_dim are left alone. Pairs are
(i, i + rotary_dim / 2), as in GPT-NeoX and Llama, or with `interleaved` (2i, 2i + 1), as in GPT-J. The default is the
first here and in the modules, but the second in `flash_attn_with_kvcache` (rotary_interleaved=True), as in flash-attn:
pass it there.

    rotary = RotaryEmbedding(dim=64)
    qkv = rotary(torch.randn(2, 512, 3, 8, 64))     # queries and keys are rotated, in place

Functions that write in place accept leaves that require grad, and views. Use the returned tensor afterwards: the leaf
or view then holds the rotated numbers, but autograd treats it as the tensor before the rotation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import rearrange, repeat
from torch import Tensor

from flash_attn import _torch_private
from flash_attn._ops import autograd, checks, invariance, rotary, sharding


def rotate_half(x: Tensor, interleaved: bool = False) -> Tensor:
    """Turn every pair by 90 degrees, (a, b) -> (-b, a), in the last dimension of x.

    interleaved: pairs are neighbours (2t, 2t + 1), else the two halves (t, t + size / 2).

    Example:
        >>> from flash_attn.layers.rotary import rotate_half
        >>> rotate_half(torch.tensor([1, 2, 3, 4])), rotate_half(torch.tensor([1, 2, 3, 4]), interleaved=True)
        (tensor([-3, -4,  1,  2]), tensor([-2,  1, -4,  3]))
    """
    if not interleaved:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((-b, a), dim=-1)
    a, b = x[..., ::2], x[..., 1::2]
    return rearrange(torch.stack((-b, a), dim=-1), "... pairs two -> ... (pairs two)", two=2)


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """The rotation spelled out in torch operations, in the dtype of the arguments.

    Arguments:
        x: (batch, seqlen, heads, head_dim).
        cos, sin: (seqlen, rotary_dim / 2) or (batch, seqlen, rotary_dim / 2), one row for each token.
        interleaved: rotate pairs (2t, 2t + 1) if true, else (t, t + rotary_dim / 2).
    Returns a new tensor like x. Raises ValueError if rotary_dim exceeds head_dim.

    Example:
        >>> from flash_attn.layers.rotary import apply_rotary_emb, apply_rotary_emb_torch
        >>> x, angles = torch.randn(2, 10, 4, 32), torch.outer(torch.arange(10.0), 10000 ** -torch.linspace(0, 1, 16))
        >>> expected = apply_rotary_emb_torch(x, angles.cos(), angles.sin())
        >>> torch.allclose(apply_rotary_emb(x, angles.cos(), angles.sin()), expected, atol=1e-6)
        True
    """
    rotary_dim = 2 * cos.shape[-1]
    if rotary_dim > x.shape[-1]:
        raise ValueError(f"cos must have at most head_dim / 2 = {x.shape[-1] // 2} columns, found {cos.shape[-1]}")
    pattern = "... columns -> ... 1 (columns two)" if interleaved else "... columns -> ... 1 (two columns)"
    cos, sin = repeat(cos, pattern, two=2), repeat(sin, pattern, two=2)
    turning, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    return torch.cat((turning * cos + rotate_half(turning, interleaved) * sin, rest), dim=-1)


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate x, differentiably in x.

    Arguments:
        x: (batch, seqlen, heads, head_dim), or (tokens, heads, head_dim) with cu_seqlens; any floating-point dtype and
            strides.
        cos, sin: (positions, rotary_dim / 2), rotary_dim <= head_dim; any floating-point dtype. The maths is in
            float32 whatever the dtypes, but in float64, and in plain torch, for an x in float64.
        interleaved: the pairs are (2i, 2i + 1) instead of (i, i + rotary_dim / 2), the default here; that of
            `flash_attn_with_kvcache` is the other.
        inplace: write into x, even if it is a leaf that requires grad. Use the returned tensor afterwards: if x is a
            leaf or a view, autograd does not know that it was rotated.
        seqlen_offsets: position of the first token of every sequence, an integer or an int32 or int64 tensor (batch,)
            or without dimensions. With an integer, the tables must have a row for every token; with a tensor, tokens
            past the end of the tables stay unchanged.
        cu_seqlens: (batch + 1,) int32, where each sequence starts in x. Tokens before the first and after the last
            entry stay as they are.
        max_seqlen: length of the longest packed sequence, an integer or an integer tensor without dimensions;
            needed with cu_seqlens.

    Returns the rotated tensor, of the shape and dtype of x; if inplace, it shares the memory of x.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.layers.rotary import apply_rotary_emb
    >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
    >>> apply_rotary_emb(torch.randn(2, 16, 4, 64), angles.cos(), angles.sin()).shape
    torch.Size([2, 16, 4, 64])
    """
    if inplace:
        return _rotate_in_place(_WHOLE, x, (cos, sin), interleaved, seqlen_offsets, cu_seqlens, max_seqlen)
    checks.flags(interleaved=interleaved)
    arguments = rotary.arguments(x, cos, sin, seqlen_offsets, cu_seqlens, max_seqlen)
    return rotary.rotary(*arguments, bool(interleaved), False)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Rotate the queries and keys of a packed tensor in place, differentiably in qkv.

    Arguments:
        qkv: (batch, seqlen, 3, heads, head_dim), or (batch, seqlen, heads_q + 2 heads_k, head_dim) with the heads of
            queries, keys, values in this order. With cu_seqlens, (tokens, ...) instead of (batch, seqlen, ...).
        cos, sin: (positions, rotary_dim / 2).
        cos_k, sin_k: tables of their own for the keys, as xPos has them.
        num_heads_q: heads_q; needed if qkv has one dimension of heads only.
        interleaved, seqlen_offsets, cu_seqlens, max_seqlen: as in `apply_rotary_emb`.

    Returns the rotated tensor, in the memory of qkv; use it afterwards instead of qkv. Queries and keys that are
    neighbours in memory and share their tables are rotated in one call.

    Raises TypeError or ValueError for arguments that do not fit together.

    >>> from flash_attn.layers.rotary import apply_rotary_emb_qkv_
    >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
    >>> qkv = apply_rotary_emb_qkv_(torch.randn(2, 16, 3, 4, 64), angles.cos(), angles.sin())
    >>> qkv.shape
    torch.Size([2, 16, 3, 4, 64])
    """
    separate = _check_packed(qkv, num_heads_q, cu_seqlens)
    if (cos_k is None) != (sin_k is None):
        raise ValueError("cos_k and sin_k must be given together, found only one of them")
    tables = (cos, sin) if cos_k is None else (cos, sin, cos_k, sin_k)
    layout = _THREE if separate else _heads(num_heads_q)
    return _rotate_in_place(layout, qkv, tables, interleaved, seqlen_offsets, cu_seqlens, max_seqlen)


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Rotate the keys of kv (batch, seqlen, 2, heads_k, head_dim) in place, differentiably in kv.

    The other arguments and the errors are the same as in `apply_rotary_emb`. Returns the rotated tensor, in the memory
    of kv; use it afterwards instead of kv.

    >>> from flash_attn.layers.rotary import apply_rotary_emb_kv_
    >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
    >>> apply_rotary_emb_kv_(torch.randn(2, 16, 2, 4, 64), angles.cos(), angles.sin()).shape
    torch.Size([2, 16, 2, 4, 64])
    """
    checks.tensor("kv", kv, shape=(None, None, 2, None, None))
    return _rotate_in_place(_KEYS_AND_VALUES, kv, (cos, sin), interleaved, seqlen_offsets)


class ApplyRotaryEmb:
    """`ApplyRotaryEmb.apply` is `apply_rotary_emb`.

    Example:
        >>> from flash_attn.layers.rotary import ApplyRotaryEmb
        >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
        >>> ApplyRotaryEmb.apply(torch.randn(2, 16, 4, 64), angles.cos(), angles.sin()).shape
        torch.Size([2, 16, 4, 64])
    """

    apply = staticmethod(apply_rotary_emb)


class ApplyRotaryEmbQKV_:
    """`ApplyRotaryEmbQKV_.apply` is `apply_rotary_emb_qkv_`.

    Example:
        >>> from flash_attn.layers.rotary import ApplyRotaryEmbQKV_
        >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
        >>> ApplyRotaryEmbQKV_.apply(torch.randn(2, 16, 3, 4, 64), angles.cos(), angles.sin()).shape
        torch.Size([2, 16, 3, 4, 64])
    """

    apply = staticmethod(apply_rotary_emb_qkv_)


class ApplyRotaryEmbKV_:
    """`ApplyRotaryEmbKV_.apply` is `apply_rotary_emb_kv_`.

    Example:
        >>> from flash_attn.layers.rotary import ApplyRotaryEmbKV_
        >>> angles = torch.outer(torch.arange(16), 10000 ** -torch.linspace(0, 1, 32))
        >>> ApplyRotaryEmbKV_.apply(torch.randn(2, 16, 2, 4, 64), angles.cos(), angles.sin()).shape
        torch.Size([2, 16, 2, 4, 64])
    """

    apply = staticmethod(apply_rotary_emb_kv_)


class RotaryEmbedding(torch.nn.Module):
    """Rotary embedding with tables that grow with the sequences it meets.

    Arguments:
        dim: channels that rotate, rotary_dim; a whole number, positive and even.
        base: the angle of pair j at position m is m * base ** (-2j / dim).
        interleaved: the pairs are (2i, 2i + 1) instead of (i, i + dim / 2), the default here; that of
            `flash_attn_with_kvcache` is the other.
        scale_base: if not None, queries and keys are also scaled, reciprocally, so that their products decay with
            distance (Sun et al., xPos, arXiv:2212.10554); 512 is the paper's value.
        device: where the buffers are kept.
        pos_idx_in_fp32: accepted for callers that pass it, and kept as an attribute. Positions have at least float32 in
            either case: with False, older versions computed the angles in the dtype of the model, where bfloat16 rounds
            positions past 256.

    The module has no parameters and adds nothing to a state dict. The tables are kept in the dtype of the input. They
    are computed, in float32, or in float64 for an input in float64, from the float32 buffers inv_freq (dim / 2,) and
    scale (dim / 2,) or None. A buffer that is replaced by a float32 or float64 tensor, or changed in place, counts from
    the next call on, but a change through `.data` is not seen. A cast of the module leaves the buffers in float32. A
    module made on the meta device must be moved before its buffers are replaced: until then, their values are computed
    anew.

    A subclass may override `_compute_inv_freq(device)` and `_compute_scale(device)`, which give the values of the
    buffers, and `_update_cos_sin_cache`, which makes the tables.

    Raises TypeError or ValueError for arguments that do not fit.

    >>> from flash_attn.layers.rotary import RotaryEmbedding
    >>> RotaryEmbedding(64)(torch.randn(2, 16, 3, 4, 64)).shape
    torch.Size([2, 16, 3, 4, 64])
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
        *,
        pos_idx_in_fp32: bool = True,
    ) -> None:
        super().__init__()
        dim = int(checks.whole("dim", dim))
        checks.number("dim", dim, dim > 0 and dim % 2 == 0, "positive and even")
        for name, value in (("base", base), ("scale_base", 512 if scale_base is None else scale_base)):
            checks.number(name, value, checks.as_float(name, value) > 0, "positive")
        checks.flags(pos_idx_in_fp32=pos_idx_in_fp32)
        if isinstance(device, bool):  # pos_idx_in_fp32 had this place once; torch would take True for the second GPU
            raise TypeError(f"device must be a device or None, found {device}: pass pos_idx_in_fp32 by its name")
        self.dim = dim
        self.base = float(base)
        self.interleaved = interleaved
        self.scale_base = None if scale_base is None else float(scale_base)
        self.pos_idx_in_fp32 = pos_idx_in_fp32
        self.register_buffer("inv_freq", self._compute_inv_freq(device=device), persistent=False)
        scale = None if scale_base is None else self._compute_scale(device=device)
        self.register_buffer("scale", scale, persistent=False)
        self._has_values = not self.inv_freq.is_meta
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None
        self._built_from: tuple[
            tuple[Tensor | None, int], ...
        ] = ()  # the buffers that the tables were computed from, each with its version
        self._made_in_graph = False  # whether a compiled graph has made the tables

    def extra_repr(self) -> str:
        """The options that a printed module shows."""
        return f"{self.dim}, base={self.base}, interleaved={self.interleaved}, scale_base={self.scale_base}"

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Rotate queries and keys in place.

        Arguments:
            qkv: packed as `apply_rotary_emb_qkv_` takes it; with kv, the queries (batch, seqlen, heads, head_dim).
            kv: (batch, seqlen_k, 2, heads_k, head_dim).
            seqlen_offset: position of the first token, an integer or an int32 or int64 tensor (batch,) or without
                dimensions.
            max_seqlen: the tables get this many rows; an integer, or an integer tensor without dimensions, which is
                read from the device. By default, an integer seqlen_offset sets the number of rows; with a tensor as
                seqlen_offset the tables keep their size. A loop that decodes token by token should pass the greatest
                length that it may reach: without it, every step computes all rows again, and with scale_base it also
                moves the position with scale 1, so that keys rotated earlier are scaled wrongly.
            num_heads_q: number of query heads, needed if qkv is (batch, seqlen, heads_q + 2 heads_k, head_dim).
            cu_seqlens: (batch + 1,) int32, where each sequence starts in qkv, (tokens, ...) then; needs max_seqlen.
                Not with kv and seqlen_offset.

        Returns qkv, or (qkv, kv) if kv is given, in the same memory. Use the returned tensors afterwards.

        Raises TypeError or ValueError for arguments that do not fit together.
        """
        if isinstance(max_seqlen, Tensor):
            checks.tensor("max_seqlen", max_seqlen, dtypes=checks.INTEGER_DTYPES, shape=())
            max_seqlen = int(max_seqlen.item())  # not the tensor, since its value may change before the next call
        elif max_seqlen is not None:
            max_seqlen = checks.whole("max_seqlen", max_seqlen)
        if not isinstance(seqlen_offset, Tensor):
            seqlen_offset = checks.whole("seqlen_offset", seqlen_offset, "an integer or an integer tensor")
        _check_call(qkv, kv, seqlen_offset, max_seqlen, cu_seqlens)
        cos, sin, cos_k, sin_k = self._tables_for(qkv, kv, seqlen_offset, max_seqlen)
        if kv is None:
            return apply_rotary_emb_qkv_(
                qkv, cos, sin, cos_k, sin_k, self.interleaved, seqlen_offset, num_heads_q, cu_seqlens, max_seqlen
            )
        keys = (cos, sin) if self.scale_base is None else (cos_k, sin_k)
        checked = [
            _checked(layout, x, tables, self.interleaved, seqlen_offset)
            for layout, x, tables in ((_QUERIES, qkv, (cos, sin)), (_KEYS_AND_VALUES, kv, keys))
        ]  # both are checked before either is written
        return _rotate(*checked[0]), _rotate(*checked[1])

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the angle between neighbouring positions for each pair of channels, (dim / 2,) float32."""
        return 1.0 / self.base ** (torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _compute_scale(self, device: torch.device | str | None = None) -> Tensor:
        """Returns the base of the decay for each pair of channels, (dim / 2,) float32."""
        even = torch.arange(0, self.dim, 2, device=device, dtype=torch.float32)
        return (even + 0.4 * self.dim) / (1.4 * self.dim)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "RotaryEmbedding":
        """Moves the buffers to where `fn` puts them, but keeps their values: casts round them, to_empty loses them."""
        before = self.inv_freq, self.scale
        super()._apply(fn, recurse)
        device = self.inv_freq.device
        if self.inv_freq.is_meta:
            self._has_values = False
        elif self._has_values:
            self.inv_freq = before[0].to(device)
            self.scale = None if before[1] is None else before[1].to(device)
        else:
            self.inv_freq = self._compute_inv_freq(device=device)
            self.scale = None if self.scale is None else self._compute_scale(device=device)
            self._has_values = True
        return self

    def _values(self, buffer: Any, compute: Callable[..., Tensor], device: torch.device) -> Tensor:
        """Returns the values of a buffer on `device`.

        They are computed again if the buffer does not hold them: some loaders replace buffers on the meta device by
        uninitialised memory, and some wrappers cast buffers without calling the module.
        """
        is_valid = self._has_values and buffer.dtype in (torch.float32, torch.float64)
        return buffer.to(device, torch.float32) if is_valid else compute(device=device)

    def _tables_for(
        self, qkv: Tensor, kv: Tensor | None, seqlen_offset: int | Tensor, max_seqlen: int | None
    ) -> tuple[Any, ...]:
        """Returns (cos, sin, cos_k, sin_k) for the arguments of `forward`."""
        if max_seqlen is not None:
            return self._tables(max_seqlen, qkv.device, qkv.dtype)
        if not isinstance(seqlen_offset, Tensor):
            seqlen = qkv.shape[1] if kv is None else max(qkv.shape[1], kv.shape[1])
            return self._tables(seqlen + seqlen_offset, qkv.device, qkv.dtype)
        if self._cos_cached is None:
            raise ValueError("max_seqlen must be given with a tensor seqlen_offset until the tables exist, found None")
        return self._tables(len(self._cos_cached), qkv.device, qkv.dtype)

    def _tables(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns (cos, sin, cos_k, sin_k) with at least `seqlen` rows; the last two are None without scale_base."""
        if self.scale_base is not None:
            invariance.refuse_angles_of_length(f"scale_base={self.scale_base}")
        if torch.compiler.is_compiling():
            return self._tables_of_graph(seqlen, device, dtype)
        self._update_cos_sin_cache(seqlen, device=device, dtype=dtype)
        return self._cached_tables()

    def _tables_of_graph(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns what `_tables` does; the compiled graph makes the tables, and the module keeps none of them.

        The tables of the module grow, and each size would need a new graph. And what a CUDA graph returns, as with
        torch.compile(mode="reduce-overhead"), is overwritten when it runs again. (Before torch 2.13, a subclass with a
        cache of its own keeps what a graph has made.)
        """
        if type(self)._update_cos_sin_cache is RotaryEmbedding._update_cos_sin_cache:
            return self._computed_tables(seqlen, device, dtype)
        if not _torch_private.graphs_see_attributes:
            self._update_cos_sin_cache(seqlen, device=device, dtype=dtype)
            return self._cached_tables()
        before = dict(vars(self))
        # The buffers of a module are in such a dictionary, and a subclass may keep tables in one.
        contents = [(each, dict(each)) for each in before.values() if isinstance(each, dict)]
        self._update_cos_sin_cache(seqlen, device=device, dtype=dtype)
        tables = self._cached_tables()
        for name, value in dict(vars(self)).items():  # a subclass may keep more than the tables
            if name not in before and not hasattr(type(self), name):
                delattr(self, name)
            elif value is not (old := before.get(name, getattr(type(self), name, None))):
                setattr(self, name, old)
        for each, entries in contents:
            for key, value in dict(each).items():
                if key not in entries:
                    del each[key]
                elif value is not entries[key]:
                    each[key] = entries[key]
        return tables

    def _tables_for_decoding(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns what `_tables` does; a compiled step takes the tables that the prompt has left, if they fit.

        Otherwise it would compute the angles of a whole cache for each token. The graph depends only on the shape of
        the tables, as a symbolic size, so tables that grow need no new graph.
        """
        table = self._cos_cached
        if torch.compiler.is_compiling() and table is not None and not self._made_in_graph:
            if self._serves(table.shape[0], seqlen) and table.dtype == dtype and table.device == device:
                return self._cached_tables()
        return self._tables(seqlen, device, dtype)

    def _cached_tables(self) -> tuple[Any, ...]:
        return self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Gives the tables at least `seqlen` rows, on `device`, in `dtype`; both default to inv_freq's.

        A compiled graph that calls this makes tables for itself, which no other call uses: see `_tables_of_graph`.
        """
        device = self.inv_freq.device if device is None else torch.device(device)
        if device.index is None:  # "cuda" means the current device
            device = torch.empty(0, device=device).device
        dtype = self.inv_freq.dtype if dtype is None else dtype
        in_graph = torch.compiler.is_compiling()
        if not in_graph and not self._is_stale(seqlen, device, dtype):
            return
        # All tables are computed before any is replaced, since memory may run out.
        tables = self._computed_tables(seqlen, device, dtype)
        self._cos_cached, self._sin_cached, self._cos_k_cached, self._sin_k_cached = tables
        self._seq_len_cached, self._made_in_graph = seqlen, in_graph
        if not in_graph:
            self._built_from = tuple((buffer, _version(buffer)) for buffer in (self.inv_freq, self.scale))

    def _frequencies(self, seqlen: int, device: torch.device) -> Tensor:
        """Returns the angle between neighbouring positions for each pair, for tables with `seqlen` rows."""
        return self._values(self.inv_freq, self._compute_inv_freq, device)

    def _serves(self, rows: int, seqlen: int) -> bool:
        """Returns whether tables with `rows` rows serve a sequence of this length. Subclasses may ask for more."""
        return rows >= seqlen

    def _rows_at(self, position_ids: Tensor, seqlen: int, dtype: torch.dtype) -> tuple[Any, ...]:
        """Returns what `_tables` does, but with a row for each of these positions (tokens,), all less than seqlen.

        No table of seqlen rows is made, unless a subclass has a cache of its own.
        """
        if type(self)._update_cos_sin_cache is RotaryEmbedding._update_cos_sin_cache and not invariance.level():
            return self._computed_tables(seqlen, position_ids.device, dtype, position_ids)
        tables = self._tables(seqlen, position_ids.device, dtype)
        return tuple(None if table is None else table.index_select(0, position_ids) for table in tables)

    def _computed_tables(
        self, seqlen: int, device: torch.device, dtype: torch.dtype, position: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Returns the tables for these positions; None: 0 to seqlen - 1."""
        accurate = torch.promote_types(dtype, torch.float32)
        position = torch.arange(seqlen, device=device, dtype=accurate) if position is None else position.to(accurate)
        # A product, not an einsum, which autocast would compute in 16 bits.
        angles = position[:, None] * self._frequencies(seqlen, position.device)
        cos, sin = angles.cos(), angles.sin()
        if self.scale_base is None:
            return cos.to(dtype), sin.to(dtype), None, None
        exponent = (position - seqlen // 2) / self.scale_base
        gain = self._values(self.scale, self._compute_scale, position.device) ** exponent[:, None]
        return tuple(table.to(dtype) for table in (cos * gain, sin * gain, cos / gain, sin / gain))

    def _is_stale(self, seqlen: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Returns whether the tables do not fit these arguments, or the buffers have changed since."""
        table = self._cos_cached
        return (
            table is None
            or self._made_in_graph
            or not self._serves(self._seq_len_cached, seqlen)
            or table.device != device
            or table.dtype != dtype
            # Autograd does not save inference tensors, which an evaluation may have left.
            or (torch.is_grad_enabled() and table.is_inference())
            or _has_changed(self.inv_freq, *self._built_from[0])
            or _has_changed(self.scale, *self._built_from[1])
        )


def _check_call(
    qkv: Tensor,
    kv: Tensor | None,
    seqlen_offset: int | Tensor,
    max_seqlen: int | None,
    cu_seqlens: Tensor | None,
) -> None:
    """Checks the arguments of `RotaryEmbedding.forward` that the functions it calls do not check."""
    checks.tensor("qkv", qkv, dtypes=rotary.DTYPES)
    if cu_seqlens is None:
        checks.number("the number of dimensions of qkv", qkv.dim(), qkv.dim() >= 4, "4 or 5")
    else:
        if max_seqlen is None:
            raise ValueError("max_seqlen must be given with cu_seqlens, found None")
        if kv is not None:
            raise ValueError("kv must be None with cu_seqlens, found a tensor")
        if isinstance(seqlen_offset, Tensor) or seqlen_offset != 0:
            found = "a tensor" if isinstance(seqlen_offset, Tensor) else seqlen_offset
            raise ValueError(f"seqlen_offset must be 0 with cu_seqlens, found {found}")
    if max_seqlen is not None:
        checks.number("max_seqlen", max_seqlen, max_seqlen >= 0, "at least 0")
    if not isinstance(seqlen_offset, Tensor):
        checks.number("seqlen_offset", seqlen_offset, seqlen_offset >= 0, "at least 0")
    if kv is not None:
        checks.tensor("kv", kv, shape=(qkv.shape[0], None, 2, None, None), device=qkv.device)


def _version(buffer: Tensor | None) -> int:
    """Returns how often a buffer was changed in place, as far as torch counts it."""
    return 0 if buffer is None or buffer.is_inference() else buffer._version


def _has_changed(buffer: Tensor | None, before: Tensor | None, version: int) -> bool:
    """Returns whether a buffer is another one than before, or has another version."""
    return buffer is not before or _version(buffer) != version


class _RotateInPlace(torch.autograd.Function):
    """Rotates x in place. The gradient is a new tensor, since others may hold the incoming one too."""

    @staticmethod
    def forward(ctx, x, layout, parts, interleaved):
        _, _, _, seqlen_offsets, seqlen_offset, cu_seqlens = parts[0]
        ctx.save_for_backward(seqlen_offsets, cu_seqlens, *_tables(parts))
        ctx.layout, ctx.seqlen_offset, ctx.interleaved = layout, seqlen_offset, interleaved
        if _may_change_history(x):
            ctx.mark_dirty(x)
        return _rotate_parts_(x, parts, interleaved)

    @staticmethod
    def backward(ctx, dout):
        seqlen_offsets, cu_seqlens, *tables = ctx.saved_tensors
        options = seqlen_offsets, ctx.seqlen_offset, cu_seqlens, ctx.interleaved, True
        if torch.is_grad_enabled():
            return _rotated_copy(dout, ctx.layout, tables, options), None, None, None
        dx = torch.empty_like(dout, memory_format=torch.contiguous_format)
        sources, targets = (ctx.layout.split(grad, *tables) for grad in (dout, dx))
        if len(sources) != len(targets):  # queries and keys lie apart in one and together in the other
            dout = dout.clone(memory_format=torch.contiguous_format)
            sources = ctx.layout.split(dout, *tables)
        for (source, *_), (target, *part) in zip(sources, targets, strict=True):
            rotary.rotary_into(source, target, *part, *options)
        # With empty tables the kernel only copies, much faster than torch's copy between such strides.
        no_rows = [table[:0] for table in tables[:2]]
        for source, target in zip(ctx.layout.rest(dout), ctx.layout.rest(dx), strict=True):
            rotary.rotary_into(source, target, *no_rows, *options)
        return dx, None, None, None


def _may_change_history(x):
    """Returns whether autograd allows in-place operations on x: not on leaves, and not on all views."""
    return not x.is_leaf and not _torch_private.is_view(x)


def _rotate_in_place(*arguments):
    return _rotate(*_checked(*arguments))


def _checked(layout, x, tables, interleaved, seqlen_offsets, cu_seqlens=None, max_seqlen=None):
    """Check all parts of x before any of them is written; return the arguments of `_rotate`."""
    checks.flags(interleaved=interleaved)
    if sharding.is_distributed(x) and layout not in (_WHOLE, _QUERIES):  # the views of its parts may be copies
        raise NotImplementedError(
            f"{layout.name} must not be a DTensor, found one: use apply_rotary_emb for queries and keys, or to_local()"
        )
    parts = [
        rotary.arguments(*part, seqlen_offsets, cu_seqlens, max_seqlen, (layout.name, *names))
        for names, part in zip(_TABLE_NAMES[len(tables)], layout.split(x, *tables))
    ]
    rotary.writable(layout.name, x)
    return x, layout, parts, bool(interleaved)


def _rotate(x, layout, parts, interleaved):
    transformed = autograd.is_transformed(x)
    differentiable = rotary.rotary.wants_derivative((x,))
    if differentiable and not transformed and not torch.compiler.is_compiling():
        return _RotateInPlace.apply(x, layout, parts, interleaved)
    if (
        transformed or differentiable or torch.compiler.is_exporting()
    ):  # an exported program may be differentiated later
        return _rotate_in_graph(x, layout, parts, interleaved)
    return _rotate_parts_(x, parts, interleaved)


def _rotate_parts_(x, parts, interleaved):
    for part in parts:
        rotary.rotary_(*part, interleaved, False)
    return x


def _rotate_in_graph(x, layout, parts, interleaved):
    """Rotate in steps that autograd records: a graph cannot hold autograd Functions that write to their inputs."""
    out = _rotated_copy(x, layout, _tables(parts), (*parts[0][3:], interleaved, False))
    with torch.set_grad_enabled(_may_change_history(x)):
        x.copy_(out)
    return out


def _rotated_copy(x, layout, tables, options):
    out = x.clone(memory_format=torch.contiguous_format)
    for target, *part in layout.split(out, *tables):
        target.copy_(rotary.rotary(target, *part, *options))
    return out


def _tables(parts):
    return [table for part in parts for table in part[1:3]]


def _check_packed(qkv, num_heads_q, cu_seqlens):
    """Check either packed layout of queries, keys and values; return whether it has a dimension of the three."""
    checks.tensor("qkv", qkv)
    tokens, leading = ("batch, seqlen", 2) if cu_seqlens is None else ("tokens", 1)
    if qkv.dim() == leading + 3 and qkv.shape[-3] == 3:
        return True
    if qkv.dim() != leading + 2:
        layouts = f"({tokens}, 3, heads, head_dim) or ({tokens}, heads_q + 2 heads_k, head_dim)"
        raise ValueError(f"qkv must have shape {layouts}, found {tuple(qkv.shape)}")
    if num_heads_q is None:
        raise ValueError("num_heads_q must be given for a qkv with one dimension of heads, found None")
    checks.integer("num_heads_q", num_heads_q)
    heads = qkv.shape[-2]
    if num_heads_q < 0 or heads < num_heads_q or (heads - num_heads_q) % 2:
        raise ValueError(
            f"num_heads_q must leave an even number of qkv's {heads} heads for keys and values, found {num_heads_q}"
        )
    return False


# The parts of a tensor that rotate.


class _Layout(NamedTuple):
    name: str  # the caller's name for the tensor
    split: Callable  # (x, *tables) -> the parts of x that rotate, each with its cos and sin
    rest: Callable  # x -> the parts that do not rotate


_TABLE_NAMES = {2: (("cos", "sin"),) * 2, 4: (("cos", "sin"), ("cos_k", "sin_k"))}  # number of tables -> names
_WHOLE = _Layout("x", lambda x, cos, sin: ((x, cos, sin),), lambda x: ())
_QUERIES = _WHOLE._replace(name="qkv")  # with the name that the module uses
_KEYS_AND_VALUES = _Layout("kv", lambda kv, cos, sin: ((kv[:, :, 0], cos, sin),), lambda kv: (kv[:, :, 1],))


def _split_three(qkv, cos, sin, cos_k=None, sin_k=None):
    """Queries and keys of (..., 3, heads, head_dim), as one part if they share tables and are neighbours in memory."""
    q, k = qkv.select(-3, 0), qkv.select(-3, 1)  # unbind would give views that autograd forbids to write to
    if cos_k is not None:
        return (q, cos, sin), (k, cos_k, sin_k)
    if qkv.stride(-3) == qkv.shape[-2] * qkv.stride(-2):
        return ((qkv.narrow(-3, 0, 2).flatten(-3, -2), cos, sin),)
    return (q, cos, sin), (k, cos, sin)


_THREE = _Layout("qkv", _split_three, lambda qkv: (qkv.select(-3, 2),))


def _heads(num_heads_q):
    """Returns the layout with the heads of queries, keys and values in one dimension of heads_q + 2 heads_k."""

    def split(qkv, cos, sin, cos_k=None, sin_k=None):
        if cos_k is None:
            return ((qkv[..., : first_value(qkv), :], cos, sin),)
        return (qkv[..., :num_heads_q, :], cos, sin), (qkv[..., num_heads_q : first_value(qkv), :], cos_k, sin_k)

    def rest(qkv):
        return (qkv[..., first_value(qkv) :, :],)

    def first_value(qkv):
        return num_heads_q + (qkv.shape[-2] - num_heads_q) // 2

    return _Layout("qkv", split, rest)
