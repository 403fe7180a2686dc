"""The keep mask of attention dropout. It depends only on (seed, offset, batch entry, query head, row, column).

Random bits come from Philox-4x32 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011) with 7 rounds.
The score matrix of one (batch entry, query head) is cut into tiles of 16 rows x 32 columns. A tile takes 32 draws of
16 bytes, and each byte decides one element: it is kept if the byte is at most floor(255 (1 - p)).

    key      the 64-bit seed
    counter  low 64 bits: offset + 32 (batch entry * heads + head) + lane,  lane = 0 .. 31
             high 64 bits: row // 16 in the low word, column // 32 in the high word

Byte 8y + 4x + 2u + z of a lane (y, x, u, z in {0, 1}) decides row lane // 4 + 8u and
column 16y + 8x + 2 (lane % 4) + z of the tile.
"""

import math

import torch

from flash_attn._reference.philox import philox

_TILE_ROWS, _TILE_COLS, _LANES = 16, 32, 32
_ROUNDS = 7
_WORD = 0xFFFFFFFF


def keep_mask(
    rng_state: torch.Tensor, dropout_p: float, batch_heads: torch.Tensor, rows: range, cols: range
) -> torch.Tensor:
    """Returns which elements dropout keeps.

    rng_state: (2,) int64, the seed (read as unsigned) and the offset.
    batch_heads: int64, any shape; batch entry * number of query heads + query head.
    rows, cols: ranges of query rows and of key columns, with step 1.

    Returns a bool tensor (*batch_heads.shape, len(rows), len(cols)), true where kept.

    >>> keep_mask(torch.tensor([1, 0]), 0.5, torch.arange(2), range(3), range(5)).shape
    torch.Size([2, 3, 5])
    """
    row_tiles = range(rows.start // _TILE_ROWS, -(-rows.stop // _TILE_ROWS))
    col_tiles = range(cols.start // _TILE_COLS, -(-cols.stop // _TILE_COLS))
    tiles = _random_bytes(rng_state, batch_heads, row_tiles, col_tiles) <= keep_threshold(dropout_p)
    covering = tiles.transpose(-3, -2).flatten(-4, -3).flatten(-2, -1)
    top, left = rows.start - row_tiles.start * _TILE_ROWS, cols.start - col_tiles.start * _TILE_COLS
    return covering[..., top : top + len(rows), left : left + len(cols)]


def keep_threshold(dropout_p: float) -> int:
    """The largest of the 256 equally likely byte values that keeps an element."""
    return math.floor(255 * (1 - dropout_p))


def _random_bytes(rng_state, batch_heads, row_tiles, col_tiles):
    """Random bytes (*batch_heads.shape, row tiles, column tiles, 16, 32), each at its element of the tile."""
    seed, offset = rng_state.tolist()
    device = batch_heads.device
    lanes = torch.arange(_LANES, device=device)
    low = (offset + 32 * batch_heads)[..., None, None, None] + lanes
    row_word = torch.arange(row_tiles.start, row_tiles.stop, device=device)[:, None, None]
    col_word = torch.arange(col_tiles.start, col_tiles.stop, device=device)[:, None]
    words = philox((low & _WORD, low >> 32 & _WORD, row_word, col_word), (seed & _WORD, seed >> 32 & _WORD), _ROUNDS)
    shifts = torch.arange(0, 32, 8, device=device)
    drawn = torch.stack(torch.broadcast_tensors(*words), -1)[..., None] >> shifts & 0xFF
    # (.., lane // 4, lane % 4, y, x, u, z) to (.., u, lane // 4, y, x, lane % 4, z)
    drawn = drawn.to(torch.uint8).unflatten(-3, (8, 4)).flatten(-2).unflatten(-1, (2, 2, 2, 2))
    batch_dims = range(drawn.dim() - 6)
    order = [drawn.dim() - 6 + i for i in (4, 0, 2, 3, 1, 5)]
    return drawn.permute(*batch_dims, *order).reshape(*drawn.shape[:-6], _TILE_ROWS, _TILE_COLS)
