"""Whole language models against those of transformers with SDPA, both eager and compiled.

train: a step of training in bf16, forward, loss, backward and fused AdamW, without dropout. flops: 6 for each weight
that a token meets, and 3.5 times those of the causal half of attention's forward. peak_mb: gradients and what the step
needs for a while, beyond parameters and the optimizer's state. train_masters: the same with masters of the weights in
float32. train_recipe: as the recipes of training/ do it: weights in float32 under autocast, a residual stream in
float32, dropout, gradients that are clipped, and a loss that overwrites all logits.

decode: one token for each sequence at the end of a cache that it fills. flash_attn replays the CUDA graph that
`generate(cg=True)` makes; transformers has its static cache, eager and compiled, and the compiled one replays a CUDA
graph, too. bytes: the weights that a token meets, and the cache, once. peak_mb: what a step needs beyond weights and
cache.

A case can take minutes to compile: name those that are wanted, as in

    python -m benchmarks.benchmark_models 'train/*'
    python -m benchmarks.benchmark_models 'decode/gpt2-124M *' --providers flash_attn 'transformers compiled'
"""

import dataclasses
import functools
import gc
import inspect

import torch

from benchmarks.benchmark_block import graphed
from benchmarks.harness import DTYPES, Case, main
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.llama import llama_config_to_gpt2_config
from flash_attn.utils.generation import InferenceParams, update_graph_cache

FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True, pad_vocab_size_multiple=8)


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of a model; of GPT-2's kind, or Llama's where there is a number of key heads."""

    width: int
    layers: int
    heads: int
    hidden: int
    vocab: int
    heads_kv: int | None = None

    @property
    def keys(self):
        """Features of the keys of a layer."""
        return self.width * (self.heads_kv or self.heads) // self.heads

    @property
    def weights(self):
        """Elements of the matrices that a token meets, with the head."""
        mlp = (3 if self.heads_kv else 2) * self.width * self.hidden
        return self.layers * (2 * self.width * (self.width + self.keys) + mlp) + self.vocab * self.width


MODELS = {
    "cuda": {
        "gpt2-124M": Shape(768, 12, 12, 3072, 50257),
        "gpt2-350M": Shape(1024, 24, 16, 4096, 50257),
        "llama-1.3B": Shape(2048, 24, 16, 5504, 32000, heads_kv=16),
        "llama-7B": Shape(4096, 32, 32, 14336, 32000, heads_kv=8),
    },
    "cpu": {"gpt2-tiny": Shape(64, 2, 2, 256, 101), "llama-tiny": Shape(64, 2, 2, 192, 96, heads_kv=1)},
}
STEPS = {  # batch and length
    "cuda": {"gpt2-124M": (32, 1024), "gpt2-350M": (16, 1024), "llama-1.3B": (8, 2048)},
    "cpu": {"gpt2-tiny": (2, 16), "llama-tiny": (2, 16)},
}
DECODED = {"cuda": ("gpt2-124M", "llama-1.3B", "llama-7B"), "cpu": ("gpt2-tiny", "llama-tiny")}
BATCHES = {"cuda": (1, 8, 32), "cpu": (2,)}
CONTEXTS = {"cuda": (1024, 8192), "cpu": (16,)}


@dataclasses.dataclass(frozen=True)
class Training:
    """How a step of training is computed."""

    weights: str = "bf16"  # or "masters", bf16 with masters in float32; or "fp32", under autocast
    dropout: float = 0.0
    clip: float | None = None  # the largest norm of the gradients
    residual_in_fp32: bool = False  # in this library's model
    of_logits: bool = False  # of which the loss is computed in this library's model, and not of hidden states


TRAINING = {
    "train": Training(),
    "train_masters": Training(weights="masters"),
    "train_recipe": Training("fp32", dropout=0.1, clip=1.0, residual_in_fp32=True, of_logits=True),
}


def cases(device):
    for op, how in TRAINING.items():
        for name, (batch, seqlen) in STEPS[device].items():
            shape = MODELS[device][name]
            attention = 3.5 * 2 * seqlen * shape.width * shape.layers
            yield Case(
                op,
                f"{name} {batch}x{seqlen}",
                "bf16",
                functools.partial(trainers, shape, batch, seqlen, device, how),
                flops=batch * seqlen * (6 * shape.weights + attention),
            )
    for name in DECODED[device]:
        shape = MODELS[device][name]
        for batch in BATCHES[device]:
            for context in CONTEXTS[device]:
                cache = 2 * shape.layers * batch * context * shape.keys
                yield Case(
                    "decode",
                    f"{name} {batch}x{context}",
                    "bf16",
                    functools.partial(decoders, shape, batch, context, device),
                    bytes=2 * (shape.weights + cache),
                )


def configuration(shape, positions, dropout=0.0):
    """The configuration of transformers for a shape: of GPT-2, or of Llama, without dropout but in attention, where
    there are key heads."""
    import transformers

    tokens = dict(vocab_size=shape.vocab, bos_token_id=1, eos_token_id=2)
    if shape.heads_kv is None:
        return transformers.GPT2Config(
            n_embd=shape.width,
            n_layer=shape.layers,
            n_head=shape.heads,
            n_inner=shape.hidden,
            n_positions=positions,
            resid_pdrop=dropout,
            embd_pdrop=dropout,
            attn_pdrop=dropout,
            **tokens,
        )
    return transformers.LlamaConfig(
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads_kv,
        intermediate_size=shape.hidden,
        max_position_embeddings=positions,
        attention_dropout=dropout,
        **tokens,
    )


def ours(shape, positions, device, how=TRAINING["train"]):
    """The package's model, with every option for speed."""
    config = configuration(shape, positions, how.dropout)
    if shape.heads_kv is not None:
        config = llama_config_to_gpt2_config(config)
    fields = FUSED | dict(fused_mlp=shape.heads_kv is None)
    fields |= dict(residual_in_fp32=True) if how.residual_in_fp32 else {}
    for field, value in fields.items():
        setattr(config, field, value)
    return GPTLMHeadModel(config, device=device, dtype=dtype_of(how))


def theirs(shape, positions, device, how=TRAINING["train"]):
    import transformers

    config = configuration(shape, positions, how.dropout)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype_of(how))


def dtype_of(how):
    """The dtype of weights."""
    return DTYPES["fp32" if how.weights == "fp32" else "bf16"]


def freed():
    """Give back what the models of the last case held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# ---------------------------------------------------------------------------------------------------------------------
# Training


def trainers(shape, batch, seqlen, device, how):
    """A step of each model, which is made at the first call."""
    freed()
    input_ids = torch.randint(shape.vocab, (batch, seqlen), device=device)
    return {
        f"{provider}{' compiled' if compiled else ''}": lazily(
            functools.partial(trainer, make, shape, input_ids, compiled, how)
        )
        for provider, make in (("flash_attn", ours), ("transformers", theirs))
        for compiled in (False, True)
    }


def trainer(make, shape, input_ids, compiled, how):
    """A function that takes a step of training with a model that `make` makes."""
    from training.src.optim.adamw import MasterAdamW

    model = make(shape, input_ids.shape[1], input_ids.device, how).train()
    optimizer_cls = MasterAdamW if how.weights == "masters" else torch.optim.AdamW
    optimizer = optimizer_cls(model.parameters(), lr=1e-6, fused=True)
    run = torch.compile(model) if compiled else model
    of_logits = CrossEntropyLoss(inplace_backward=True, gradient_in_forward=True)
    following = input_ids.roll(-1, dims=1).flatten()

    def step():
        with torch.autocast(input_ids.device.type, torch.bfloat16, enabled=how.weights == "fp32"):
            if how.of_logits and make is ours:
                loss = of_logits(run(input_ids).logits.flatten(0, 1), following)
            else:
                loss = run(input_ids, labels=input_ids).loss
        loss.backward()
        if how.clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), how.clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def lazily(make):
    """A function that makes another at its first call, and calls it."""
    made = functools.cache(make)
    return lambda: made()()


# ---------------------------------------------------------------------------------------------------------------------
# Decoding


def decoders(shape, batch, context, device):
    freed()
    tokens = torch.randint(shape.vocab, (batch, 1), device=device)
    their_step = functools.cache(functools.partial(decoder_of_transformers, shape, context, tokens))
    return {
        "flash_attn": lazily(functools.partial(decoder, shape, context, tokens)),
        "transformers": lambda: their_step()[0](),
        "transformers compiled": lambda: their_step()[1](),
    }


def decoder(shape, context, tokens):
    """A step as in `generate` with CUDA graphs; on the CPU, the same call without."""
    batch, device = len(tokens), tokens.device
    model = ours(shape, context, device).eval()
    positions = torch.full_like(tokens, context - 1)
    if device.type == "cuda":
        graphs = update_graph_cache(model, None, batch, context - 1, context)
        caches, run = graphs.inference_params.key_value_memory_dict, graphs.run
        step = functools.partial(run, tokens, positions, context - 1)
    else:
        caches = model.allocate_inference_cache(batch, context)
        lengths = torch.full((batch,), context - 1, dtype=torch.int32)
        params = InferenceParams(context, batch, context - 1, 0, caches, lengths)
        step = torch.no_grad()(
            functools.partial(model, tokens, position_ids=positions, inference_params=params, num_last_tokens=1)
        )
    for cache in caches.values():
        cache.normal_()
    return step


def decoder_of_transformers(shape, context, tokens):
    """(eager step, compiled step in a CUDA graph), of one model and one cache."""
    from transformers import StaticCache

    model = theirs(shape, context, tokens.device).eval()
    cache = StaticCache(config=model.config, max_cache_len=context)
    position = torch.full_like(tokens, context - 1)
    options = dict(position_ids=position, past_key_values=cache, use_cache=True)
    if "cache_position" in inspect.signature(type(model).forward).parameters:
        options["cache_position"] = position[0]

    def step(run):
        run(tokens, **options)
        if lengths:
            torch._foreach_sub_(lengths, 1)  # keeps the next token from being past the end of the cache

    with torch.no_grad():
        model(tokens, **options)  # allocates the cache
    for layer in cache.layers:
        layer.keys.normal_()
        layer.values.normal_()
    lengths = [layer.cumulative_length for layer in cache.layers if hasattr(layer, "cumulative_length")]
    for length in lengths:
        length.fill_(context - 1)
    compiled = torch.compile(model)
    return torch.no_grad()(functools.partial(step, model)), graphed(
        functools.partial(step, compiled), tokens.device.type
    )


if __name__ == "__main__":
    main(__doc__, "models", cases, baseline="transformers compiled")
