"""Generation: sampling, the loop over tokens, speculative decoding, and decoding with CUDA graphs.

    output = decode(prompt, model, max_length=200, top_k=40, temperature=0.8, eos_token_id=2, cg=True)
    output.sequences                                                            # (batch, at most max_length)

The contract between these functions and a model. A model is a module that is called as

    model(input_ids, position_ids=None, inference_params=params, num_last_tokens=1).logits

    input_ids: (batch, seqlen) int64, the tokens after the `params.seqlen_offset` tokens that the caches hold.
    position_ids: (batch, seqlen) int64, the position of each token in its own sequence; None for a prompt without
        padding, where they count from 0.
    inference_params: an `InferenceParams`, which the model hands to its layers. It tells them how many tokens their
        caches hold and, for a prompt, where its padding ends. Layers append to their caches; they change nothing else.
    num_last_tokens: for how many tokens at the end logits are wanted.
    logits: (batch, num_last_tokens, vocab). In a tensor-parallel model every process returns the logits of the whole
        vocabulary, and must draw the same random numbers.

A model with learned positions says how many in an attribute `max_positions`, an integer or None. Continuing a longer
sequence is then an error. A model whose vocabulary is padded says how many of the logits count in an attribute
`vocab_size`. If the logits depend on how many tokens the caches have room for, as with rotary embeddings that are
scaled by this number, an attribute `depends_on_capacity` is true: CUDA graphs are then captured for exactly this
number.

For CUDA graphs and for caches with pages, a model also has `allocate_inference_cache` (see `GenerationMixin`), or a
`config` with hidden_size, num_attention_heads and num_hidden_layers.

Modules: `inference_params` is the state that a model is given, `sampling` draws tokens from logits, `decoding` is the
loop, `speculative` the loop with a draft model, `pages` says which pages of a pool each sequence has, `_steps` runs the
model with its caches, `graphs` captures and replays.
"""

from flash_attn.utils.generation.decoding import (
    GenerationMixin,
    GreedySearchDecoderOnlyOutput,
    SampleDecoderOnlyOutput,
    decode,
)
from flash_attn.utils.generation.graphs import (
    DecodingCGCache,
    allocate_inference_cache,
    capture_graph,
    update_graph_cache,
)
from flash_attn.utils.generation.inference_params import InferenceParams
from flash_attn.utils.generation.pages import OutOfPages, PageAllocator, copy_pages
from flash_attn.utils.generation.sampling import (
    modify_logits_for_repetition_penalty,
    modify_logits_for_top_k_filtering,
    modify_logits_for_top_p_filtering,
    sample,
)
from flash_attn.utils.generation.speculative import decode_speculative, sample_speculative

__all__ = [
    "DecodingCGCache",
    "GenerationMixin",
    "GreedySearchDecoderOnlyOutput",
    "InferenceParams",
    "OutOfPages",
    "PageAllocator",
    "SampleDecoderOnlyOutput",
    "allocate_inference_cache",
    "capture_graph",
    "copy_pages",
    "decode",
    "decode_speculative",
    "modify_logits_for_repetition_penalty",
    "modify_logits_for_top_k_filtering",
    "modify_logits_for_top_p_filtering",
    "sample",
    "sample_speculative",
    "update_graph_cache",
]
