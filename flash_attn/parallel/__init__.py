"""Training over many processes: tokens in chunks, meshes of processes, and parameters as DTensors."""

from flash_attn.parallel._chunked import chunked, set_mlp_chunks
from flash_attn.parallel._dtensor import to_dtensor
from flash_attn.parallel._mesh import Meshes, build_mesh

__all__ = ["Meshes", "build_mesh", "chunked", "set_mlp_chunks", "to_dtensor"]
