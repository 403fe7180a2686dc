"""Attention problems in every form that the six functions take, and the check of their results against the oracle.

What is not in use holds NaN: tokens behind the last entry, unused keys, pages of nobody, dlse of rows without keys.
"""

import dataclasses
import functools
import itertools
import random

import oracle
import torch
from cases import DTYPES, LAYOUTS, Case, laid_out
from compare import assert_error_ratio, largest_error, unavoidable

from flash_attn import (
    _library,
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    precision,
)
from flash_attn._ops import flash_attn

FUNCTIONS = {  # by packing and varlen
    ("", False): flash_attn_func,
    ("kv", False): flash_attn_kvpacked_func,
    ("qkv", False): flash_attn_qkvpacked_func,
    ("", True): flash_attn_varlen_func,
    ("kv", True): flash_attn_varlen_kvpacked_func,
    ("qkv", True): flash_attn_varlen_qkvpacked_func,
}


def cumulative(lengths, device):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


@dataclasses.dataclass(frozen=True)
class Problem(Case):
    """A Case whose entries may differ in length, may use a part of their keys, and may come packed or in pages."""

    varlen: bool = False
    packing: str = ""  # "kv", "qkv": what shares a tensor
    page: int = 0  # size of the pages that hold keys and values; 0: not paged. Needs varlen; has no gradient
    seqused: bool = False  # the last keys of an entry are not used
    leftpad: bool = False  # nor the first ones
    dlse: bool = False  # a gradient for lse, too

    def __str__(self):
        flags = [name for name in ("varlen", "seqused", "leftpad", "dlse") if getattr(self, name)]
        parts = [super().__str__(), f"{self.packing}packed" * bool(self.packing), f"page{self.page}" * (self.page > 0)]
        return "-".join(part for part in (*parts, *flags) if part)

    def check(self, device):
        """Compare what the function gives for this problem with the oracle."""
        lengths, tokens = self.lengths(), self.tokens(device)
        *inputs, dout = (self.formed(x) for x in tokens)
        attend = functools.partial(self.attend, lengths, pages=self.pages(lengths, tokens) if self.page else None)
        check(
            self,
            (*self.packed(inputs), dout),
            attend,
            functools.partial(self.reference, lengths, **self.options(device)),
            with_dlse=self.dlse,
            backward=not self.page,
        )

    def lengths(self):
        """Queries, keys, used keys and left padding of each entry. In a varlen batch some have length 0."""
        rng = random.Random(str(self))
        queries = self._draw(rng, self.seqlen_q)
        keys = queries if self.packing == "qkv" else self._draw(rng, self.seqlen_k)
        used = [rng.randint(0, n) if self.seqused else n for n in keys]
        return queries, keys, used, [rng.randint(0, n) if self.leftpad else 0 for n in used]

    def _draw(self, rng, longest):
        if not self.varlen:
            return [longest] * self.batch
        lengths = [0, longest] + [rng.randint(0, longest) for _ in range(self.batch - 2)]
        return rng.sample(lengths, k=self.batch)

    def tokens(self, device):
        """q, k, v, dout as (tokens, heads, head_dim), NaN where they are not in use."""
        queries, keys, used, pad = self.lengths()
        q, k, v, dout = (x.flatten(0, 1) for x in self.but(layout="contiguous").tensors(device))
        no_query = _unused(len(q), queries, [0] * self.batch, queries).to(device)
        no_key = _unused(len(k), keys, pad, used).to(device)
        return [
            x.masked_fill(no[:, None, None], float("nan"))
            for x, no in ((q, no_query), (k, no_key), (v, no_key), (dout, no_query))
        ]

    def formed(self, tokens):
        """(tokens, ...) as the functions take it."""
        return tokens if self.varlen else tokens.unflatten(0, (self.batch, -1))

    def packed(self, inputs):
        """The tensors that the function takes for q, k, v, with the strides that `layout` says."""
        alone = {"": 3, "kv": 1, "qkv": 0}[self.packing]
        together = [torch.stack(inputs[alone:], dim=-3)] if alone < 3 else []
        tensors = *inputs[:alone], *together
        return [laid_out(x[None], self.layout)[0] if self.varlen else laid_out(x, self.layout) for x in tensors]

    def attend(self, lengths, *tensors, pages):
        """(out, lse, S_dmask) of the function under test: a public one where that can do it."""
        device = tensors[0].device
        queries, keys, used, pad = lengths
        options = self.options(device) | dict(dropout_p=self.dropout_p, deterministic=self.deterministic)
        bounds = [cumulative(queries, device), cumulative(keys, device), self.seqlen_q, self.seqlen_k]
        if pages is not None:
            *pages, options["block_table"] = pages
            tensors = tensors[0], *pages
        if self.seqused or self.leftpad:
            per_entry = dict(seqused_k=used if self.seqused else None, leftpad_k=pad if self.leftpad else None)
            per_entry = {name: torch.tensor(n, dtype=torch.int32, device=device) for name, n in per_entry.items() if n}
            if self.varlen:
                names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
                per_entry |= zip(names, bounds, strict=True)
            causal, window_size = options.pop("causal"), options.pop("window_size")
            tensors = *tensors, *[None] * (3 - len(tensors))
            return flash_attn.forward(*tensors, None, causal, window_size, True, **options, **per_entry)[:3]
        if self.packing == "qkv":
            bounds = bounds[::2]
        function = FUNCTIONS[self.packing, self.varlen]
        return function(*tensors, *(bounds if self.varlen else []), **options, return_attn_probs=True)

    def reference(self, lengths, *tensors, **options):
        """(out, lse) of the oracle; 0 and +inf for tokens behind the last entry."""
        queries, keys, used, pad = lengths
        q, k, v = (x if self.varlen else x.flatten(0, 1) for x in apart(tensors, ndim=4 - self.varlen))
        bounds = cumulative(queries, "cpu"), cumulative(keys, "cpu")
        out, lse = oracle.varlen_attention(q, k, v, *bounds, seqused_k=used, leftpad_k=pad, **options)
        out = torch.cat([out, torch.zeros_like(q[len(out) :])])
        lse = torch.cat([lse, lse.new_full((self.heads, len(q) - lse.shape[1]), float("inf"))], dim=1)
        return (out, lse) if self.varlen else (self.formed(out), lse.unflatten(1, (self.batch, -1)).transpose(0, 1))

    def pages(self, lengths, tokens):
        """Keys and values in random pages among unused ones, and the block_table, which tells no more than it must."""
        _, keys, used, pad = lengths
        _, k, v, _ = tokens
        num_pages = -(-self.seqlen_k // self.page)
        table = torch.randperm(self.batch * num_pages + 7)[: self.batch * num_pages].reshape(self.batch, num_pages)
        shape = self.batch * num_pages + 7, self.page, self.heads_k, self.head_dim
        pages = [x.new_full(shape, float("nan")) for x in (k, v)]
        for b, start in enumerate(cumulative(keys, "cpu").tolist()[:-1]):
            position = torch.arange(pad[b], used[b])
            where = table[b, position // self.page].to(k.device), (position % self.page).to(k.device)
            for target, x in zip(pages, (k, v), strict=True):
                target[where] = x[start + pad[b] : start + used[b]]
        first = torch.arange(num_pages) * self.page
        needed = (first < torch.tensor(used)[:, None]) & (first + self.page > torch.tensor(pad)[:, None])
        return *pages, table.where(needed, -1).int().to(k.device)


def _unused(size, lengths, first, last):
    """Which tokens are not among first to last - 1 of their entry; bool (size,)."""
    unused = torch.ones(size, dtype=torch.bool)
    for start, one, end in zip(cumulative(lengths, "cpu").tolist(), first, last, strict=False):
        unused[start + one : start + end] = False
    return unused


# The values of flash-attention's own tests (1 to 100,000 keys, every head dim), and some of ours.
FACTORS = dict(
    lengths=[
        *((n, n) for n in (1, 2, 5, 17, 97, 128, 200, 256, 257, 384, 512, 768, 1024, 1025, 2048)),
        *((113, 203), (128, 217), (113, 211), (108, 256), (127, 512), (127, 513), (256, 512), (1023, 1024)),
        *((203, 113), (217, 128), (211, 113), (256, 108), (512, 127), (513, 127), (512, 256), (1024, 1023)),
        *((1, 147), (1, 239), (1, 339), (3, 799), (3, 1024), (64, 800), (64, 2048), (16, 20_000), (16, 100_000)),
        *((147, 1), (239, 1), (339, 1), (799, 3), (1024, 3), (800, 64), (2048, 64), (20_000, 16), (100_000, 16)),
        (1024, 128),
    ],
    heads=[(6, 6), (6, 2), (6, 1)],
    head_dim=[8, 16, 32, 40, 59, 64, 80, 96, 111, 128, 160, 192, 224, 256, 320, 512],
    dtype=["fp16", "bf16"],
    causal=[False, True],
    window=[(-1, -1), "local", (-1, 0), (0, 0), (17, -1), (-1, 23), (300, 300)],
    softcap=[0.0, 2.0, 50.0],
    alibi=["", "h", "bh"],
    dropout_p=[0.0, 0.17],
    deterministic=[False, True],
    scale_q=[1.0, 4.0, 50.0],
    varlen=[False, True],
    packing=["", "kv", "qkv"],
    layout=LAYOUTS,
    page=[0, 1, 16, 256, 512],
    seqused=[False, True],
    leftpad=[False, True],
    dlse=[False, True],
)
SMALL = dict(
    FACTORS,
    lengths=[(97, 97), (128, 128), (113, 203), (203, 113), (1, 147), (64, 1), (129, 65)],
    dtype=["fp16", "bf16", "fp32"],
    page=[0, 1, 16],
)


def possible(row):
    """Packed queries, keys and values are as many of each; pages need cu_seqlens and have no gradient."""
    square = row["lengths"][0] == row["lengths"][1] and row["heads"] == (6, 6)
    pages = row["varlen"] and not row["packing"] and not row["dlse"] and not row["deterministic"]
    return (square or row["packing"] != "qkv") and (pages or not row["page"])


def make_problem(lengths, heads, window, varlen, **rest):
    seqlen_q, seqlen_k = lengths
    if window == "local":
        rng = random.Random(f"{lengths} {heads} {rest}")
        window = rng.randrange(seqlen_k), rng.randrange(seqlen_k)
    batch = (4 if varlen else 2) if max(lengths) <= 2048 else 1 + varlen
    return Problem(batch, seqlen_q, seqlen_k, *heads, window=window, varlen=varlen, **rest)


def check(case, tensors, attend, reference, *, with_dlse=False, backward=True):
    """Compare attend(*inputs) -> (out, lse, S_dmask) and its gradients with reference(*inputs, ...) -> (out, lse).

    tensors: the inputs, q, k and v or packed into fewer, and dout.
    """
    *inputs, dout = tensors
    leaves = [x.detach().requires_grad_(backward) for x in inputs]
    out, lse, s_dmask = attend(*leaves)
    assert out.dtype == dout.dtype and lse.dtype == torch.float32
    if case.dropout_p > 0:  # S_dmask tells which elements were kept
        reference = functools.partial(reference, keep=~s_dmask.signbit(), dropout_p=case.dropout_p)
    dlse = torch.randn_like(lse).masked_fill(lse.isinf(), float("nan")) if with_dlse else None
    exact_inputs = [x.double() for x in inputs]
    gradients = oracle.gradients if backward else lambda function, inputs, *_: (*function(*inputs), ())
    exact_out, exact_lse, exact_grads = gradients(reference, exact_inputs, dout, dlse)
    plain_out, _, plain_grads = gradients(reference, inputs, dout, dlse)
    results = ("out", out, exact_out, plain_out), ("lse", lse, exact_lse, plain_lse(case, inputs, reference))
    for name, x, exact, plain in results:
        plus = unavoidable(exact, x.dtype, terms=128 + size_of_scores(case))
        assert_error_ratio(x, exact, plain, plus=plus, name=name)
    if backward:
        grads = torch.autograd.grad([out, lse][: 1 + with_dlse], leaves, [dout, dlse][: 1 + with_dlse])
        plain = [plain_grads]
        if _library.runs_in_kernel("fwd", dout) and not precision.uses_exact_gradients():
            stored_dlse = dlse_of_stored_out(out, exact_out, dout, dlse)
            plain.append(gradients(reference, exact_inputs, dout, stored_dlse)[2])
        check_gradients(case, *(apart(x, dout.dim()) for x in (grads, exact_grads, *plain)))


def size_of_scores(case):
    """The sum of the magnitudes that make up a score: head_dim products, and the bias.

    The rounding errors of a score grow with it, and those of lse; and a weight, exp(score - lse), has them as relative
    ones. All orders of summing have some: of many results the worst are alike, of few some are lucky.
    """
    return case.scale_q * case.head_dim**0.5 + (0.3 * max(case.seqlen_q, case.seqlen_k) if case.alibi else 0)


def terms_of_gradients(case):
    """How many terms dq, dk and dv are sums of, counting those whose rounding errors are left where terms cancel.

    dP and delta are sums over the head dim. Their rounding errors remain where dS = P (dP - delta) should be 0. dk is a
    sum of dS times q over all rows, in which these errors add up like random steps.
    """
    rows, scores = case.seqlen_q * case.heads // case.heads_k, size_of_scores(case)
    terms = 128 + case.head_dim + scores
    return terms, terms + case.scale_q * ((case.head_dim * rows) ** 0.5 + scores), terms


def check_gradients(case, grads, exact_grads, *plain_grads):
    """Compare dq, dk and dv with the exact ones."""
    every = zip(("dq", "dk", "dv"), terms_of_gradients(case), grads, exact_grads, *plain_grads, strict=True)
    for name, terms, grad, exact, *plain in every:
        assert grad.dtype == DTYPES[case.dtype]
        worst = max(plain, key=functools.partial(largest_error, exact=exact))
        assert_error_ratio(grad, exact, worst, plus=unavoidable(exact, grad.dtype, terms), name=name)


def apart(tensors, ndim):
    """Packed tensors, which have more than `ndim` dimensions, as q, k, v."""
    return [x for tensor in tensors for x in (tensor.unbind(-3) if tensor.dim() > ndim else [tensor])]


def plain_lse(case, inputs, reference):
    """lse is computed in float32 whatever the input type; but a hardware tanh is no better than a 16-bit score."""
    return reference(*(inputs if case.softcap > 0 else (x.float() for x in inputs)))[1]


def dlse_of_stored_out(out, exact_out, dout, dlse):
    """A gradient of lse that has the effect of an out that is stored in 16 bits between forward and backward.

    The backward takes delta = <dout, out> off dP, and adds dlse. Where exact gradients cancel, as in a row of one key,
    plain torch has no error at all, and the formulas of the backward have that of out, which is checked on its own.
    """
    lost = (dout.double() * (out.detach().double() - exact_out)).sum(-1).transpose(-1, -2)
    return -lost if dlse is None else dlse - lost
