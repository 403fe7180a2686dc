"""A transformer block against the same block of transformers with SDPA, both eager and compiled.

step: forward and backward, gradients of the input and of all parameters. flops: 6 for each parameter and token, and 3.5
times those of the causal half of attention's forward.

decode: one token for each sequence at the end of a cache that it fills. All providers replay a CUDA graph;
transformers has its static cache. bytes: the parameters, and the cache.
"""

import functools

import torch
import torch.nn.functional as F

from benchmarks.harness import DTYPES, Case, main
from flash_attn.modules.block import Block
from flash_attn.modules.mha import MHA
from flash_attn.modules.mlp import FusedMLP, GatedMlp
from flash_attn.ops.triton.layer_norm import RMSNorm
from flash_attn.utils.generation import InferenceParams

MODELS = {  # name: width, heads, features within the MLP
    "cuda": {"gpt2-medium": (1024, 16, 4096), "llama-7b": (4096, 32, 11008)},
    "cpu": {"gpt2-tiny": (64, 2, 256), "llama-tiny": (64, 2, 192)},
}
STEPS = {  # batches and lengths; in the first step, torch takes longer to launch the kernels than they take to run
    "cuda": {"gpt2-medium": [(8, 1024), (32, 1024)], "llama-7b": [(2, 2048)]},
    "cpu": {"gpt2-tiny": [(2, 8)], "llama-tiny": [(2, 8)]},
}
BATCHES = {"cuda": (1, 32), "cpu": (1,)}
CAPACITY = {"cuda": 2048, "cpu": 16}


def cases(device):
    for name, (dim, _, hidden) in MODELS[device].items():
        parameters = 4 * dim**2 + (3 if name.startswith("llama") else 2) * dim * hidden
        for batch, seqlen in STEPS[device][name]:
            yield Case(
                "block_step",
                f"{name} {batch}x{seqlen}",
                "bf16",
                functools.partial(steps, name, batch, seqlen, device),
                flops=batch * seqlen * (6 * parameters + 3.5 * 2 * seqlen * dim),
            )
        for batch in BATCHES[device]:
            capacity = CAPACITY[device]
            yield Case(
                "block_decode",
                f"{name} {batch}x{capacity}",
                "bf16",
                functools.partial(decoders, name, batch, capacity, device),
                bytes=2 * (parameters + 2 * batch * capacity * dim),
            )


def ours(name, device):
    """The package's block."""
    dim, heads, hidden = MODELS[device][name]
    factory = dict(device=device, dtype=DTYPES["bf16"])
    mixer = functools.partial(MHA, num_heads=heads, causal=True, use_flash_attn=True, layer_idx=0, **factory)
    if name.startswith("gpt2"):
        mixer = functools.partial(mixer, fused_bias_fc=True)
        mlp, norm = functools.partial(FusedMLP, hidden_features=hidden, **factory), torch.nn.LayerNorm
    else:
        plain = dict(qkv_proj_bias=False, out_proj_bias=False, rotary_emb_dim=dim // heads)
        mixer, norm = functools.partial(mixer, **plain), RMSNorm
        mlp = functools.partial(
            GatedMlp, hidden_features=hidden, activation=F.silu, bias1=False, bias2=False, multiple_of=64, **factory
        )
    return Block(dim, mixer, mlp, functools.partial(norm, **factory), fused_dropout_add_ln=True)


def theirs(name, device, seqlen):
    """The block of transformers, its configuration and what the model would pass to it."""
    import transformers

    dim, heads, hidden = MODELS[device][name]
    options = dict(attn_implementation="sdpa")
    if name.startswith("gpt2"):
        from transformers.models.gpt2.modeling_gpt2 import GPT2Block

        config = transformers.GPT2Config(
            n_embd=dim, n_head=heads, n_inner=hidden, n_layer=1, attn_pdrop=0.0, resid_pdrop=0.0, **options
        )
        return GPT2Block(config, layer_idx=0).to(device, DTYPES["bf16"]), config, lambda x, positions: {}
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=dim,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=hidden,
        num_hidden_layers=1,
        max_position_embeddings=seqlen,
        **options,
    )
    tables = LlamaRotaryEmbedding(config).to(device)
    block = LlamaDecoderLayer(config, layer_idx=0).to(device, DTYPES["bf16"])
    return block, config, lambda x, positions: {"position_embeddings": tables(x, positions)}


def steps(name, batch, seqlen, device):
    """Forward and backward."""
    x, residual, dout = torch.randn(
        3, batch, seqlen, MODELS[device][name][0], device=device, dtype=DTYPES["bf16"]
    ).unbind(0)
    block = ours(name, device)
    other, _, arguments = theirs(name, device, seqlen)
    options = arguments(x, torch.arange(seqlen, device=device)[None])

    def of_transformers(x):
        return first(other(x, attention_mask=None, **options))

    functions = {"flash_attn": (block, block, (x, residual)), "transformers": (of_transformers, other, (x,))}
    run = {}
    for provider, (function, module, inputs) in functions.items():
        inputs = [tensor.clone().requires_grad_() for tensor in inputs]
        wanted = [*inputs, *module.parameters()]
        run[provider] = functools.partial(gradients, function, inputs, wanted, dout)
        run[f"{provider} compiled"] = functools.partial(gradients, torch.compile(function), inputs, wanted, dout)
    return run


def gradients(function, inputs, wanted, dout):
    outs = function(*inputs)
    outs = outs if isinstance(outs, tuple) else (outs,)
    return torch.autograd.grad(outs, wanted, [dout] * len(outs))


def decoders(name, batch, capacity, device):
    """One token behind capacity - 1 others."""
    dim, heads, _ = MODELS[device][name]
    x, residual = torch.randn(2, batch, 1, dim, device=device, dtype=DTYPES["bf16"]).unbind(0)
    block = ours(name, device).eval()
    lengths = torch.full((batch,), capacity - 1, dtype=torch.int32, device=device)
    cache = torch.randn_like(block.allocate_inference_cache(batch, capacity))
    params = InferenceParams(capacity, batch, capacity - 1, 0, {0: cache}, lengths)

    def run_ours(block=block):
        return block(x, residual, mixer_kwargs={"inference_params": params})

    run_theirs = functools.partial(decoder_of_transformers, name, capacity, device, x)
    return {
        "flash_attn": graphed(run_ours, device),
        "flash_attn compiled": graphed(functools.partial(run_ours, torch.compile(block)), device),
        "transformers": graphed(run_theirs(compiled=False), device),
        "transformers compiled": graphed(run_theirs(compiled=True), device),
    }


def decoder_of_transformers(name, capacity, device, x, compiled):
    from transformers import StaticCache

    block, config, arguments = theirs(name, device, capacity)
    block.eval()
    cache = StaticCache(config=config, max_cache_len=capacity)
    position = torch.tensor([capacity - 1], device=device)
    mask = torch.ones(len(x), 1, 1, capacity, dtype=torch.bool, device=device)
    options = arguments(x, position[None]) | dict(cache_position=position)
    run = torch.compile(block) if compiled else block

    def step():
        for layer in cache.layers:
            if getattr(layer, "cumulative_length", None) is not None:  # such a layer counts its tokens: set it back
                layer.cumulative_length.fill_(capacity - 1)
        return run(x, attention_mask=mask, past_key_values=cache, use_cache=True, **options)

    with torch.no_grad():
        block(x, attention_mask=mask, past_key_values=cache, use_cache=True, **options)  # allocates the cache
    return step


def graphed(step, device):
    """A function that replays `step` as a CUDA graph, which it is captured as at the first call; on a CPU, `step`."""
    graph = None

    @torch.no_grad()
    def run():
        nonlocal graph
        if device == "cpu":
            return step()
        if graph is None:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
        return graph.replay()

    return run


def first(result):
    return result[0] if isinstance(result, tuple) else result


if __name__ == "__main__":
    main(__doc__, "block", cases, baseline="transformers")
