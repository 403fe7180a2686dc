"""One step of a small model on a packed row that is divided among ranks, compared with the same step in one process.

torchrun --nproc-per-node 2 examples/context_parallel.py
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from flash_attn.context_parallel import Plan, cp_attn_func
from flash_attn.utils.distributed import device_of

DIM, HEADS, VOCAB = 64, 4, 100


class Layer(nn.Module):
    """Attention and a feed-forward layer. Only attention knows the plan."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x, plan):
        q, k, v = self.qkv(F.layer_norm(x, (DIM,))).unflatten(-1, (3, HEADS, -1)).unbind(2)
        x = x + self.out(cp_attn_func(q, k, v, causal=True, plan=plan).flatten(2))
        return x + self.mlp(x)


def step(batch, plan):
    """The loss of all tokens and the gradient of the embedding, after a step with `plan`."""
    torch.manual_seed(0)
    with plan.positions.device:
        tokens, positions = nn.Embedding(VOCAB, DIM), nn.Embedding(64, DIM)
        layers, head = nn.ModuleList([Layer(), Layer()]), nn.Linear(DIM, VOCAB)
    part = plan.shard_batch(batch)  # labels are shifted before they are divided
    x = tokens(part["input_ids"]) + positions(part["position_ids"])
    for layer in layers:
        x = layer(x, plan)
    labels = part["shift_labels"].flatten()
    losses = F.cross_entropy(head(x).flatten(0, 1), labels, reduction="sum")
    loss = plan.mean_loss(losses, (labels != -100).sum())
    loss.backward()
    for value in (loss.detach(), tokens.weight.grad):  # as DistributedDataParallel or FSDP do
        dist.all_reduce(value, group=plan.group)
        value /= plan.world_size
    return loss.detach(), tokens.weight.grad


if __name__ == "__main__":
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    if on_gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    device = device_of(dist.group.WORLD)
    seqlens = [50, 7, 64, 1, 30]
    ids = torch.randint(VOCAB, (1, sum(seqlens)), generator=torch.Generator().manual_seed(1)).to(device)
    batch = dict(input_ids=ids, labels=ids)
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    plan = Plan(seqlens, dist.group.WORLD, granularity=1)
    print(plan)
    loss, grad = step(batch, plan)
    expected, expected_grad = step(batch, Plan(seqlens, alone))
    difference = max((loss - expected).abs().item(), (grad - expected_grad).abs().max().item())
    assert difference < 1e-5, difference
    if rank == 0:
        print(f"loss {loss:.4f} on {ranks} ranks; largest difference to one process {difference:.1e}")
    dist.destroy_process_group()
