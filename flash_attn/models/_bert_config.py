"""Configurations of BERT: the fields that it needs, those that choose how it computes, and what it refuses."""

from typing import Any, Protocol

from flash_attn.models._config import round_up, warn_of_unread


class Config(Protocol):
    """The fields that a configuration must have; those of transformers' `BertConfig`."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    hidden_act: str
    hidden_dropout_prob: float
    attention_probs_dropout_prob: float
    max_position_embeddings: int
    type_vocab_size: int
    pad_token_id: int | None
    initializer_range: float
    layer_norm_eps: float


# Fields that a configuration may have, and their defaults.
OPTIONS = dict(
    use_flash_attn=False,  # attention of sequences without their padding, by `flash_attn_varlen_func`
    fused_bias_fc=False,  # `FusedDense` for all linear layers except those of the MLPs
    fused_mlp=False,  # `FusedMLP`; needs a hidden_act in tanh form
    mlp_checkpoint_lvl=0,  # checkpoint_lvl of FusedMLP, or a sequence with one for each layer
    fused_dropout_add_ln=False,  # dropout, add and norm in one kernel
    pad_vocab_size_multiple=1,  # vocab_size is rounded up to a multiple of it
    dense_seq_output=False,  # with labels, the head for masked tokens computes only tokens that have a label
    last_layer_subset=False,  # so does the last layer, which also computes the first token of each sequence
    use_xentropy=False,  # the library's cross entropy, which writes the gradient over the logits
    position_embedding_type="absolute",  # "rotary": rotary embeddings in addition to the absolute ones
    rotary_emb_dim=None,  # channels of a head that rotate; all if None
    rotary_emb_base=10000.0,
    rotary_emb_scale_base=None,
    rotary_emb_interleaved=False,
    tie_word_embeddings=True,  # the weight of the head for masked tokens is that of the word embeddings
    classifier_dropout=None,  # before a classifier; hidden_dropout_prob if None
    num_labels=2,  # of a classifier
    problem_type=None,  # the loss of BertForSequenceClassification; None: chosen by the labels
    gradient_checkpointing=False,  # compute each layer again in the backward
)

# Fields of transformers that are not supported, with the one value that asks for nothing.
_NOT_COVERED = dict(
    model_type="bert",
    is_decoder=False,
    is_causal=False,  # with it, attention of transformers is causal where there is no padding
    add_cross_attention=False,
    is_encoder_decoder=False,
    chunk_size_feed_forward=0,
    output_hidden_states=False,
    output_attentions=False,
    return_dict=True,
    pruned_heads={},
    quantization_config=None,
)

# Fields of Google's checkpoints that change nothing here.
_WITHOUT_EFFECT = """
    directionality orig_vocab_size pooler_fc_size pooler_num_attention_heads pooler_num_fc_layers pooler_size_per_head
    pooler_type
""".split()
WITHOUT_FLOAT64 = ("use_flash_attn", "fused_dropout_add_ln", "use_xentropy")

TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")
_ACTIVATIONS = ("gelu", *TANH_GELUS)


def option(config: Any, name: str) -> Any:
    """The field of a configuration that it may have, else its default."""
    return getattr(config, name, OPTIONS[name])


def check_config(config: Any) -> None:
    """Check that all that the configuration asks for is covered."""
    missing = [name for name in Config.__annotations__ if not hasattr(config, name)]
    if missing:
        raise TypeError(f"config must have the fields of transformers' BertConfig, found no {', '.join(missing)}")
    for name, covered in _NOT_COVERED.items():
        value = getattr(config, name, covered)
        if value != covered:
            raise ValueError(f"config.{name} must be {covered!r}, the one supported value, found {value!r}")
    warn_of_unread(config, {*Config.__annotations__, *OPTIONS, *_NOT_COVERED, *_WITHOUT_EFFECT})
    rotary = option(config, "position_embedding_type") == "rotary"
    _check_mlp(config)
    if not rotary and option(config, "position_embedding_type") != "absolute":
        raise _refused(config, "position_embedding_type", "'absolute' or 'rotary'")
    for name in OPTIONS:
        if name.startswith("rotary_emb") and not rotary and option(config, name) != OPTIONS[name]:
            raise _refused(config, name, f"{OPTIONS[name]} without position_embedding_type='rotary'")
    if option(config, "last_layer_subset"):
        if not option(config, "dense_seq_output"):
            raise _refused(config, "dense_seq_output", "True with last_layer_subset")
        if rotary:
            raise _refused(config, "last_layer_subset", "False with position_embedding_type='rotary'")


def _check_mlp(config):
    """Check the fields of the MLPs."""
    fused, levels = option(config, "fused_mlp"), option(config, "mlp_checkpoint_lvl")
    if config.hidden_act not in _ACTIVATIONS:
        raise _refused(config, "hidden_act", f"one of {', '.join(_ACTIVATIONS)}")
    if fused and config.hidden_act not in TANH_GELUS:
        raise _refused(config, "hidden_act", f"one of {', '.join(TANH_GELUS)} with fused_mlp")
    if not fused and levels != 0:
        raise _refused(config, "mlp_checkpoint_lvl", "0 without fused_mlp")
    if not isinstance(levels, int) and len(levels) != config.num_hidden_layers:
        raise _refused(config, "mlp_checkpoint_lvl", f"one for each of {config.num_hidden_layers} layers")


def _refused(config, name, expected):
    found = getattr(config, name, OPTIONS.get(name))
    return ValueError(f"config.{name} must be {expected}, found {found!r}")


def padded_vocab_size(config: Any) -> int:
    """The number of rows of the word embeddings."""
    return round_up(config.vocab_size, option(config, "pad_vocab_size_multiple"))
