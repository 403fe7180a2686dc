"""Cross entropy against eager torch, torch.compile, our Triton kernels and Liger: forward, backward, in place or not.

The bytes counted are those of the logits: one read forward, one read and one write backward. Forward and backward
together count all three, although flash_attn and Liger then make the gradient in the forward and read the logits once;
two_passes is flash_attn without that. In the cases "scaled", the mean is multiplied by one number or, in turn, by two:
flash_attn expects the same incoming gradient as in the call before, and computes the gradient anew if it differs.

Liger writes the gradient over the logits, so it takes part in the forward without gradient and in forward and backward
together only. It makes the host wait for the device.
"""

import functools
import importlib
import itertools

import torch
from torch.nn import functional

from benchmarks.harness import DTYPES, Case, backward_of, main
from flash_attn._ops import xentropy
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.ops.triton.cross_entropy import cross_entropy_loss

SHAPES = {  # rows, vocab
    "cuda": [
        (16384, 2048),
        (8192, 32000),
        (8192, 50257),
        (8192, 50304),
        (4096, 128256),
        (4096, 151936),
        (2048, 262144),
    ],
    "cpu": [(16, 1000)],
}
IGNORED = -100
OPTIONS = 0.0, 1.0, 0.0, IGNORED, 0  # from label_smoothing to class_start


def cases(device):
    for shape in SHAPES[device]:
        providers = {
            "fwd": (forward, 1),
            "bwd": (backward, 2),
            "bwd_inplace": (backward_in_place, 2),
            "both": (both, 3),
            "both_inplace": (both_in_place, 3),
            "both_mean": (functools.partial(both_of_mean, ()), 3),
            "both_scaled": (functools.partial(both_of_mean, (0.5,)), 3),
            "both_scaled_in_turn": (functools.partial(both_of_mean, (0.5, 0.25)), 3),
        }
        for op, (provide, passes) in providers.items():
            yield Case(
                f"xentropy_{op}",
                "x".join(map(str, shape)),
                "bf16",
                functools.partial(provide, shape, DTYPES["bf16"], device),
                bytes=passes * DTYPES["bf16"].itemsize * shape[0] * shape[1],
            )


def draw(shape, dtype, device):
    return torch.randn(shape, device=device).to(dtype), torch.randint(shape[1], shape[:1], device=device)


def losses_of(logits, labels):
    return functional.cross_entropy(logits.float(), labels, reduction="none")


def triton_kernels():
    return importlib.import_module("flash_attn._triton.xentropy")


def forward(shape, dtype, device):
    logits, labels = draw(shape, dtype, device)
    compiled = torch.compile(losses_of, dynamic=False)
    return {
        "flash_attn": lambda: cross_entropy_loss(logits, labels),
        "torch": lambda: losses_of(logits, labels),
        "torch.compile": lambda: compiled(logits, labels),
        "triton": lambda: triton_kernels().fwd(logits, labels, None, *OPTIONS, shape[1]),
        "liger": lambda: liger(logits, labels, "none"),
    }


def backward(shape, dtype, device):
    logits, labels = draw(shape, dtype, device)
    logits.requires_grad_()
    compiled = torch.compile(losses_of, dynamic=False)
    dlosses, lse = torch.randn(shape[0], device=device), logits.detach().double().logsumexp(dim=-1)
    return {
        "flash_attn": backward_of(lambda: cross_entropy_loss(logits, labels)[0], logits),
        "torch": backward_of(lambda: losses_of(logits, labels), logits),
        "torch.compile": backward_of(lambda: compiled(logits, labels), logits),
        "triton": lambda: triton_kernels().bwd(dlosses, logits.detach(), labels, lse, *OPTIONS, shape[1]),
    }


def backward_in_place(shape, dtype, device):
    """Without autograd, which would not let the same tensor be overwritten again and again."""
    logits, labels = draw(shape, dtype, device)
    dlosses, lse = torch.randn(shape[0], device=device), logits.double().logsumexp(dim=-1)
    args = dlosses, logits, labels, lse, *OPTIONS, shape[1]
    return {"flash_attn": lambda: xentropy.bwd_(*args), "triton": lambda: triton_kernels().bwd_(*args)}


def both(shape, dtype, device):
    logits, labels = draw(shape, dtype, device)
    logits.requires_grad_()
    compiled = torch.compile(losses_of, dynamic=False)
    own = logits.detach().clone().requires_grad_()

    def run(function):
        return lambda: torch.autograd.grad(function().sum(), logits)

    return {
        "flash_attn": run(lambda: cross_entropy_loss(logits, labels, gradient_in_forward=True)[0]),
        "two_passes": run(lambda: cross_entropy_loss(logits, labels)[0]),
        "torch": run(lambda: losses_of(logits, labels)),
        "torch.compile": run(lambda: compiled(logits, labels)),
        "triton": lambda: triton_both(logits.detach(), labels),
        # With Liger's own sum as the loss, no pass over the gradient is left for the backward.
        "liger": lambda: torch.autograd.grad(liger(own, labels, "sum"), own),
    }


def both_in_place(shape, dtype, device):
    """The gradient overwrites the logits, and so serves as the logits of the next call."""
    logits, labels = draw(shape, dtype, device)
    logits.requires_grad_()
    own = logits.detach().clone().requires_grad_()
    options = dict(reduction="sum", inplace_backward=True)
    at_once, in_two_passes = (CrossEntropyLoss(**options, gradient_in_forward=choice) for choice in (True, False))
    return {
        "flash_attn": lambda: torch.autograd.grad(at_once(logits, labels), logits),
        "two_passes": lambda: torch.autograd.grad(in_two_passes(logits, labels), logits),
        "liger": lambda: torch.autograd.grad(liger(own, labels, "sum"), own),
    }


def both_of_mean(scales, shape, dtype, device):
    """The mean, as in training, multiplied by each of the scales in turn, if there are any."""
    logits, labels = draw(shape, dtype, device)
    logits.requires_grad_()
    own = logits.detach().clone().requires_grad_()
    at_once, in_two_passes = CrossEntropyLoss(), CrossEntropyLoss(gradient_in_forward=False)

    def run(function, leaf=logits):
        turns = itertools.cycle(scales)

        def call():
            loss = function(leaf, labels)
            return torch.autograd.grad(loss * next(turns) if scales else loss, leaf)

        return call

    return {
        "flash_attn": run(at_once),
        "two_passes": run(in_two_passes),
        "torch": run(lambda logits, labels: functional.cross_entropy(logits.float(), labels)),
        "liger": run(lambda logits, labels: liger(logits, labels, "mean"), own),
    }


def triton_both(logits, labels):
    losses, _, lse, _ = triton_kernels().fwd(logits, labels, None, *OPTIONS, logits.shape[1])
    return triton_kernels().bwd(torch.ones_like(losses), logits, labels, lse, *OPTIONS, logits.shape[1])


def liger(logits, labels, reduction):
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

    return LigerCrossEntropyFunction.apply(logits, labels, None, IGNORED, 0.0, 0.0, reduction)[0]


if __name__ == "__main__":
    main(__doc__, "xentropy", cases, baseline="torch")
