"""The loss of a linear head, forward and backward, against the logits of all tokens in torch, torch.compile and Liger.

"products" is what none of them can do without: hidden weight^T, and the two products of its gradient. The flops are
those of these three products in each row, also in those of "none" and "log_probs", which compute the logits again in
the backward.

linear_cross_entropy  the mean, as in training; "1 GB" with chunk_bytes=10**9, "half" with a gradient of 1/2
none                  the sum of the losses of each token, by reduction="none"
log_probs             the sum of linear_log_probs; "entropy" adds that of the entropies
log_probs no_grad     log-probabilities and entropy alone, as of the old policy or a reference model
"""

import functools

import torch
from torch.nn import functional

from benchmarks.harness import DTYPES, Case, main
from flash_attn.losses.linear_cross_entropy import linear_cross_entropy
from flash_attn.losses.linear_log_probs import linear_log_probs

SHAPES = {  # tokens, classes, features
    "cuda": [(4096, 128256, 2048), (16384, 50304, 768), (8192, 151936, 4096), (16384, 248320, 2048)],
    "cpu": [(16, 1000, 64)],
}


def cases(device):
    for shape in SHAPES[device]:
        providers = {"linear_cross_entropy": mean, "none": none, "log_probs": log_probs, "log_probs_no_grad": no_grad}
        for op, provide in providers.items():
            products = 1 if op == "log_probs_no_grad" else 3
            yield Case(
                op,
                "x".join(map(str, shape)),
                "bf16",
                functools.partial(provide, shape, DTYPES["bf16"], device),
                flops=products * 2 * shape[0] * shape[1] * shape[2],
            )


def draw(shape, dtype, device):
    tokens, classes, features = shape
    hidden = torch.randn(tokens, features, device=device).to(dtype).requires_grad_()
    weight = (torch.randn(classes, features, device=device) / features**0.5).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(classes, (tokens,), device=device)


def of_logits(hidden, weight, labels):
    return functional.cross_entropy(functional.linear(hidden, weight), labels)


def log_probs_of_logits(hidden, weight, labels):
    log_p = functional.linear(hidden, weight).float().log_softmax(-1)
    return log_p.gather(-1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def products(hidden, weight):
    hidden, weight = hidden.detach(), weight.detach()

    def run():
        logits = functional.linear(hidden, weight)
        return logits @ weight, logits.t() @ hidden

    return run


def trained(function, hidden, weight, labels):
    """A call of function and of its backward, which leaves gradients as a training step does."""

    def step():
        hidden.grad = weight.grad = None
        function(hidden, weight, labels).backward()

    return step


def mean(shape, dtype, device):
    inputs = draw(shape, dtype, device)
    compiled = torch.compile(of_logits, dynamic=False)
    ways = {
        "flash_attn": linear_cross_entropy,
        "flash_attn, 1 GB": functools.partial(linear_cross_entropy, chunk_bytes=10**9),
        "flash_attn, half": lambda *args: linear_cross_entropy(*args) * 0.5,
        "torch": of_logits,
        "torch.compile": compiled,
        "liger": liger,
    }
    return {"products": products(*inputs[:2])} | {name: trained(way, *inputs) for name, way in ways.items()}


def none(shape, dtype, device):
    inputs = draw(shape, dtype, device)
    return {
        "products": products(*inputs[:2]),
        "flash_attn": trained(lambda *args: linear_cross_entropy(*args, reduction="none").sum(), *inputs),
    }


def log_probs(shape, dtype, device):
    inputs = draw(shape, dtype, device)

    def both(function):
        def loss(*args):
            each, entropy = function(*args)[:2]
            return each.sum() + entropy.sum()

        return trained(loss, *inputs)

    return {
        "products": products(*inputs[:2]),
        "flash_attn": trained(lambda *args: linear_log_probs(*args).log_probs.sum(), *inputs),
        "flash_attn, entropy": both(linear_log_probs),
        "torch.compile": both(torch.compile(log_probs_of_logits, dynamic=False)),
    }


def no_grad(shape, dtype, device):
    hidden, weight, labels = (x.detach() for x in draw(shape, dtype, device))
    compiled = torch.compile(log_probs_of_logits, dynamic=False)
    return {
        "products": lambda: functional.linear(hidden, weight),
        "flash_attn": lambda: linear_log_probs(hidden, weight, labels),
        "torch.compile": lambda: compiled(hidden, weight, labels),
    }


def liger(hidden, weight, labels):
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    return LigerFusedLinearCrossEntropyFunction.apply(hidden, weight, labels)[0]


if __name__ == "__main__":
    main(__doc__, "linear_cross_entropy", cases, baseline="products")
