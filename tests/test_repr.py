"""What modules print of themselves, as a part of a model: what they were made with, as torch's do."""

import functools

import pytest

from flash_attn.layers.rotary import RotaryEmbedding
from flash_attn.modules.mha import MHA
from flash_attn.ops import rms_norm
from flash_attn.ops.fused_dense import FusedMLP
from flash_attn.ops.layer_norm import DropoutAddLayerNorm
from flash_attn.ops.triton import layer_norm as triton_norm

ROTARY = "RotaryEmbedding(16, base=10000.0, interleaved=True, scale_base=None)"
MODULES = {
    "RMSNorm(8, eps=0.1)": functools.partial(rms_norm.RMSNorm, 8, 0.1),
    "RMSNorm(8, eps=1e-05, zero_centered_weight=True)": functools.partial(
        triton_norm.RMSNorm, 8, zero_centered_weight=True
    ),
    "DropoutAddLayerNorm(8, prenorm=False, p=0.5, eps=1e-05, residual_in_fp32=False)": functools.partial(
        DropoutAddLayerNorm, 8, p=0.5
    ),
    "DropoutAddRMSNorm(8, prenorm=True, p=0.0, eps=1e-05, residual_in_fp32=False)": functools.partial(
        rms_norm.DropoutAddRMSNorm, 8, prenorm=True
    ),
    ROTARY: functools.partial(RotaryEmbedding, 16, interleaved=True),
    "FusedMLP(\n  activation='relu', checkpoint_lvl=1\n  (fc1)": functools.partial(
        FusedMLP, 8, activation="relu", checkpoint_lvl=1
    ),
    "MHA(\n  64, num_heads=4, num_heads_kv=2, head_dim=16, causal=True, use_flash_attn=False\n  (rotary_emb): "
    + ROTARY: (functools.partial(MHA, 64, 4, 2, causal=True, rotary_emb_dim=16, rotary_emb_interleaved=True)),
}


@pytest.mark.parametrize("printed", MODULES, ids=lambda printed: printed.partition("(")[0])
def test_repr(printed):
    assert repr(MODULES[printed]()).startswith(printed)
