"""Attention problems with features, and the check of their results against the oracle."""

import dataclasses
import functools
import itertools
import random

import oracle
import torch
from cases import DTYPES, Case
from compare import assert_error_ratio, largest_error, unavoidable
from problems import FUNCTIONS, cumulative, dlse_of_stored_out, size_of_scores

from flash_attn import _library, precision
from flash_attn._ops import rng

# name -> sizes of the bias for (batch, heads, seqlen_q, seqlen_k); with varlen, of (heads, total_q, max_seqlen_k)
BIASES = {
    "all": lambda *sizes: sizes,
    "heads": lambda *sizes: (1, *sizes[-3:]) if len(sizes) == 4 else sizes,
    "entries": lambda *sizes: (*sizes[:-3], 1, *sizes[-2:]),
    "keys": lambda *sizes: (*sizes[:-3], 1, 1, sizes[-1]),
    "rows": lambda *sizes: (*sizes[-2:-1], 1),
    "one": lambda *sizes: (1,),
    "groups": lambda b, *sizes: (b // 2, 2, *sizes),
    "second of groups": lambda b, h, *sizes: (1, 2, h, *sizes),
    "first of groups": lambda b, h, i, j: (b // 2, 1, h, 1, j),
    "bool": lambda *sizes: sizes,
    "bool keys": lambda *sizes: (*sizes[:-3], 1, 1, sizes[-1]),
    "bool groups": lambda b, *sizes: (b // 2, 2, *sizes),
    "bool of the second of groups": lambda b, h, i, j: (1, 2, 1, 1, j),
}
GROUPED = [name for name in BIASES if "groups" in name]


def gradient_of_sink(sink, out, lse, dout, dlse):
    """That of results as they are stored: (.., rows, heads, head_dim) and (.., heads, rows)."""
    lse, *dlse = (x.detach().double().transpose(-1, -2) for x in (lse, dlse) if x is not None)
    softmax_d = sum([(dout.double() * out.detach().double()).sum(-1), *(-x for x in dlse)])
    return -((sink.double() - lse).exp() * softmax_d).where(lse < torch.inf, 0).flatten(0, -2).sum(0)


@dataclasses.dataclass(frozen=True)
class Featured(Case):
    """A Case with features; batch is 4. `str(case)` seeds its tensors."""

    batch: int = 4
    head_dim_v: int = 0  # 0: head_dim
    sink: str = ""  # "fp32", "same": its dtype
    bias: str = ""  # one of BIASES
    bias_dtype: str = ""  # of one that is not bool; "": dtype
    fixed_bias: bool = False  # without a gradient, as those of bool
    ranges: str = ""  # "2", "4": bounds of each row, ("h") of each head, too
    chunk: int = 0
    entries_causal: bool = False  # causal is a tensor
    seqused_q: bool = False
    seqused_k: bool = False
    varlen: bool = False
    packing: str = ""
    dlse: bool = False
    max_logit: bool = False

    def __str__(self):
        names = (
            "head_dim_v sink bias bias_dtype fixed_bias ranges chunk entries_causal seqused_q seqused_k varlen packing "
            "dlse max_logit"
        )
        extra = [f"{name}={getattr(self, name)}" for name in names.split() if getattr(self, name)]
        return "-".join([super().__str__(), *extra])

    def check(self, device):
        """Compare the results and gradients with the oracle's."""
        rows, keys, (tensors, differentiable, others, dout, lengths) = self.problem(device)
        inputs = [*tensors, *differentiable.values()]
        leaves = [x.detach().requires_grad_() for x in inputs]
        keep = self.drawn_mask(dout.device) if self.dropout_p else None
        torch.manual_seed(7)
        out, lse, *max_logit = self.attend(*leaves, lengths=lengths, **others)
        reference = functools.partial(
            self.reference, rows=rows, keys=keys, keep=keep, names=list(differentiable), **others
        )
        dlse = torch.randn_like(lse).masked_fill(lse.isinf(), float("nan")) if self.dlse else None
        exact_inputs = [x.double() for x in inputs]
        exact_out, exact_lse, exact_grads = oracle.gradients(reference, exact_inputs, dout, dlse)
        plain_out, plain_lse, plain_grads = oracle.gradients(reference, inputs, dout, dlse)
        if self.softcap == 0:
            plain_lse = reference(*(x.float() for x in inputs))[1]
        assert out.dtype == dout.dtype and lse.dtype == torch.float32
        roundings = 1 + bool(self.sink)  # a sink may be applied to an out that is rounded already
        assert_error_ratio(out, exact_out, plain_out, plus=roundings * unavoidable(exact_out, out.dtype), name="out")
        terms = 128 + size_of_scores(self)
        assert_error_ratio(lse, exact_lse, plain_lse, plus=unavoidable(exact_lse, lse.dtype, terms), name="lse")
        if self.max_logit:
            exact = reference(*exact_inputs, scores=True)
            plus = unavoidable(exact, torch.float32, terms)
            assert_error_ratio(max_logit[0], exact, exact.float(), plus=plus, name="max_logit")
        all_plain = [plain_grads]
        in_kernels = _library.runs_in_kernel("fwd", dout)
        rounded = in_kernels and not precision.uses_exact_gradients()
        if self.sink and rounded:  # its few elements are sums of the errors of `out`, which is checked above
            sink = list(differentiable).index("learnable_sink") + len(tensors)
            exact_grads = list(exact_grads)
            exact_grads[sink] = gradient_of_sink(inputs[sink], out, lse, dout, dlse)
        if rounded or (self.sink and not in_kernels):
            stored_dlse = dlse_of_stored_out(out, exact_out, dout, dlse)
            all_plain.append(oracle.gradients(reference, exact_inputs, dout, stored_dlse)[2])
        grads = torch.autograd.grad([out, lse][: 1 + self.dlse], leaves, [dout, dlse][: 1 + self.dlse])
        names = [*(f"gradient {i}" for i in range(len(tensors))), *differentiable]
        total, noise = self.batch * self.seqlen_q, 128 + self.head_dim
        sums = dict(learnable_sink=noise + total, attn_bias=noise + self.heads * total)
        for name, grad, exact, *plain in zip(names, grads, exact_grads, *all_plain, strict=True):
            assert grad.dtype == (inputs[names.index(name)]).dtype
            worst = max(plain, key=functools.partial(largest_error, exact=exact))
            plus = unavoidable(exact, grad.dtype, sums.get(name, noise + self.scale_q * (self.head_dim * total) ** 0.5))
            assert_error_ratio(grad, exact, worst, plus=plus, name=name)

    def drawn_mask(self, device):
        """The mask of dropout that a call after torch.manual_seed(7) draws."""
        torch.manual_seed(7)
        sizes = self.batch, self.heads, self.seqlen_q, self.seqlen_k
        return oracle.dropout_keep(*rng.draw_state(device).tolist(), *sizes, self.dropout_p).to(device)

    def problem(self, device):
        """(slices of rows, of keys), and (tensors, differentiable features, other arguments, dout, lengths)."""
        random_ = random.Random(str(self))
        generator = self.generator(device)

        def lengths(longest):
            if not self.varlen:
                return [longest] * self.batch
            return random_.sample(
                [0, longest, *(random_.randint(0, longest) for _ in range(self.batch - 2))], k=self.batch
            )

        queries = lengths(self.seqlen_q)
        count_k = queries if self.packing == "qkv" else lengths(self.seqlen_k)
        used_q = [random_.randint(0, n) if self.seqused_q else n for n in queries]
        used_k = [random_.randint(0, n) if self.seqused_k else n for n in count_k]
        starts_q, starts_k = (list(itertools.accumulate([0, *n])) for n in (queries, count_k))
        rows = [slice(a, a + n) for a, n in zip(starts_q, used_q, strict=False)]
        keys = [slice(a, a + n) for a, n in zip(starts_k, used_k, strict=False)]
        total_q, total_k = starts_q[-1], starts_k[-1]
        dim_v = self.head_dim_v or self.head_dim

        def draw(*shape, dtype=self.dtype, scale=1.0):
            return (torch.randn(*shape, device=device, generator=generator) * scale).to(DTYPES[dtype])

        def formed(x):
            return x if self.varlen else x.unflatten(0, (self.batch, -1))

        q = draw(total_q, self.heads, self.head_dim, scale=self.scale_q)
        k, v = draw(total_k, self.heads_k, self.head_dim), draw(total_k, self.heads_k, dim_v)
        dout = formed(draw(total_q, self.heads, dim_v))
        tensors = [formed(x) for x in (q, k, v)]
        if self.packing:
            tensors = [*tensors[: 3 - len(self.packing)], torch.stack(tensors[3 - len(self.packing) :], -3)]
        differentiable, others = {}, {}
        if self.sink:
            dtype = "fp32" if self.sink == "fp32" else self.dtype
            differentiable["learnable_sink"] = draw(self.heads, dtype=dtype, scale=2.0)
        if self.bias:
            sizes = (
                (self.heads, total_q, self.seqlen_k)
                if self.varlen
                else (self.batch, self.heads, self.seqlen_q, self.seqlen_k)
            )
            bias = draw(*BIASES[self.bias](*sizes), dtype="fp32")
            if self.bias.startswith("bool"):
                others["attn_bias"] = bias < 1
            else:
                kind = others if self.fixed_bias else differentiable
                kind["attn_bias"] = bias.to(DTYPES[self.bias_dtype or self.dtype])
        if self.ranges:
            sizes = (
                (self.heads if "h" in self.ranges else 1, total_q)
                if self.varlen
                else (self.batch, self.heads if "h" in self.ranges else 1, self.seqlen_q)
            )
            count = int(self.ranges[0])
            bounds = torch.randint(-5, self.seqlen_k + 6, (*sizes, count), device=device, generator=generator)
            bounds = bounds.unflatten(-1, (-1, 2)).sort(-1).values.flatten(-2)
            others["key_ranges"] = bounds.int().where(
                torch.rand(sizes, device=device, generator=generator)[..., None] < 0.9, bounds.int().flip(-1)
            )
        if self.entries_causal:
            others["causal"] = torch.tensor([b % 2 == 0 for b in range(self.batch)], device=device)
        if self.chunk:
            others["attention_chunk"] = self.chunk
        for name, used, wanted in (("seqused_q", used_q, self.seqused_q), ("seqused_k", used_k, self.seqused_k)):
            if wanted:
                others[name] = torch.tensor(used, dtype=torch.int32, device=device)
        bounds = [cumulative(queries, device), cumulative(count_k, device), self.seqlen_q, self.seqlen_k]
        bounds = (bounds[::2] if self.packing == "qkv" else bounds) if self.varlen else []
        return rows, keys, (tensors, differentiable, others, dout, bounds)

    def attend(self, *inputs, lengths, **others):
        """The results of the function under test: out, lse and, if wanted, max_logit."""
        count = 3 - max(len(self.packing) - 1, 0)
        features = list(inputs[count:])
        options = (
            self.options(inputs[0].device) | dict(dropout_p=self.dropout_p, deterministic=self.deterministic) | others
        )
        if self.sink:
            options["learnable_sink"] = features.pop(0)
        if features:
            options["attn_bias"] = features.pop(0)
        function = FUNCTIONS[self.packing, self.varlen]
        return function(*inputs[:count], *lengths, return_lse=True, return_max_logit=self.max_logit, **options)

    def reference(self, *inputs, rows, keys, keep, names, scores=False, **others):
        count = len(inputs) - len(names)
        tensors = [y for x in inputs[:count] for y in (x.unbind(-3) if x.dim() > 4 - self.varlen else [x])]
        q, k, v = (x if self.varlen else x.flatten(0, 1) for x in tensors)
        features = dict(zip(names, inputs[count:], strict=True))
        bias, ranges, causal = (
            features.pop("attn_bias", others.get("attn_bias")),
            others.get("key_ranges"),
            others.get("causal"),
        )
        options = dict(self.options(q.device), dropout_p=self.dropout_p, **features)
        flag = options.pop("causal")
        causal = [flag] * self.batch if causal is None else causal.tolist()
        function = functools.partial(
            oracle.featured_attention,
            q,
            k,
            v,
            rows,
            keys,
            causal=causal,
            keep=keep,
            key_ranges=None if ranges is None else lambda b, row: self.of_entry(ranges, b, row, -3, keys),
            attn_bias=None if bias is None else lambda b, row: self.of_entry(bias, b, row, -2, keys),
            attention_chunk=self.chunk,
            **options,
        )
        out, lse = function()
        if scores:
            return self.largest_scores(q, k, rows, keys, function)
        return (
            (out, lse)
            if self.varlen
            else (out.unflatten(0, (self.batch, -1)), lse.unflatten(1, (self.batch, -1)).transpose(0, 1))
        )

    def of_entry(self, x, b, row, at, keys):
        """The part of key_ranges or a bias for the rows of entry b: (heads or 1, rows or 1, ..)."""
        bias = at == -2
        dims = (3 if self.varlen else 4) if bias or self.varlen else 4
        if bias and x.dim() == 5:
            b1, b2 = x.shape[:2]
            n = b2 if b2 > 1 else self.batch // b1
            x = x[b // n if b1 > 1 else 0, b % n if b2 > 1 else 0]
        elif not self.varlen:
            x = x[(None,) * (dims - x.dim())]
            x = x[b if x.shape[0] > 1 else 0]
        elif bias:
            x = x[(None,) * (3 - x.dim())]
        if not self.varlen:
            row = slice(0, row.stop - row.start)
        place = slice(None) if x.shape[1] == 1 and bias else row
        return x[:, place]

    def largest_scores(self, q, k, rows, keys, function):
        """max over the rows of the largest score of each: that of an attention whose scores are 1e4 times as large."""
        keywords = dict(function.keywords)
        found = q.new_full((self.heads,), float("-inf"))
        for b, (row, key) in enumerate(zip(rows, keys, strict=True)):
            n, m = row.stop - row.start, key.stop - key.start
            if n == 0 or m == 0:
                continue
            ranges, bias = (keywords[name] and keywords[name](b, row) for name in ("key_ranges", "attn_bias"))
            seen = oracle.intervals(n, m, ranges, self.chunk, keywords["causal"][b], q.device)
            seen = seen & oracle.allowed_keys(n, m, False, self.window, q.device)
            slopes = keywords["alibi_slopes"]
            s = oracle.raw_scores(
                q[None, row],
                k[None, key],
                None,
                self.softcap,
                slopes if slopes is None or slopes.dim() == 1 else slopes[b],
            )
            if bias is not None:
                bias = bias[..., :m] if bias.shape[-1] > 1 else bias
                seen = seen & bias if bias.dtype == torch.bool else seen
                s = s if bias.dtype == torch.bool else s + bias
            found = found.maximum(s.masked_fill(~seen, float("-inf")).amax((0, 2, 3)))
        return found
