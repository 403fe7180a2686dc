"""What a cache in float8 costs in quality: the perplexity of a small language model with four kinds of caches.

    pip install '.[examples]'                       # once: brings tqdm
    python examples/float8_cache.py                 # a minute on two CPU cores
    python examples/float8_cache.py --dim 512 --layers 8 --steps 2000 --context 512 --device cuda

tiny_lm.py learns a little Python. Then attention reads keys and values as a cache holds them: in bfloat16, or in float8
with a scale for each key head, with one scale for all heads of a layer, or with none. The scales come from training
text, with room for numbers twice as large, and the perplexity from text that the model has not seen.

Small models have fewer outliers among their keys than large ones, so measure your own before you rely on it: `attend`
shows all that it takes.
"""

import argparse
import functools

import torch

from flash_attn import flash_attn_with_kvcache
from flash_attn.functional import float8_descale, to_float8
from flash_attn.layers.rotary import apply_rotary_emb
from tiny_lm import HEAD_DIM, TinyLM, cut, python_sources, train, validate

KINDS = {  # name -> how the scale of keys or values (batch, seqlen, heads, HEAD_DIM) is found; None: 16 bits
    "bfloat16": None,
    "float8, a scale for each key head": float8_descale,
    "float8, one scale": functools.partial(float8_descale, per_head=False),
    "float8, no scales": lambda x: torch.ones((), device=x.device),
}


def attend(attention, scale_of, scales, x, cos, sin, *_):
    """tiny_lm's attention over what a cache would hold. scales: of keys and of values, which the first call makes."""
    q, k, v = attention.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).unbind(2)
    q, k, v = (each.bfloat16() for each in (apply_rotary_emb(q, cos, sin), apply_rotary_emb(k, cos, sin), v))
    options = dict(causal=True, window_size=attention.window)
    if scale_of is not None:
        scales += [] if scales else [2 * scale_of(each) for each in (k, v)]
        k, v = (to_float8(each, scale) for each, scale in zip((k, v), scales))
        options |= dict(k_descale=scales[0], v_descale=scales[1])
    return attention.out(flash_attn_with_kvcache(q, k, v, **options).flatten(2).to(x.dtype))


@torch.no_grad()
def perplexity(model, scale_of, training, validation):
    """Of a byte of the validation text, by a model whose attention has such a cache."""
    for block in model.blocks:
        block.attention.forward = functools.partial(attend, block.attention, scale_of, [])
    starts = torch.linspace(0, len(training) - model.context - 2, 16).long()
    model(cut(training, starts, model.context).to(model.cos.device, torch.int64))  # makes the scales
    return 2 ** validate(model, validation)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dim", type=int, default=128, help=f"width, a multiple of {HEAD_DIM} (default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="blocks (default %(default)s)")
    parser.add_argument("--context", type=int, default=128, help="bytes that attention sees (default %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="training steps (default %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    training, validation = python_sources()
    model = TinyLM(args.dim, args.layers, args.context).to(args.device)
    train(model, training, args.steps, batch=16)
    print("cache,perplexity,change")
    before = None
    for name, scale_of in KINDS.items():
        found = perplexity(model, scale_of, training, validation)
        before = before or found
        print(f'"{name}",{found:.5f},{found / before - 1:+.3%}')


if __name__ == "__main__":
    main()
