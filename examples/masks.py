"""Draw what causal, window_size, alibi_slopes and softcap do to the weights of attention.

python examples/masks.py --out masks.png
"""

import argparse

import torch
from matplotlib.figure import Figure

from flash_attn import flash_attn_func

SEQLEN, HEADS = 24, 4


def weights(queries=SEQLEN, **options):
    """The matrix of weights of one head, for the last queries: with the identity as values, attention returns them."""
    torch.manual_seed(0)
    q, k = torch.randn(2, 1, SEQLEN, HEADS, 32)
    v = torch.eye(SEQLEN, 32)[None, :, None].expand(1, SEQLEN, HEADS, 32)
    return flash_attn_func(q[:, -queries:], k, v, **options)[0, :, 0, :SEQLEN]


CASES = {
    "no mask": {},
    "causal=True": dict(causal=True),
    "window_size=(4, 0)": dict(window_size=(4, 0)),
    "window_size=(2, 2)": dict(window_size=(2, 2)),
    "causal, alibi_slopes": dict(causal=True, alibi_slopes=torch.full((HEADS,), 0.5)),
    "softmax_scale=1": dict(softmax_scale=1.0),
    "softmax_scale=1, softcap=2": dict(softmax_scale=1.0, softcap=2.0),
    "causal=True, 8 queries": dict(causal=True, queries=8),  # the last query sees the last key
}


def draw(path):
    figure = Figure(figsize=(11, 6), layout="constrained")
    for axis, (title, options) in zip(figure.subplots(2, 4).flat, CASES.items()):
        matrix = weights(**options)
        axis.imshow(matrix, cmap="cividis", vmin=0, vmax=matrix.max())
        axis.set(title=title, xlabel="key", ylabel="query")
    figure.suptitle("Weights of attention: each row is a query's, brighter is more")
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="masks.png", help="default: %(default)s")
    path = parser.parse_args().out
    draw(path)
    print("drawn:", path)
