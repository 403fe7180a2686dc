"""FlashAttention-3's package, by its names: the functions are in `flash_attn_interface`, the ops in `_C`."""

__version__ = "3.0.0.post101"
