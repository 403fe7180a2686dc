"""Attention that is exact and linear in memory, with the interface of flash-attn 2.8.

    from flash_attn import flash_attn_func

CUDA kernels run where the kernel library was built; everywhere else the same functions run in plain torch.
`python -m flash_attn` tells which. The functions are described in `flash_attn.flash_attn_interface`, and those that
choose how far results depend on the batch in `flash_attn.batch_invariance`.
"""

__version__ = "2.8.3.post100"

# Another distribution's flash_attn.cute may be installed beside this package.
__path__ = __import__("pkgutil").extend_path(__path__, __name__)

from flash_attn import _removed
from flash_attn.batch_invariance import batch_invariant, get_batch_invariant, set_batch_invariant
from flash_attn.flash_attn_interface import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

__all__ = [
    "batch_invariant",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "get_batch_invariant",
    "set_batch_invariant",
]

__getattr__ = _removed.getattr_of(__name__, _removed.UNPADDED)
