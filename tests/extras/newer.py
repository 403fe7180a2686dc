"""What the tests of FlashAttention-3's and -4's names share."""

import math

import torch
from cases import Case
from compare import assert_error_ratio

EMPTY_ROWS = Case(seqlen_q=40, seqlen_k=33, heads_k=2, causal=True)  # the first 7 rows see no key
WIDE = Case(seqlen_q=33, seqlen_k=65, heads_k=2)


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def unseen(lse):
    """The lse of flash_attn as FlashAttention-3 and -4 have it."""
    return lse.masked_fill(lse == math.inf, -math.inf)


def run(function, inputs, dout, dlse):
    """(out, lse, and the gradients of the inputs)."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out, lse = function(*leaves)
    seen = lse.isfinite()
    return out, lse, *torch.autograd.grad([out, lse[seen]], leaves, [dout, dlse[seen]])


def assert_all_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def assert_model_is_right(family, options, padded, implementation, device):
    """A model of transformers with this attention gives logits as exact as with transformers' own."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=101,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        **options,
    )
    config._experts_implementation = "eager"  # the only one for float64
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(device).eval()
    tokens = torch.randint(1, 101, (2, 17), device=device)
    mask = torch.ones_like(tokens)
    mask[1, 13:] = 0 if padded else 1  # rows of padding see some token, too: they would be NaN in eager attention

    def logits(dtype, attention):
        model.to(dtype)
        model.config._attn_implementation = attention  # past what asks for a GPU
        with torch.no_grad():
            return model(tokens, attention_mask=mask, use_cache=False).logits[mask.bool()]

    exact, plain = (logits(dtype, "eager") for dtype in (torch.float64, torch.bfloat16))
    assert_error_ratio(logits(torch.bfloat16, implementation), exact, plain)
