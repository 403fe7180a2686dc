"""A layer that works on tokens alone, computed for some tokens at a time."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from flash_attn._ops import autograd, checks
from flash_attn.utils.recompute import state_of_forward


def chunked(
    module: Callable[[Tensor], Tensor], x: Tensor, chunks: int, parameters: Iterable[Tensor] | None = None
) -> Tensor:
    """Returns module(x), computed for some tokens at a time in both directions, so that little is held between layers.

    Only x is saved. The backward computes each chunk again, and its gradients at once; it adds gradients of parameters
    in float32. Dropout drops the same in both. What is computed is module(x) but for the order in which gradients of
    parameters are added.

    Arguments:
        module: works on tokens alone, such as an MLP: from (tokens, features) to (tokens, any).
        x: (..., features).
        chunks: in how many parts the tokens are computed.
        parameters: the tensors besides x that get gradients; None: those of the module.

    Raises:
        ValueError, TypeError: chunks is not a positive integer; parameters are missing for a function; x has less than
            two dimensions; module returns another number of tokens than it gets.
        RuntimeError: in the backward, if the module then uses none of the parameters, as after
            `torch.func.functional_call`, which has put others in their place.

    Example:
        >>> mlp = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.GELU(), torch.nn.Linear(32, 8))
        >>> x = torch.randn(2, 10, 8)
        >>> torch.allclose(chunked(mlp, x, 4), mlp(x), atol=1e-6)
        True
    """
    checks.tensor("x", x)
    chunks = checks.count("chunks", chunks, 1)
    checks.number("the number of dimensions of x", x.dim(), x.dim() >= 2, "at least 2")
    if parameters is None:
        if not isinstance(module, nn.Module):
            raise TypeError("parameters must be given if module is a function, found None")
        parameters = module.parameters()
    wanted = [each for each in parameters if each.requires_grad]
    if torch.compiler.is_compiling():  # graphs have no nodes of autograd to refer to
        return _Chunked.apply(module, chunks, None, x, *wanted)
    x = _Kept.apply(x)
    return _Chunked.apply(module, chunks, x.grad_fn, x, *wanted)


def set_mlp_chunks(model: nn.Module, chunks: int) -> None:
    """Have each `Mlp` and `GatedMlp` of a model, divided or not, compute its tokens in chunks: see `chunked`.

    Arguments:
        model: a model with such layers.
        chunks: 1 computes all tokens at once.

    Raises:
        ValueError: the model has no such layer, or chunks is less than 1.

    Example:
        >>> from flash_attn.modules.mlp import Mlp
        >>> from flash_attn.parallel import set_mlp_chunks
        >>> model, x = torch.nn.Sequential(Mlp(64)), torch.randn(2, 100, 64)
        >>> expected = model(x)
        >>> set_mlp_chunks(model, 4)
        >>> torch.allclose(model(x), expected, atol=1e-6)
        True
    """
    chunks = checks.count("chunks", chunks, 1)
    layers = [module for module in model.modules() if hasattr(type(module), "mlp_chunks")]
    checks.number("the number of MLPs of model", len(layers), len(layers) > 0, "at least 1 (fused ones have no chunks)")
    for layer in layers:
        vars(layer)["mlp_chunks"] = chunks


class _Kept(torch.autograd.Function):
    """x, saved before the chunks are computed: a checkpoint around them needs only x again, and stops there."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, module, chunks, kept, x, *parameters):
        # Parameters are no saved tensors: those come back as others where hooks or checkpoints keep them.
        ctx.module, ctx.chunks, ctx.parameters = module, chunks, parameters
        ctx.kept = kept  # the node of _Kept, which x lacks if it gets no gradient
        if kept is None:
            ctx.save_for_backward(x)
        ctx.again = state_of_forward(x)
        rows = x.flatten(0, -2).chunk(chunks)
        parts = [module(part) for part in rows]
        for given, found in zip(rows, parts, strict=True):
            if found.shape[:-1] != given.shape[:-1]:
                expected = f"({given.shape[0]}, any) for x {tuple(given.shape)}"
                raise ValueError(f"module must return {expected}, found {tuple(found.shape)}")
        out = parts[0].new_empty(*x.shape[:-1], parts[0].shape[-1])  # no view: FSDP2 warns of layers that return one
        torch.cat(parts, out=out.flatten(0, -2))
        return out

    @staticmethod
    @autograd.once_differentiable
    def backward(ctx, grad):
        (x,), parameters = (ctx.kept or ctx).saved_tensors, ctx.parameters
        sums = [torch.zeros_like(each, dtype=torch.promote_types(each.dtype, torch.float32)) for each in parameters]
        parts, uses_parameters = [], not parameters
        with ctx.again():
            pairs = zip(*(each.flatten(0, -2).chunk(ctx.chunks) for each in (x, grad)), strict=True)
            for part, dy in pairs:
                with torch.enable_grad():
                    leaf = part.detach().requires_grad_()
                    y = ctx.module(leaf)
                dx, *grads = torch.autograd.grad(y, [leaf, *parameters], dy, allow_unused=True)
                uses_parameters |= any(each is not None for each in grads)
                parts.append(torch.zeros_like(leaf) if dx is None else dx)
                for total, each in zip(sums, grads, strict=True):
                    if each is not None:
                        total += each
        if not uses_parameters:
            raise RuntimeError(
                "chunked computes the module again in the backward, which now uses none of its parameters: were others "
                "in their place in the forward, as with torch.func.functional_call?"
            )
        totals = [total.to(each.dtype) for total, each in zip(sums, parameters, strict=True)]
        return None, None, None, torch.cat(parts).view(x.shape), *totals
