"""Muon, an optimizer for weight matrices: momentum, then the nearest matrix with all singular values about 1.

K. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon. torch.optim.Muon is the same in bf16, which is tens
of times slower on a CPU that has no instructions for it; this one works in the precision of the weights.
"""

import torch


class Muon(torch.optim.Optimizer):
    """Steps for matrices of shape (out, in), of the size that suits a learning rate of AdamW."""

    def __init__(self, matrices, lr, momentum=0.95, weight_decay=0.1):
        super().__init__(matrices, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for matrix in group["params"]:
                average = self.state[matrix].setdefault("average", torch.zeros_like(matrix))
                average.lerp_(matrix.grad, 1 - group["momentum"])
                direction = orthogonal(matrix.grad.lerp(average, group["momentum"]))
                matrix.mul_(1 - group["lr"] * group["weight_decay"])
                matrix.add_(direction, alpha=-0.2 * group["lr"] * max(matrix.shape) ** 0.5)


def orthogonal(x):
    """U V^T for x = U S V^T, roughly: singular values land between 0.7 and 1.2.

    Five Newton-Schulz steps with an odd polynomial, a s + b s^3 + c s^5, that is steep at 0.
    """
    if x.shape[0] > x.shape[1]:
        return orthogonal(x.T).T  # the smaller of x x^T and x^T x
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x
