"""FlashAttention-4's functions, by its names and arguments, computed by this project's `flash_attn`."""

from flash_attn.cute.interface import flash_attn_func, flash_attn_varlen_func

__version__ = "4.0.0b20.post101"

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
