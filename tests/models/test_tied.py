"""Tied weights stay one tensor: moved, copied, on memory after meta, loaded from any state dict, saved."""

import copy
import io
import json
import pickle
import unittest.mock
import warnings

import pytest
import torch
import transformers
from families import CASES
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from transformers import BertConfig, GPT2Config

from flash_attn.models.bert import BertForMaskedLM, BertForPreTraining
from flash_attn.models.gpt import GPTLMHeadModel, GPTModel
from flash_attn.utils import pretrained

EMBEDDING, HEAD = "transformer.embeddings.word_embeddings.weight", "lm_head.weight"
WORDS, DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder.weight"
NO_TOKENS = dict(bos_token_id=None, eos_token_id=None)


def gpt(**options):
    sizes = dict(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0, embd_pdrop=0)
    return GPTLMHeadModel(GPT2Config(**sizes | NO_TOKENS | dict(attn_pdrop=0) | options))


def bert(cls=BertForMaskedLM, **options):
    sizes = dict(vocab_size=50, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
    return cls(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **options))


MODELS = {
    "gpt": (gpt, EMBEDDING, HEAD),
    "gpt, padded, fused": (
        lambda: gpt(pad_vocab_size_multiple=8, fused_bias_fc=True, lm_head_bias=True),
        EMBEDDING,
        HEAD,
    ),
    "gpt, narrow embedding": (lambda: gpt(word_embed_proj_dim=16), EMBEDDING, HEAD),
    "masked": (bert, WORDS, DECODER),
    "pre-training, padded": (lambda: bert(BertForPreTraining, pad_vocab_size_multiple=8), WORDS, DECODER),
}
model_of = pytest.mark.parametrize("name", MODELS)


class Holder(nn.Module):
    """A module that has the model, as a LightningModule has."""

    def __init__(self, model):
        super().__init__()
        self.model = model


def on_meta(make):
    with torch.device("meta"):
        return make()


def meta_apart(make):
    """As loaders make a model that register each parameter on the meta device by itself."""
    model = on_meta(make)
    for name in tuple(model._tied_weights_keys):
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.weight = nn.Parameter(torch.empty_like(owner.weight))
    assert not model.is_tied
    return model


def unpickled(model):
    return pickle.loads(pickle.dumps(model))


def saved_and_loaded(model):
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


KEEP = {
    "to": lambda make: make().to(torch.float64).float(),
    "to meta": lambda make: make().to("meta"),
    "memory after meta": lambda make: on_meta(make).to_empty(device="cpu"),
    "memory after meta, registered apart": lambda make: meta_apart(make).to_empty(device="cpu"),
    "memory within another module": lambda make: Holder(on_meta(make)).to_empty(device="cpu").model,
    "deepcopy": lambda make: copy.deepcopy(make()),
    "deepcopy, then memory": lambda make: copy.deepcopy(on_meta(make)).to_empty(device="cpu"),
    "pickle": lambda make: unpickled(make()),
    "torch.save": lambda make: saved_and_loaded(make()),
    "pickle, then assign": lambda make: loaded(unpickled(make()), state_of(make()), assign=True),
}


def state_of(model, *without):
    return {name: tensor.clone() for name, tensor in model.state_dict().items() if name not in without}


def loaded(model, state, **options):
    found = model.load_state_dict(state, **options)
    assert not found.missing_keys and not found.unexpected_keys
    return model


@model_of
@pytest.mark.parametrize("how", KEEP)
def test_what_keeps_weights_tied(name, how):
    make, embedding, head = MODELS[name]
    model = KEEP[how](make)
    assert model.is_tied and model.get_parameter(embedding) is model.get_parameter(head)


@pytest.mark.parametrize("name", CASES)
def test_families(name):
    """Those whose configuration ties are tied on memory after meta, and by a state dict without the head."""
    model = on_meta(lambda: GPTLMHeadModel.from_config(CASES[name].config())).to_empty(device="cpu")
    is_tied = model.lm_head.weight is model.get_parameter(EMBEDDING)
    assert model.is_tied and is_tied == model.config.tie_word_embeddings
    if is_tied:
        loaded(model, state_of(model, HEAD), assign=True)
        assert model.lm_head.weight is model.get_parameter(EMBEDDING)


def test_gradients_move_too():
    model = gpt()
    model(torch.arange(8)[None], labels=torch.arange(8)[None]).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    torch.testing.assert_close(model.to(torch.float64).lm_head.weight.grad, expected.double())
    assert model.is_tied


@pytest.mark.parametrize("name", ["gpt, padded, fused", "masked"])
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("without", ["nothing", "the head", "the embedding"])
@pytest.mark.parametrize("start", ["made", "meta", "within another"])
@pytest.mark.cover(2)
def test_state_dicts(name, strict, assign, without, start):
    make, embedding, head = MODELS[name]
    first = make()
    state = state_of(first, *{"the head": [head], "the embedding": [embedding]}.get(without, ()))
    model = make() if start != "meta" else on_meta(make)
    if start == "meta" and not assign:
        model.to_empty(device="cpu")
    if start == "within another":
        loaded(Holder(model), {f"model.{key}": value for key, value in state.items()}, strict=strict, assign=assign)
    else:
        loaded(model, state, strict=strict, assign=assign)
    assert model.is_tied and torch.equal(model.get_parameter(head), first.get_parameter(head))
    assert [id(p) for p in model.parameters()].count(id(model.get_parameter(head))) == 1
    x = torch.arange(6)[None]
    for each in (model, first):
        each(x, labels=x).loss.backward()
    torch.testing.assert_close(model.get_parameter(head).grad, first.get_parameter(head).grad)


@model_of
def test_neither_key(name):
    make, embedding, head = MODELS[name]
    model = make()
    assert set(model.load_state_dict(state_of(model, embedding, head), strict=False).missing_keys) == {embedding, head}
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state_of(model, embedding, head))


@model_of
@pytest.mark.parametrize("options", [dict(), dict(strict=False), dict(assign=True)])
def test_different_values(name, options):
    """An error that names both, before anything is changed."""
    make, embedding, head = MODELS[name]
    model, other = make(), make()
    before, state = state_of(model), state_of(other)
    state[head] += 1
    for target, prefix in ((model, ""), (Holder(model), "model.")):
        given = {prefix + key: value for key, value in state.items()}
        with pytest.raises(ValueError, match=f"{prefix}{embedding} and {prefix}{head} must be equal, .* found diff"):
            target.load_state_dict(given, **options)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    state[head], state[embedding] = state[head] * torch.nan, state[embedding] * torch.nan
    loaded(model, state)  # as after a run that diverged


def test_by_hand():
    """Parameters that a user made one, which no configuration ties."""
    model = gpt(n_layer=2, tie_word_embeddings=False)
    first, second = (layer.mlp.fc1 for layer in model.transformer.layers)
    second.weight = first.weight
    loaded(model.to(torch.float64), state_of(model), assign=True)
    assert second.weight is first.weight and model.lm_head.weight is not model.get_input_embeddings().weight
    state = state_of(model)
    state["transformer.layers.1.mlp.fc1.weight"] += 1
    with pytest.raises(ValueError, match=r"layers\.0\.mlp\.fc1\.weight and .*layers\.1.* one tensor for both, fou"):
        model.load_state_dict(state)


def trained_apart(layer):
    """As peft keeps a layer that is trained as a whole."""
    wrapper = Holder(layer)
    wrapper.copy = copy.deepcopy(layer)
    return wrapper


def assert_apart(model, head):
    weights = [model.get_input_embeddings().weight, head.weight]
    for step in (
        lambda: model.tie_weights(),
        lambda: model.to(torch.float64).float(),
        lambda: model.load_state_dict(state_of(model), assign=True),
        lambda: model.load_state_dict(state_of(model)),
    ):
        step()
        assert model.get_input_embeddings().weight is not head.weight
    assert not torch.equal(weights[0], weights[1])


REPLACED = {
    "another layer": lambda model: nn.Linear(32, 50, bias=False),
    "a larger one": lambda model: nn.Linear(32, 60, bias=False),
    "a copy": lambda model: copy.deepcopy(model.get_output_embeddings()),
}


@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("kind", REPLACED)
def test_heads_that_were_replaced(make, kind):
    model = make()
    model.set_output_embeddings(REPLACED[kind](model))
    head = model.get_output_embeddings()
    head.weight.data += 1
    assert not model.is_tied
    assert_apart(model, head)


@pytest.mark.parametrize("make", [gpt, bert])
def test_one_weight_in_other_modules(make, tmp_path):
    """What counts is the weight: another head that has it, and one that is compiled, are tied and saved as such."""
    model, x = make(), torch.randint(50, (2, 5))
    expected = model(x).logits
    names = dict(model._tied_weights_keys)
    model.set_output_embeddings(torch.compile(model.get_output_embeddings(), backend="eager"))
    assert model.is_tied and model._tied_weights_keys == names
    layers = model.transformer.layers if make is gpt else model.bert.encoder.layers
    layers[0] = torch.compile(layers[0], backend="eager")
    model.tie_weights()
    model.save_pretrained(tmp_path / "compiled")
    other = make()
    head = copy.deepcopy(other.get_output_embeddings())
    other.set_output_embeddings(head)
    assert not other.is_tied and other._tied_weights_keys == {}
    head.weight = other.get_input_embeddings().weight
    assert other.is_tied and other._tied_weights_keys == names
    other.load_state_dict(
        make().state_dict() | {key.replace("_orig_mod.", ""): v for key, v in state_of(model).items()}
    )
    other.save_pretrained(tmp_path / "other")
    for folder in ("compiled", "other"):
        assert json.loads((tmp_path / folder / "config.json").read_text())["tie_word_embeddings"] is not False
        again = type(model).from_pretrained(tmp_path / folder)
        assert again.is_tied and again.get_output_embeddings().weight is again.get_input_embeddings().weight
        torch.testing.assert_close(again.eval()(x).logits, expected)


def test_parameters_that_are_divided(tmp_path):
    """As by fully_shard: an error that says how to make them whole."""
    for model in (gpt(), bert()):
        with unittest.mock.patch.object(torch.Tensor, "full_tensor", create=True):
            with pytest.raises(ValueError, match=r"must be whole to be saved, found a DTensor, .*get_model_state_dict"):
                model.save_pretrained(tmp_path)


def test_weight_of_another_shape():
    model = gpt()
    model.lm_head.weight = nn.Parameter(torch.randn(60, 32))
    assert_apart(model, model.lm_head)


def test_head_within_another_module():
    """The head of the constructor stays tied in its wrapper, and the copy that is trained apart stays apart."""
    model = gpt()
    wrapper = model.lm_head = trained_apart(model.lm_head)
    wrapper.copy.weight.data += 1
    assert model._tied_weights_keys  # peft, which wraps one after the other, asks again in between
    for _ in range(2):
        assert wrapper.model.weight is model.get_input_embeddings().weight is not wrapper.copy.weight
        model.tie_weights()
        model.load_state_dict(state_of(model), assign=True)
    model.lm_head = wrapper.copy  # as it is left when the wrapper is taken away
    assert_apart(model, model.lm_head)


class Adapter(nn.Module):
    """As those of peft: another layer in the place of one."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer


@pytest.mark.parametrize("make", [gpt, bert])
def test_adapter_on_a_tied_layer(make):
    """A warning, once, where training begins; none for two, which stay alike, or for weights of their own."""
    model = make()
    model.set_output_embeddings(Adapter(model.get_output_embeddings()))
    with pytest.warns(
        UserWarning, match=r"(lm_head|decoder) has an adapter, .*exclude_modules=\['(lm_head|decoder)'\]"
    ):
        Holder(model).train()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.train()
        for other in (make(), make(tie_word_embeddings=False)):
            other.train()
            other.set_output_embeddings(Adapter(other.get_output_embeddings()))
            if other.config.tie_word_embeddings:
                other.set_input_embeddings(Adapter(other.get_input_embeddings()))
            other.train()


def test_embedding_that_was_replaced():
    model = gpt()
    model.set_input_embeddings(nn.Embedding(50, 32))
    assert_apart(model, model.lm_head)


def test_weight_that_is_computed():
    model = gpt()
    nn.utils.parametrizations.weight_norm(model.lm_head)
    loaded(model.to(torch.float64).float(), state_of(model))
    model.tie_weights()
    assert "weight" in model.lm_head.parametrizations and not model.is_tied


def test_configuration_that_was_changed():
    model = gpt()
    model.config.tie_word_embeddings = False
    model.lm_head.weight = nn.Parameter(torch.randn(50, 32))
    assert_apart(model, model.lm_head)


# Saving


@model_of
def test_state_dict_in_safetensors(name, tmp_path):
    make, embedding, head = MODELS[name]
    model, path = make(), tmp_path / "model.safetensors"
    state = model.state_dict()
    assert state[head].data_ptr() != state[embedding].data_ptr() == model.get_parameter(embedding).data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert kept[head] is kept[embedding] is model.get_parameter(head)
    for save, load in (
        (lambda: save_file(state, path), lambda other: loaded(other, load_file(path))),
        (lambda: save_model(model, path), lambda other: load_model(other, path)),
        (lambda: save_model(Holder(model), path), lambda other: load_model(Holder(other), path)),
        (lambda: save_file(state_of(model, embedding), path), lambda other: load_model(other, path)),
    ):
        other = make()
        save()
        load(other)
        assert other.is_tied and torch.equal(other.get_parameter(head), model.get_parameter(head))


def test_state_dict_of_torch_distributed():
    model, other = gpt(), gpt()
    set_model_state_dict(other, get_model_state_dict(model))
    assert other.is_tied and torch.equal(other.lm_head.weight, model.lm_head.weight)


def logits_of(model, x):
    with torch.no_grad():
        return model.eval()(x).logits


@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("tied", [True, False])
def test_saving_what_it_is(make, tied, tmp_path):
    """A head that is not the embedding is written, and the configuration says so."""
    model, x = make(), torch.arange(8)[None]
    if not tied:
        head = copy.deepcopy(model.get_output_embeddings())
        head.weight.data += torch.randn_like(head.weight)
        model.set_output_embeddings(head)
    model.save_pretrained(tmp_path)
    head = "lm_head.weight" if make is gpt else DECODER
    assert (head in load_file(tmp_path / "model.safetensors")) != tied
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] == tied
    assert model.config.tie_word_embeddings
    auto = transformers.AutoModelForCausalLM if make is gpt else transformers.BertForMaskedLM
    for again in (type(model).from_pretrained(tmp_path), auto.from_pretrained(tmp_path)):
        torch.testing.assert_close(logits_of(again, x), logits_of(model, x), rtol=1e-4, atol=1e-4)
        assert (again.get_output_embeddings().weight is again.get_input_embeddings().weight) == tied


def test_saving_in_the_format_of_a_family(tmp_path):
    model, x = GPTLMHeadModel.from_config(CASES["gemma2"].config()), torch.arange(8)[None]
    model.lm_head = copy.deepcopy(model.lm_head)
    model.lm_head.weight.data += 1
    model.save_pretrained(tmp_path)
    for again in (GPTLMHeadModel, transformers.AutoModelForCausalLM):
        torch.testing.assert_close(logits_of(again.from_pretrained(tmp_path), x), logits_of(model, x))


def test_saving_with_adapters(tmp_path):
    model = gpt()
    model.lm_head = trained_apart(model.lm_head)
    with pytest.raises(ValueError, match=r"no adapters: merge these.*\n.*not known:\n    lm_head.model.weight"):
        model.save_pretrained(tmp_path)


# Checkpoints that have both


@pytest.fixture
def folder(tmp_path):
    """A function that writes a checkpoint with both tensors, of any values, and returns the folder."""

    def write(model, embedding, head, change):
        model.save_pretrained(tmp_path)
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(dict(reversed(tensors.items())) | {head: tensors[embedding] + change}, tmp_path / "model.safetensors")
        return tmp_path

    return write


@pytest.mark.parametrize("make", [gpt, bert])
@pytest.mark.parametrize("piece", [1, pretrained.PIECE])
def test_checkpoints_with_both(make, piece, folder, monkeypatch):
    """Equal or not, also if they come in different pieces of a file."""
    monkeypatch.setattr(pretrained, "PIECE", piece)
    model, x = make(), torch.arange(8)[None]
    names = ("transformer.wte.weight", "lm_head.weight") if make is gpt else (WORDS, DECODER)
    again = type(model).from_pretrained(folder(model, *names, 0.0))
    assert again.is_tied and torch.equal(logits_of(again, x), logits_of(model, x))
    path = folder(model, *names, 1.0)
    with pytest.raises(ValueError, match="{} and {} must be equal".format(*names)):
        type(model).from_pretrained(path)
    apart = type(model).from_pretrained(path, tie_word_embeddings=False)
    assert (apart.get_output_embeddings().weight - apart.get_input_embeddings().weight).mean().sub(1).abs() < 1e-5


def test_checkpoint_of_the_head_alone(tmp_path):
    model = gpt()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        {name.replace("transformer.wte", "lm_head"): tensor for name, tensor in tensors.items()},
        tmp_path / "model.safetensors",
    )
    again = GPTLMHeadModel.from_pretrained(tmp_path)
    assert again.is_tied and torch.equal(again.lm_head.weight, model.lm_head.weight)
    decoder = GPTModel.from_pretrained(tmp_path)
    assert torch.equal(decoder.embeddings.word_embeddings.weight, model.lm_head.weight)
