"""Context parallelism by the names of other packages, on `flash_attn.context_parallel`. No top-level name is claimed.

import flash_attn.context_parallel.compat.ring_flash_attn as ring_flash_attn
"""

__all__: list[str] = []
