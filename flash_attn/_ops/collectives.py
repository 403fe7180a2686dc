"""Collectives of one tensor, by the names that this torch has for them: 2.13 has new ones, and its compiler knows both.

Both are None where torch was built without torch.distributed.
"""

import torch.distributed as dist

all_gather = getattr(dist, "all_gather_single", getattr(dist, "all_gather_into_tensor", None))
reduce_scatter = getattr(dist, "reduce_scatter_single", getattr(dist, "reduce_scatter_tensor", None))
