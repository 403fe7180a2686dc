"""Which heads each process of a tensor parallel layer has."""

from typing import NamedTuple

from flash_attn.utils.distributed import get_dim_for_local_rank


class Heads(NamedTuple):
    """The heads of a process: `q`, its query heads, and `kv`, the key and value heads that these attend to."""

    q: range
    kv: range


def heads_of_process(num_heads: int, num_heads_kv: int, world_size: int, rank: int) -> Heads:
    """Returns the heads of process `rank`, divided as evenly as possible, the first processes having more.

    Query heads stay with their key head. If there are fewer key heads than processes, several processes have the same
    one and divide its query heads. num_heads must be a multiple of num_heads_kv, and at least world_size.

    >>> heads_of_process(num_heads=8, num_heads_kv=2, world_size=4, rank=1)
    Heads(q=range(2, 4), kv=range(0, 1))
    """
    heads_of_group = num_heads // num_heads_kv  # query heads that share a key head
    if num_heads_kv >= world_size:
        kv = _span(num_heads_kv, world_size, rank)
        return Heads(range(kv.start * heads_of_group, kv.stop * heads_of_group), kv)
    head, sharing = next(
        (head, processes)
        for head in range(num_heads_kv)
        if rank in (processes := _span(world_size, num_heads_kv, head))
    )
    own = _span(heads_of_group, len(sharing), rank - sharing.start)
    first = head * heads_of_group
    return Heads(range(first + own.start, first + own.stop), range(head, head + 1))


def features_of_process(own: Heads, num_heads_kv: int, head_dim: int, world_size: int) -> tuple[int, int]:
    """Returns how many outputs of Wqkv a process computes: for its queries, and for keys and values.

    If there are fewer key heads than processes, keys and values are divided evenly, so that only one process has each
    row of Wqkv.
    """
    kv = 2 * num_heads_kv * head_dim // world_size if num_heads_kv < world_size else 2 * len(own.kv) * head_dim
    return len(own.q) * head_dim, kv


def can_be_divided(num_heads_kv: int, head_dim: int, world_size: int) -> bool:
    """Returns whether each process can have key heads, or an equal part of all rows of keys and values."""
    return num_heads_kv >= world_size or 2 * num_heads_kv * head_dim % world_size == 0


def _span(size, parts, i):
    """Part i of range(size) divided into `parts`."""
    start = sum(get_dim_for_local_rank(size, parts, each) for each in range(i))
    return range(start, start + get_dim_for_local_rank(size, parts, i))
