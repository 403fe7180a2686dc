"""The name of flash-attn 2.8's compiled module, under which other packages import its positional functions.

The functions are those of `flash_attn.flash_attn_interface.flash_attn_gpu`.
"""

from flash_attn._flash_attn_gpu import bwd, fwd, fwd_kvcache, varlen_bwd, varlen_fwd

__all__ = ["bwd", "fwd", "fwd_kvcache", "varlen_bwd", "varlen_fwd"]
