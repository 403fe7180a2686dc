"""The names of flash-attn's operations in Triton. The CUDA library computes most of them."""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
