"""What trainers of transformers, trl and peft ask of the models: methods, and arguments of forward."""

import copy
import pickle

import pytest
import torch
import transformers
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import BertConfig, GPT2Config

from flash_attn.models import _trainers
from flash_attn.models import bert as berts
from flash_attn.models.gpt import GPTLMHeadModel, GPTModel
from flash_attn.models.vit import VisionTransformer
from flash_attn.modules.mha import MHA
from flash_attn.ops.fused_dense import FusedDense
from flash_attn.utils.generation import InferenceParams

DROPOUT = dict(resid_pdrop=0.2, embd_pdrop=0.1, attn_pdrop=0.1)
LLAMA = dict(
    n_positions=0,
    rotary_emb_fraction=1.0,
    rms_norm=True,
    activation_function="swiglu",
    qkv_proj_bias=False,
    mlp_fc1_bias=False,
    mlp_fc2_bias=False,
    tie_word_embeddings=False,
    n_head_kv=2,
    mlp_multiple_of=8,
)
NO_TOKENS = dict(bos_token_id=None, eos_token_id=None)


def gpt(cls=GPTLMHeadModel, device="cpu", **options):
    sizes = dict(vocab_size=90, n_embd=64, n_layer=2, n_head=4, n_positions=32) | NO_TOKENS
    return cls(GPT2Config(**sizes | dict.fromkeys(DROPOUT, 0.0) | options), device=device)


def bert(name="BertForMaskedLM", device="cpu", p=0.0, **options):
    sizes = dict(vocab_size=90, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96)
    config = BertConfig(**sizes, hidden_dropout_prob=p, attention_probs_dropout_prob=p, **options)
    return getattr(berts, name)(config).to(device)


def vit(device="cpu", **options):
    sizes = dict(img_size=16, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=5)
    return VisionTransformer(**sizes, **options).to(device)


def ids(device="cpu", seqlen=12):
    return torch.randint(1, 90, (2, seqlen), device=device)


# ---------------------------------------------------------------------------------------------------------------------
# Layers computed again in the backward


def of_gpt(**options):
    return lambda device: (gpt(device=device, **DROPOUT, **options), lambda m, x: m(x, labels=x).loss)


def of_bert(**options):
    def build(device):
        model = bert("BertForPreTraining", device, p=0.1, **options)
        return (
            model,
            lambda m, x: (
                m(x, attention_mask=MASK.to(x.device), labels=x * (x % 3 == 0), next_sentence_label=x[:, 0] % 2).loss
            ),
        )

    return build


def of_vit(device):
    model = vit(device, drop_rate=0.1, attn_drop_rate=0.1, drop_path_rate=0.2)
    images = torch.randn(2, 3, 16, 16, device=device)
    return model, lambda m, x: m(images).square().mean()


MASK = torch.ones(2, 12, dtype=torch.int64)
MASK[1, 7:] = 0
SUBSET = dict(use_flash_attn=True, dense_seq_output=True, last_layer_subset=True)
STACKS = {
    "gpt2": of_gpt(),
    "llama": of_gpt(**LLAMA),
    "gpt, fused": of_gpt(use_flash_attn=True, fused_dropout_add_ln=True, fused_bias_fc=True, fused_mlp=True),
    "parallel": of_gpt(n_positions=0, rotary_emb_fraction=0.5, parallel_block=True),
    "postnorm": of_gpt(prenorm=False),
    "bert": of_bert(),
    "bert, subset": of_bert(**SUBSET),
    "vit": of_vit,
}
HOW = {"usual": None, "reentrant": dict(use_reentrant=True)}


@pytest.mark.parametrize("how", ["usual", "reentrant"])
@pytest.mark.parametrize("name", STACKS)
def test_gradient_checkpointing(name, how, device):
    """Less is kept; loss, gradients and dropout are the same; each layer runs once more in the backward."""
    model, loss_of = STACKS[name](device)
    x, results = ids(device), []
    layers = getattr(model, "blocks", None) or next(m.layers for m in model.modules() if hasattr(m, "layers"))
    calls = []
    for layer in layers:
        layer.register_forward_pre_hook(lambda *args: calls.append(torch.is_grad_enabled()))
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable(HOW[how])
        assert model.is_gradient_checkpointing == model.is_activation_checkpointing == enable
        model.zero_grad()
        calls.clear()
        torch.manual_seed(1)
        saved = 0

        def pack(tensor):
            nonlocal saved
            saved += tensor.numel()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model, x)
        forward = list(calls)
        loss.backward()
        results.append((saved, loss.detach(), [parameter.grad for parameter in model.parameters()]))
        assert forward == [not (enable and how == "reentrant")] * 2  # reentrant: without a graph
        assert len(calls) == (4 if enable else 2)
    (before, *expected), (after, *found) = results
    assert after < (0.9 if name == "vit" else 0.6) * before
    torch.testing.assert_close(found, expected)
    model.gradient_checkpointing_disable()
    calls.clear()
    loss_of(model, x).backward()
    assert len(calls) == 2 and not model.is_gradient_checkpointing


@pytest.mark.parametrize("options", [dict(every_n_layers=2), dict(offload=True)])
def test_options_of_checkpointing(options, device):
    """Only every second layer; inputs on the host. The newer name of transformers does the same."""
    model, x, grads, calls = gpt(device=device), ids(device), [], []
    for layer in model.transformer.layers:
        layer.register_forward_pre_hook(lambda *args: calls.append(1))
    for enable in (False, True):
        if enable:
            model.activation_checkpointing_enable(dict(preserve_rng_state=False), **options)
        model.zero_grad()
        calls.clear()
        model(x, labels=x).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        assert len(calls) == 2 + enable * (2 // options.get("every_n_layers", 1))
    torch.testing.assert_close(grads[1], grads[0])
    model.activation_checkpointing_disable()
    assert not model.is_gradient_checkpointing


def test_what_is_on_the_host_is_nowhere_else(monkeypatch):
    """With offload, no input of a layer but that of the first, the embedding, is held from the forward on."""
    inputs = []

    def copied(x):
        return x.detach().clone()

    def note(layer, args):
        inputs.extend(StorageWeakRef(each.untyped_storage()) for each in args)

    monkeypatch.setattr(_trainers, "save_on_cpu", lambda pin_memory: saved_tensors_hooks(copied, copied))
    model, x = gpt(n_layer=3), ids()
    model.gradient_checkpointing_enable(offload=True)
    for layer in model.transformer.layers[1:]:
        layer.register_forward_pre_hook(note)
    loss = model(x, labels=x).loss
    assert len(inputs) == 4 and all(each.expired() for each in inputs)
    loss.backward()


def test_compiled_with_checkpoints():
    """As one graph, whose operations are computed again."""
    model, x, grads = gpt(n_layer=1), ids(), []
    model.gradient_checkpointing_enable()
    for function in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        function(x, labels=x, use_cache=False).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0])


def test_configurations_that_ask_for_it():
    assert gpt(gradient_checkpointing=True).is_gradient_checkpointing
    assert bert(gradient_checkpointing=True).is_gradient_checkpointing
    assert not bert(gradient_checkpointing=False).is_gradient_checkpointing


def test_no_layer_runs_twice_with_a_cache():
    model, x = gpt().eval(), ids()
    model.gradient_checkpointing_enable()
    params = InferenceParams(12, 2)
    torch.testing.assert_close(model(x, inference_params=params).logits, model(x).logits)


@pytest.mark.parametrize(
    ("kwargs", "error", "says"),
    [
        ((False,), TypeError, r"must be a dict or None, found False: gradient_checkpointing_disable\(\) turns it off"),
        (({"reentrant": True},), TypeError, "must have names of .*use_reentrant.*, found 'reentrant'"),
        (({"use_reentrant": "yes"},), TypeError, r"kwargs\['use_reentrant'\] must be a bool, found 'yes'"),
        (({"debug": 2},), TypeError, r"kwargs\['debug'\] must be a bool, found 2"),
    ],
)
def test_checkpointing_that_is_refused(kwargs, error, says):
    with pytest.raises(error, match=says):
        gpt().gradient_checkpointing_enable(*kwargs)
    with pytest.raises(ValueError, match="every_n_layers must be positive, found 0"):
        gpt().gradient_checkpointing_enable(every_n_layers=0)


@pytest.mark.parametrize("make", [gpt, bert, vit])
def test_gradients_of_frozen_embeddings(make):
    """With reentrant checkpoints, whose inputs must have a gradient; models with it can be copied."""
    model = make()
    model.requires_grad_(False)
    layers = model.blocks if make is vit else next(m.layers for m in model.modules() if hasattr(m, "layers"))
    weight = layers[0].mlp.fc1.weight.requires_grad_()
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    model = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    layers = model.blocks if make is vit else next(m.layers for m in model.modules() if hasattr(m, "layers"))
    weight = layers[0].mlp.fc1.weight
    (model(torch.randn(2, 3, 16, 16)) if make is vit else model(ids()).logits).sum().backward()
    assert weight.grad.abs().sum() > 0
    model.disable_input_require_grads()
    out = model.get_input_embeddings()(torch.randn(2, 3, 16, 16) if make is vit else ids())
    assert not out.requires_grad


@pytest.mark.parametrize("when", ["before", "after", "put by hand"])
def test_gradients_of_an_embedding_that_replaced_another(when):
    """The hook is on the present one; that which checkpointing made goes with it, that of the user stays."""
    model = gpt(tie_word_embeddings=False).requires_grad_(False)
    weight, old = model.transformer.layers[0].mlp.fc1.weight.requires_grad_(), model.get_input_embeddings()
    new = nn.Embedding(90, 64).requires_grad_(False)
    if when == "after":
        model.set_input_embeddings(new)
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    if when == "before":
        model.set_input_embeddings(new)
    if when == "put by hand":
        model.transformer.embeddings.word_embeddings = new
        model.gradient_checkpointing_enable(dict(use_reentrant=True))
    model(ids()).logits.sum().backward()
    assert weight.grad.abs().sum() > 0 and not old(ids()).requires_grad
    for undo in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        model.gradient_checkpointing_enable(dict(use_reentrant=True))
        assert new(ids()).requires_grad
        undo()
        assert not new(ids()).requires_grad
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable(dict(use_reentrant=True))
    model.gradient_checkpointing_disable()
    assert new(ids()).requires_grad


@pytest.mark.parametrize("make", [gpt, bert, vit])
def test_device_and_dtype(make):
    model = make().to(torch.bfloat16)
    assert model.device == torch.device("cpu") and model.dtype == torch.bfloat16
    assert model.to("meta").device.type == "meta"


# ---------------------------------------------------------------------------------------------------------------------
# Embeddings


@pytest.mark.parametrize(
    ("make", "embedding", "head"),
    [
        (gpt, "transformer.embeddings.word_embeddings", "lm_head"),
        (lambda: gpt(GPTModel), "embeddings.word_embeddings", None),
        (bert, "bert.embeddings.word_embeddings", "cls.predictions.decoder"),
        (lambda: bert("BertModel"), "embeddings.word_embeddings", None),
        (lambda: bert("BertForNextSentencePrediction"), "bert.embeddings.word_embeddings", None),
        (lambda: bert("BertForTokenClassification"), "bert.embeddings.word_embeddings", None),
        (vit, "patch_embed", None),
    ],
)
def test_embeddings(make, embedding, head):
    model = make()
    assert model.get_input_embeddings() is model.get_submodule(embedding)
    new = nn.Embedding(95, 64)
    model.set_input_embeddings(new)
    assert model.get_submodule(embedding) is new
    if head is None:
        assert model.get_output_embeddings() is None
        with pytest.raises(ValueError, match="has no output layer to replace"):
            model.set_output_embeddings(nn.Linear(64, 95))
    else:
        assert model.get_output_embeddings() is model.get_submodule(head)
        model.set_output_embeddings(new := nn.Linear(64, 95))
        assert model.get_submodule(head) is new


def test_tags():
    model = gpt()
    model.add_model_tags("one")
    model.add_model_tags(["two", "one"])
    assert model.model_tags == ["one", "two"] and gpt().model_tags is None


def test_generation_config(tmp_path):
    """Made of the configuration, changed by trainers, and saved."""
    model = gpt(eos_token_id=7)
    assert model.generation_config.eos_token_id == 7
    model.generation_config.pad_token_id = 3
    model.save_pretrained(tmp_path)
    again = GPTLMHeadModel.from_pretrained(tmp_path)
    assert (again.generation_config.pad_token_id, again.generation_config.eos_token_id) == (3, 7)
    assert transformers.GenerationConfig.from_pretrained(tmp_path).pad_token_id == 3
    model.generation_config = dict(pad_token_id=4)
    assert model.generation_config.pad_token_id == 4
    with pytest.raises(TypeError, match=r"generation_config must be a transformers\.GenerationConfig, a dict or None"):
        model.generation_config = "greedy"


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of forward

VARIANTS = {
    "gpt2": dict(),
    "llama": LLAMA,
    "scaled": LLAMA | dict(mup_embeddings_multiplier=3.0, mup_output_multiplier=0.5),
    "narrow": dict(word_embed_proj_dim=32),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_inputs_embeds(name, device):
    """The same logits, loss and gradients as of the tokens that they are the embeddings of; with padding, too."""
    model, x = gpt(device=device, **VARIANTS[name]), ids(device)
    left = torch.ones_like(x)
    left[1, :5] = 0
    for options in (dict(), dict(attention_mask=left), dict(attention_mask=left, labels=x), dict(labels=x)):
        results = []
        for given in (dict(input_ids=x), dict(inputs_embeds=model.get_input_embeddings()(x))):
            model.zero_grad()
            (out,) = model(**given, **options)
            weights = left[..., None] if out.dim() else 1.0
            (out * weights).sum().backward()
            results.append(((out * weights).detach(), [each.grad for each in model.parameters()]))
        torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize(
    "name",
    [
        "BertModel",
        "BertForPreTraining",
        "BertForMaskedLM",
        "BertForNextSentencePrediction",
        "BertForMultipleChoice",
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "BertForQuestionAnswering",
    ],
)
@pytest.mark.parametrize("use_flash_attn", [False, True])
def test_inputs_embeds_of_bert(name, use_flash_attn, device):
    model, x = bert(name, device, use_flash_attn=use_flash_attn).eval(), ids(device)
    options = dict(attention_mask=MASK.to(device), token_type_ids=x % 2)
    if name == "BertForMultipleChoice":
        x = x.view(2, 3, 4)
        options = {key: value.reshape(2, 3, 4) for key, value in options.items()}
        options["attention_mask"] = torch.ones_like(x)
    embeds = model.get_input_embeddings()(x)
    expected, found = model(x, **options), model(inputs_embeds=embeds, **options)
    torch.testing.assert_close(found, expected)
    plain = model(x, **options, return_dict=False)
    assert type(plain) is tuple
    torch.testing.assert_close(plain, tuple(each for each in expected if each is not None))
    torch.testing.assert_close(model(x, use_cache=False, output_attentions=None, **options), expected)


def test_labels_with_inputs_embeds():
    for name, labels in (
        ("BertForMaskedLM", dict(labels=ids())),
        ("BertForTokenClassification", dict(labels=ids() % 2)),
        ("BertForQuestionAnswering", dict(start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))),
        ("BertForPreTraining", dict(labels=ids(), next_sentence_label=torch.tensor([0, 1]))),
    ):
        model, x = bert(name), ids()
        torch.testing.assert_close(
            model(inputs_embeds=model.get_input_embeddings()(x), **labels).loss, model(x, **labels).loss
        )


def test_plain_tuples(device):
    model, x = gpt(device=device), ids(device)
    for options in (dict(), dict(labels=x)):
        found = model(x, return_dict=False, **options)
        assert type(found) is tuple and len(found) == 1
        torch.testing.assert_close(found[0], model(x, return_dict=True, **options)[0])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_padding_of_trainers(name, side, device):
    """The loss of a padded batch is that of its sequences, whose labels are their tokens, padding included."""
    model, x = gpt(device=device, **VARIANTS[name]), ids(device)
    mask = MASK.to(device) if side == "right" else MASK.flip(1).to(device)
    short = x[1:, :7] if side == "right" else x[1:, 5:]
    losses = [model(row, labels=row).loss * (row.shape[1] - 1) for row in (x[:1], short)]
    mean = sum(losses) / 17  # 11 + 6 labels
    for labels in (x, x.masked_fill(mask == 0, -100)):
        found = model(x, attention_mask=mask, labels=labels, use_cache=False, num_items_in_batch=17).loss
        counted = (labels[:, 1:] != -100).sum()  # as Trainer does, which knows no mask
        torch.testing.assert_close(found, mean * counted / 17)


REFUSED = {
    "use_cache": (True, "found True: generate keeps a cache, and so does a forward with inference_params"),
    "past_key_values": ((), "found a tuple: give inference_params, or call generate"),
    "cache_position": (torch.arange(12), "found a Tensor: give position_ids"),
    "output_attentions": (True, "attention weights are never held in memory"),
    "output_hidden_states": (True, "register a forward hook on each layer"),
    "token_type_ids": (torch.zeros(2, 12), "return_token_type_ids=False"),
    "logits_to_keep": (1, "give num_last_tokens"),
    "cu_seq_lens_q": (torch.tensor([0, 12]), "give cu_seqlens, and max_seqlen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_arguments_that_ask_for_what_is_not_there(name):
    """An error that says what to do; asking for nothing is no error."""
    value, says = REFUSED[name]
    model, x = gpt(), ids()
    with pytest.raises(ValueError, match=f"{name} must be .*{says}"):
        model(x, **{name: value})
    torch.testing.assert_close(model(x, **{name: None}).logits, model(x).logits)
    encoder = bert()
    if name == "token_type_ids":
        assert encoder(x, token_type_ids=torch.zeros_like(x)).logits.shape == (2, 12, 90)
    else:
        with pytest.raises(ValueError, match=f"{name} must be"):
            encoder(x, **{name: value})


@pytest.mark.parametrize("make", [gpt, bert])
def test_arguments_that_are_not_known(make):
    model, x = make(), ids()
    with pytest.raises(TypeError, match=r"found 'atention_mask'; names like it: .*attention_mask"):
        model(x, atention_mask=None)
    for given, found in ((dict(), "neither"), (dict(input_ids=x, inputs_embeds=torch.randn(2, 12, 64)), "both")):
        with pytest.raises(ValueError, match=f"one of input_ids and inputs_embeds must be given, found {found}"):
            model(**given)
    with pytest.raises(ValueError, match=r"inputs_embeds must have 3 dimensions \(batch, seqlen, features\)"):
        model(inputs_embeds=torch.randn(2, 12))
    with pytest.raises(ValueError, match=r"inputs_embeds must have shape .*64\), found \(2, 12, 63\)"):
        model(inputs_embeds=torch.randn(2, 12, 63))
    with pytest.raises(TypeError, match=r"inputs_embeds must be of a floating point dtype, found torch\.int64"):
        model(inputs_embeds=torch.ones(2, 12, 64, dtype=torch.int64))
    with pytest.raises(TypeError, match="return_dict must be a bool or None"):
        model(x, return_dict="yes")


# ---------------------------------------------------------------------------------------------------------------------
# num_items_in_batch


def items_of_gpt(**options):
    model, x = gpt(**options), ids()
    y = x.masked_fill(torch.rand(2, 12) < 0.4, -100)
    return model, x, dict(labels=y), int((y[:, 1:] != -100).sum())


def items_of_bert(name, labels, **options):
    model = bert(name, **options).eval()
    return model, ids(), dict(labels=labels), int((labels != -100).sum())


some = ids().masked_fill(torch.rand(2, 12) < 0.4, -100)
ITEMS = {
    "gpt": items_of_gpt,
    "gpt, soft cap": lambda: items_of_gpt(final_logit_softcapping=3.0, tie_word_embeddings=False),
    "masked": lambda: items_of_bert("BertForMaskedLM", some),
    "masked, apart": lambda: items_of_bert("BertForMaskedLM", some, dense_seq_output=True, use_xentropy=True),
    "tokens": lambda: items_of_bert("BertForTokenClassification", some.clamp(max=1)),
    "next sentence": lambda: items_of_bert("BertForNextSentencePrediction", torch.tensor([1, 0])),
    "single label": lambda: items_of_bert("BertForSequenceClassification", torch.tensor([1, 0])),
    "multi label": lambda: items_of_bert("BertForSequenceClassification", torch.rand(2, 2)),
    "regression": lambda: items_of_bert("BertForSequenceClassification", torch.rand(2), num_labels=1),
}


@pytest.mark.parametrize("name", ITEMS)
def test_num_items_in_batch(name):
    """Gradients of rows one after the other add up to those of the whole batch."""
    model, x, options, count = ITEMS[name]()
    assert model.accepts_loss_kwargs
    whole = model(x, **options).loss
    whole.backward()
    expected = [each.grad for each in model.parameters()]
    model.zero_grad()
    parts = []
    for i in range(2):
        for number in (torch.tensor(count), count):
            rows = {key: value[i : i + 1] for key, value in options.items()}
            part = model(x[i : i + 1], **rows, num_items_in_batch=number).loss
        part.backward()
        parts.append(part.detach())
    torch.testing.assert_close(sum(parts), whole.detach())
    torch.testing.assert_close([each.grad for each in model.parameters()], expected, rtol=1e-4, atol=1e-6)


def test_num_items_of_answers():
    model, x = bert("BertForQuestionAnswering"), ids()
    positions = dict(start_positions=torch.tensor([1, 2]), end_positions=torch.tensor([3, 4]))
    expected = model(x, **positions).loss
    torch.testing.assert_close(model(x, **positions, num_items_in_batch=2).loss, expected)


def test_where_there_are_no_items():
    model, x = gpt(), ids()
    with pytest.raises(ValueError, match="num_items_in_batch must be None with loss_fn"):
        model(x, labels=x, num_items_in_batch=2, loss_fn=lambda *args: args[0].sum())
    with pytest.raises(TypeError, match="found 'num_items_in_batch'"):
        bert("BertForPreTraining")(x, num_items_in_batch=2)
    assert not bert("BertForPreTraining").accepts_loss_kwargs


# ---------------------------------------------------------------------------------------------------------------------
# The model without its head, and the first projection of attention


@pytest.mark.parametrize("name", VARIANTS)
def test_base_model(name):
    """What trl multiplies by the weight of the head."""
    model, x = gpt(**VARIANTS[name]), ids()
    hidden = model.base_model(x, attention_mask=torch.ones_like(x), use_cache=False, return_dict=True)
    head = model.get_output_embeddings()
    torch.testing.assert_close(head(hidden.last_hidden_state), model(x).logits)
    assert model.base_model.layers is model.transformer.layers
    with pytest.raises(ValueError, match="output_attentions must be None or False"):
        model.base_model(x, output_attentions=True)


@pytest.mark.parametrize("options", [dict(pad_vocab_size_multiple=8), dict(norm_head=True)])
def test_heads_that_are_more_than_their_weight(options):
    (field,) = options
    with pytest.raises(ValueError, match=f"config.{field} must leave the head a product with its weight for base_mod"):
        gpt(**options).base_model(ids())


def test_inputs_of_generation():
    model, x = gpt().eval(), ids()
    given = model.prepare_inputs_for_generation(x, attention_mask=torch.ones_like(x), use_cache=None, num_last_tokens=1)
    assert set(given) == {"input_ids", "attention_mask", "num_last_tokens"}
    torch.testing.assert_close(model(**given).logits, model(x).logits[:, -1:])
    with pytest.raises(ValueError, match="past_key_values must be None"):
        model.prepare_inputs_for_generation(x, past_key_values=())


class Scaled(nn.Module):
    """As an adapter: calls the layer that it has taken the place of."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.scale = layer, nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return self.layer(x) * self.scale


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("cross_attn", [False, True])
def test_first_projection_with_residual(fused, cross_attn, device):
    """It returns a tensor, as nn.Linear does: so a layer in its place may, and its hooks are called."""
    mha = MHA(64, 4, cross_attn=cross_attn, fused_bias_fc=fused, return_residual=True, device=device)
    x = torch.randn(2, 5, 64, device=device, requires_grad=True)
    name = "Wq" if cross_attn else "Wqkv"
    layer = getattr(mha, name)
    assert type(layer) is (FusedDense if fused else nn.Linear) or not fused
    assert isinstance(layer(x), torch.Tensor)

    def run():
        x.grad = None
        out, residual = mha(x)
        (out.sum() + residual.square().sum()).backward()
        return out.detach(), residual.detach(), x.grad

    expected = run()
    seen = []
    handle = layer.register_forward_hook(lambda *args: seen.append(args[-1].shape))
    torch.testing.assert_close(run(), expected)
    assert len(seen) == 1
    handle.remove()
    adapter = Scaled(layer)
    setattr(mha, name, adapter)
    adapter.scale.data.fill_(1.0)
    torch.testing.assert_close(run(), expected)
    assert adapter.scale.grad is not None
