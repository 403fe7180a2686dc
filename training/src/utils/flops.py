"""How many floating-point operations a model takes.

    profile_fvcore(model, input_size=(1024,), input_dtype=torch.int64)      # counted in a forward pass
    train_flops_per_token(model, seqlen=1024)                               # from the sizes of the layers

Counting is done by torch.utils.flop_counter. It knows flash-attn's operations: they count like the matrix products that
they stand for, and attention like all of its scores, also those behind a causal mask.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry, register_flop_formula

from flash_attn.models._config import is_gpt2_config
from src.utils.modules import evaluating

has_fvcore_profiling = has_deepspeed_profiling = True  # both names are kept; both count with PyTorch

# Dense bf16 tensor cores in TFLOP/s, by a part of the device's name. The first that is found counts.
PEAK_BF16_TFLOPS = {
    "B200": 2250,
    "B100": 1750,
    "H20": 148,
    "H200": 989,
    "GH200": 989,
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H800": 989,
    "A100": 312,
    "A800": 312,
    "A40": 150,
    "A30": 165,
    "A10G": 70,
    "A10": 125,
    "A6000": 155,
    "L40S": 362,
    "L40": 181,
    "L4": 121,
    "RTX 5090": 210,
    "RTX 4090": 165,
    "RTX 3090": 71,
}


def peak_tflops(device_name: str) -> float | None:
    """The dense bf16 peak of a GPU in TFLOP/s; None if its name is not in the table."""
    words = device_name.replace("-", " ").split()
    for name, peak in PEAK_BF16_TFLOPS.items():
        wanted = name.split()
        if any(words[i : i + len(wanted)] == wanted for i in range(len(words))):
            return peak
    return None


def train_flops_per_token(model: nn.Module, seqlen: int) -> float:
    """FLOPs of forward and backward for one token of a transformer, without recomputation.

    6 for each weight of a matrix product, the head of a language model included, and 12 * layers * seqlen * width for
    attention. That is Megatron's formula (arXiv:2104.04473) without its factor for recomputation, for layers of any
    shape. Norms, activations and the softmax are not counted; attention counts as if there were no causal mask, so a
    window of our decoder counts twice, and no more than seqlen. Windows count, documents do not: with
    datamodule.separate_documents attention computes less than this, and what is made of it, such as time/mfu, is too
    high by that. For a tensor parallel model, it is the share of this process.

    Arguments:
        model: has a `config` with the layers and width of attention, under the names of GPT2Config or LlamaConfig.
        seqlen: tokens of a sequence.

    Raises ValueError if the model has no such config.
    """
    config = getattr(model, "config", None)
    layers, heads = (
        _first_of(config, "n_layer", "num_hidden_layers"),
        _first_of(config, "n_head", "num_attention_heads"),
    )
    width = _first_of(config, "n_embd", "hidden_size")
    if layers is None or heads is None or width is None:
        raise ValueError(
            "model must have a config with n_layer, n_head and n_embd, or num_hidden_layers, num_attention_heads and "
            f"hidden_size, found {type(config).__name__}"
        )
    width = heads * (getattr(config, "head_dim", None) or width // heads)
    weights = sum(
        module.weight.numel()
        for module in model.modules()
        if _has_own_weight(module) and module.weight.dim() == 2 and not isinstance(module, nn.Embedding)
    )
    group = getattr(model, "process_group", None)
    parts = 1 if group is None else dist.get_world_size(group)
    return 6 * weights + 12 * _keys(config, layers, seqlen) * width / parts


def _keys(config, layers, seqlen):
    """How many keys count for a token, in all layers together."""
    windows = getattr(config, "sliding_window", None) if is_gpt2_config(config) else None  # others may not use theirs
    windows = windows if isinstance(windows, Sequence) else layers * [windows]
    return sum(seqlen if window is None else min(seqlen, 2 * window) for window in windows)


def _has_own_weight(module):
    """Whether a module has a weight, and not a wrapper the weight of what it wraps, as that of torch.compile does."""
    own = {*vars(module), *(name for name, _ in module.named_parameters(recurse=False))}
    is_own = "weight" in own or is_parametrized(module, "weight")
    return is_own and isinstance(module.weight, Tensor)


def profile_fvcore(
    model: nn.Module,
    input_size: Sequence[int] = (3, 224, 224),
    input_dtype: torch.dtype = torch.float32,
    max_depth: int = 4,
    batch_size: int = 1,
    detailed: bool = False,
    force_cpu: bool = False,
) -> tuple[FlopCounterMode, int, Counter, int]:
    """Count one forward pass in evaluation mode. The name is that of the library once used.

    Returns (counter, macs, activations by operation, their total). counter.get_flop_counts() has the FLOPs of each
    module; one multiply-accumulate (MAC) is two of them. Activations are the elements that matrix products and
    convolutions write.

    Arguments:
        model: runs where its parameters are.
        input_size, input_dtype: of the input, zeros (batch_size, *input_size).
        max_depth: of the modules in the table that is printed if `detailed`.
        force_cpu: move the model to the CPU first.
    """
    if force_cpu:
        model = model.to("cpu")
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    x = torch.zeros(batch_size, *input_size, dtype=input_dtype, device=device)
    counter = FlopCounterMode(depth=max_depth, display=detailed)
    activations = _ActivationCounter()
    # If a compiled model's first call were under a counter, it would silently never be compiled.
    eagerly = torch.compiler.set_stance("force_eager")
    with evaluating(model), torch.no_grad(), eagerly, counter, activations:
        model(x)
    return counter, counter.get_total_flops() // 2, activations.counts, activations.counts.total()


def profile_deepspeed(
    model: nn.Module,
    input_size: Sequence[int] = (3, 224, 224),
    input_dtype: torch.dtype = torch.float32,
    batch_size: int = 1,
    detailed: bool = False,
) -> tuple[int, int]:
    """Count one forward pass as `profile_fvcore` does. Returns (macs, parameters)."""
    macs = profile_fvcore(model, input_size, input_dtype, batch_size=batch_size, detailed=detailed)[1]
    return macs, sum(p.numel() for p in model.parameters())


class _ActivationCounter(TorchDispatchMode):
    """Counts the elements of what matrix products and convolutions write, by operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func._overloadpacket in flop_registry:
            first = out[0] if isinstance(out, (tuple, list)) else out
            self.counts[str(func._overloadpacket)] += first.numel()
        return out


def _first_of(config, *names):
    return next((getattr(config, name) for name in names if hasattr(config, name)), None)


# ---------------------------------------------------------------------------------------------------------------------
# An operation of PyTorch


def _sdpa_on_cpu(q, k, *_, out_shape=None, **__):
    return 4 * math.prod(q) * k[-2]


_SDPA_ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
if _SDPA_ON_CPU not in flop_registry:  # PyTorch 2.13 has formulas for attention on GPUs only
    register_flop_formula(_SDPA_ON_CPU)(_sdpa_on_cpu)
