"""Attention divided over two processes: each has some of the heads, and between layers some of the tokens.

python examples/sequence_parallel.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flash_attn.modules.mha import MHA, ParallelMHA
from flash_attn.utils.distributed import all_gather

DIM, HEADS, TOKENS = 64, 4, 16


def run(rank, processes, file):
    on_gpus = torch.cuda.device_count() >= processes
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    dist.init_process_group("nccl" if on_gpus else "gloo", f"file://{file}", rank=rank, world_size=processes)
    group = dist.group.WORLD
    torch.manual_seed(0)  # the whole layer is the same in every process
    whole = MHA(DIM, HEADS, causal=True, use_flash_attn=True, device=device)
    x = torch.randn(TOKENS, DIM, device=device)

    # Each process has some of the heads: their rows of Wqkv, and their columns of out_proj.
    part = ParallelMHA(DIM, HEADS, group, causal=True, use_flash_attn=True, sequence_parallel=True, device=device)
    with torch.no_grad():
        for name in ("weight", "bias"):
            of_all = getattr(whole.Wqkv, name).unflatten(0, (3, HEADS, DIM // HEADS))
            getattr(part.Wqkv, name).copy_(of_all.chunk(processes, dim=1)[rank].flatten(0, 2))
        part.out_proj.weight.copy_(whole.out_proj.weight.chunk(processes, dim=1)[rank])
        if rank == 0:  # which adds the bias
            part.out_proj.bias.copy_(whole.out_proj.bias)

    mine = x.chunk(processes)[rank]  # between the layers, a process has its part of the tokens only
    out = all_gather(part(mine, seqlen=TOKENS), group)
    difference = (out - whole(x[None])[0]).abs().max().item()
    if rank == 0:
        print(f"{processes} processes, {len(mine)} tokens each; largest difference {difference:.1e}")
    assert difference < 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (2, f"{folder}/meet"), nprocs=2)
