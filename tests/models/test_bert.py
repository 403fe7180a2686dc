"""BERT: transformers' own models, checkpoints both ways, the subset of masked tokens, graphs, what is refused.

Models in float32 stay on the CPU, where flash attention takes that dtype.
"""

import copy
import functools
import inspect
import json
import re
import sys
import types
import warnings
import weakref

import pytest
import torch
from compare import assert_error_ratio

from flash_attn.models import _bert_config, bert
from flash_attn.models._checkpoints import bert as checkpoints

transformers = pytest.importorskip("transformers")

SIZES = dict(
    vocab_size=101,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=96,
    max_position_embeddings=32,
    initializer_range=0.3,
    num_labels=5,
)
HEADS = [
    "BertModel",
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "BertForQuestionAnswering",
]
FUSED = dict(
    use_flash_attn=True,
    fused_bias_fc=True,
    fused_mlp=True,
    fused_dropout_add_ln=True,
    hidden_act="gelu_new",
    pad_vocab_size_multiple=8,
    use_xentropy=True,
)
VARIANTS = {
    "plain": {},
    "flash": dict(use_flash_attn=True),
    "fused": FUSED,
    "padded vocabulary": dict(pad_vocab_size_multiple=8),
    "tanh": dict(hidden_act="gelu_fast"),
    "untied": dict(tie_word_embeddings=False),
    "last layer apart": dict(use_flash_attn=True, dense_seq_output=True, last_layer_subset=True),
}


def config_of(head="BertModel", **options):
    of_head = dict(num_labels=2) if head == "BertForQuestionAnswering" else {}
    return transformers.BertConfig(**SIZES | of_head | options)


def randomised(model):
    """The model with all parameters random: constant biases and norms would hide an error."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def pair(head, folder, device="cpu", **options):
    """transformers' model in evaluation mode, and ours with its parameters, loaded from the folder."""
    theirs = randomised(getattr(transformers, head)(config_of(head, **options))).eval()
    theirs.save_pretrained(folder)
    ours = getattr(bert, head).from_pretrained(folder, config_of(head, **options), device=device).eval()
    return theirs.to(device), ours


def batch_of(device="cpu", batch=4, seqlen=11):
    """Inputs with padding on the right in some rows, on the left in one; which are tokens."""
    mask = torch.arange(seqlen) < torch.tensor([seqlen, 1, 7, 5]).repeat(batch // 4)[:, None]
    mask[-1] = mask[-1].flip(0)
    inputs = dict(
        input_ids=torch.randint(1, 101, (batch, seqlen)),
        token_type_ids=torch.randint(2, (batch, seqlen)),
        attention_mask=mask.long(),
    )
    return {name: tensor.to(device) for name, tensor in inputs.items()}, mask.to(device)


def inputs_for(head, **inputs):
    """Rows as a head takes them: BertForMultipleChoice chooses between two and two of them."""
    if head != "BertForMultipleChoice":
        return inputs
    return {name: tensor.unflatten(0, (-1, 2)) if tensor.dim() == 2 else tensor for name, tensor in inputs.items()}


def of_tokens(result, mask):
    """What is not of padding; of a result for whole sequences, the rows whose first token, the pooled, is not."""
    return result[mask] if result.shape[:2] == mask.shape else result.reshape(len(mask), -1)[mask[:, 0]]


def masked_labels(mask, ignored):
    """Labels of some tokens of each row but the second, with `ignored` for the others."""
    chosen = mask & (torch.rand(mask.shape, device=mask.device) < 0.4)
    chosen[0, 3], chosen[1] = True, False
    return torch.where(chosen, torch.randint(1, 101, mask.shape, device=mask.device), ignored)


# ---------------------------------------------------------------------------------------------------------------------
# Numbers


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("head", HEADS)
def test_transformers(head, variant, tmp_path):
    theirs, ours = pair(head, tmp_path, **VARIANTS[variant])
    inputs, mask = batch_of()
    for given in (inputs, {"input_ids": inputs["input_ids"]}, inputs | {"position_ids": torch.arange(11).flip(0)}):
        with torch.no_grad():
            peer, found = (model(**inputs_for(head, **given)) for model in (theirs, ours))
        for name in found.keys():
            if getattr(found, name) is None:
                assert getattr(peer, name, None) is None
                continue
            expected, result = getattr(peer, name), getattr(found, name)[..., : getattr(peer, name).shape[-1]]
            if "attention_mask" in given:
                expected, result = of_tokens(expected, mask), of_tokens(result, mask)
            torch.testing.assert_close(result, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_of_pretraining(variant, tmp_path):
    """A model of transformers ignores -100 in both, ours 0 and less in one and -1 in the other."""
    theirs, ours = pair("BertForPreTraining", tmp_path, **VARIANTS[variant])
    inputs, mask = batch_of()
    inputs, mask = {name: tensor[:3] for name, tensor in inputs.items()}, mask[:3]
    labels, follows = masked_labels(mask, -100), torch.tensor([1, 0, 1])
    expected = theirs(**inputs, labels=labels, next_sentence_label=follows)
    for ignored in (-100, 0):
        own = labels.clamp(min=ignored)
        found = ours(**inputs, labels=own, next_sentence_label=follows)
        torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-4)
    follows[1] = -1
    without = theirs(**inputs, labels=labels, next_sentence_label=torch.where(follows < 0, -100, follows))
    found = ours(**inputs, labels=labels, next_sentence_label=follows)
    torch.testing.assert_close(found.loss, without.loss, rtol=1e-5, atol=1e-4)
    assert ours(**inputs, labels=labels).loss is None and ours(**inputs, next_sentence_label=follows).loss is None


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_of_masked_tokens(variant, tmp_path):
    theirs, ours = pair("BertForMaskedLM", tmp_path, **VARIANTS[variant])
    inputs, mask = batch_of()
    labels = masked_labels(mask, -100)
    labels[0, 3] = 0  # which is a token, and no label that is left out
    expected, found = theirs(**inputs, labels=labels), ours(**inputs, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("head", "labels", "options"),
    [
        ("BertForSequenceClassification", torch.tensor([1, 4, 0, 2]), {}),
        ("BertForSequenceClassification", torch.rand(4, 5).round(), {}),
        ("BertForSequenceClassification", torch.rand(4, 5), dict(problem_type="regression")),
        ("BertForSequenceClassification", torch.rand(4), dict(num_labels=1)),
        ("BertForTokenClassification", torch.randint(5, (4, 11)), {}),
        ("BertForTokenClassification", torch.where(torch.arange(44).view(4, 11) % 3 > 0, 2, -100), {}),
        ("BertForNextSentencePrediction", torch.tensor([1, 0, -100, 1]), {}),
        ("BertForMultipleChoice", torch.tensor([1, 0]), {}),
        ("BertForMultipleChoice", torch.tensor([-100, 1]), dict(use_flash_attn=True)),
    ],
)
def test_loss_of_classifiers(head, labels, options, tmp_path):
    theirs, ours = pair(head, tmp_path, **options)
    inputs, _ = batch_of()
    given = inputs_for(head, input_ids=inputs["input_ids"])  # without padding, which token classification counts here
    expected, found = theirs(**given, labels=labels), ours(**given, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("variant", ["plain", "flash", "fused"])
def test_loss_of_answers(variant, padded, tmp_path):
    """Over all tokens: without attention of padding, its hidden states are zero, and its logits the bias."""
    theirs, ours = pair("BertForQuestionAnswering", tmp_path, **VARIANTS[variant])
    inputs, mask = batch_of()
    given = inputs if padded else {"input_ids": inputs["input_ids"]}
    ends = dict(start_positions=torch.tensor([3, -5, 11, 0]), end_positions=torch.tensor([11, 0, 4, 200]))
    expected, found = theirs(**given, **ends), ours(**given, **ends)
    if padded and variant != "plain":
        logits = (expected.start_logits, expected.end_logits)
        logits = [torch.where(mask, each, bias) for each, bias in zip(logits, theirs.qa_outputs.bias)]
        labels = torch.tensor([3, 0, -100, 0]), torch.tensor([-100, 0, 4, -100])
        expected.loss = sum(map(torch.nn.functional.cross_entropy, logits, labels)) / 2
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=1e-4)
    for name in ends:
        assert ours(**given, **{name: ends[name]}).loss is None and theirs(**given, **{name: ends[name]}).loss is None


@pytest.mark.parametrize("variant", ["plain", "flash"])
def test_gradients(variant, tmp_path):
    theirs, ours = pair("BertForMaskedLM", tmp_path, **VARIANTS[variant])
    inputs, mask = batch_of()
    models = copy.deepcopy(theirs).double(), theirs, ours
    assert_gradients_of_masked_loss(*models, inputs, masked_labels(mask, -100), at_most=2)


def assert_gradients_of_masked_loss(exact, baseline, ours, inputs, labels, at_most):
    """Compare largest errors of gradients tensor by tensor. exact, baseline: transformers' models of two precisions."""
    for model in (exact, baseline, ours):
        model(**inputs, labels=labels).loss.backward()
    found = bert.inv_remap_state_dict(gradients(ours), ours.config, legacy_names=False)
    expected, peers = gradients(exact), gradients(baseline)
    for name in expected:
        assert_error_ratio(found[name], expected[name], peers[name], at_most=at_most, name=name)


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def subset_twins(head, **options):
    """A model that computes all tokens, and those that compute masked tokens only, with the same parameters."""
    whole = randomised(getattr(bert, head)(config_of(**options)))
    parameters = bert.inv_remap_state_dict(whole.state_dict(), whole.config)
    for subset in (False, True):
        config = config_of(**options, dense_seq_output=True, last_layer_subset=subset)
        model = getattr(bert, head)(config)
        model.load_state_dict(bert.remap_state_dict(parameters, config))
        yield whole.eval(), model.eval()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("flash", [False, True])
@pytest.mark.parametrize("head", ["BertForPreTraining", "BertForMaskedLM"])
def test_masked_tokens_alone(head, flash, padded):
    """Logits of masked tokens, the loss and all gradients are those of the full computation."""
    inputs, mask = batch_of()
    inputs = inputs if padded else {"input_ids": inputs["input_ids"]}
    labels = masked_labels(mask, -100)
    more = {"next_sentence_label": torch.tensor([0, 1, 1, 0])} if head == "BertForPreTraining" else {}
    for whole, subset in subset_twins(head, use_flash_attn=flash):
        results = []
        for model in (whole, subset):
            model.zero_grad()
            loss, logits, *pooled = model(**inputs, labels=labels, **more)
            loss.backward()
            logits = logits if model is subset else logits[labels != -100]
            results.append([loss, logits, *pooled, bert.inv_remap_state_dict(gradients(model), model.config)])
        torch.testing.assert_close(results[1], results[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flash", [False, True])
def test_hidden_states_of_masked_tokens(flash):
    """Masked tokens may be padding, in any order, and a row may have none; the pooler sees first tokens."""
    inputs, mask = batch_of()
    masked = torch.rand(mask.shape) < 0.5
    masked[2] = False
    for whole, subset in subset_twins("BertModel", use_flash_attn=flash):
        hidden_states, pooled = whole(**inputs)
        found = subset(**inputs, masked_tokens_mask=masked)
        torch.testing.assert_close(found.last_hidden_state, hidden_states[masked], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(found.pooler_output, pooled, rtol=1e-5, atol=1e-5)
        if flash:
            assert (found.last_hidden_state[~mask[masked]] == 0).all() and (hidden_states[~mask] == 0).all()


@pytest.mark.parametrize("flash", [False, True])
def test_rotary(flash):
    """Relative positions: with absolute ones at zero, a sequence may stand anywhere among padding."""
    config = config_of(position_embedding_type="rotary", rotary_emb_base=100.0, use_flash_attn=flash)
    model = randomised(bert.BertModel(config)).eval()
    assert model.encoder.layers[0].mixer.rotary_emb_dim == 16
    torch.nn.init.zeros_(model.embeddings.position_embeddings.weight)
    ids = torch.randint(1, 101, (1, 7))
    padding = torch.zeros_like(ids[:, :3])
    expected = model(ids).last_hidden_state
    right = model(torch.cat([ids, padding], 1), attention_mask=torch.arange(10)[None] < 7)
    left = model(torch.cat([padding, ids], 1), attention_mask=torch.arange(10)[None] >= 3)
    torch.testing.assert_close(right.last_hidden_state[:, :7], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(left.last_hidden_state[:, 3:], expected, rtol=1e-4, atol=1e-4)
    swapped = model(ids.flip(1)).last_hidden_state.flip(1)
    assert (swapped - expected).abs().max() > 0.01


@pytest.mark.parametrize("flash", [False, True])
def test_empty_rows_have_no_nan(flash):
    model = bert.BertModel(config_of(use_flash_attn=flash)).eval()
    mask = torch.zeros(2, 5, dtype=torch.bool)
    mask[0, :3] = True
    assert model(torch.ones(2, 5, dtype=torch.long), attention_mask=mask)[0].isfinite().all()


def test_initialisation():
    config = config_of(hidden_size=256, vocab_size=1000, initializer_range=0.02, pad_token_id=3)
    model = bert.BertForPreTraining(config)
    assert model.cls.predictions.decoder.weight is model.bert.embeddings.word_embeddings.weight
    assert (model.bert.embeddings.word_embeddings.weight[3] == 0).all()
    for name, parameter in model.state_dict().items():
        kind = "norm" if "norm" in name or "emb_ln" in name else name.rpartition(".")[2]
        if kind == "norm":
            assert (parameter == (1 if name.endswith("weight") else 0)).all()
        elif kind == "bias":
            assert (parameter == 0).all()
        else:
            assert abs(parameter.mean()) < 0.005 and parameter.std() == pytest.approx(0.02, rel=0.2), name


def test_dropout_in_training():
    model = bert.BertForSequenceClassification(config_of(hidden_dropout_prob=0.3, use_flash_attn=True))
    ids = torch.randint(1, 101, (2, 5))
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)
    assert bert.BertForSequenceClassification(config_of(classifier_dropout=0.25)).dropout.p == 0.25


def half_precision_pair(variant, head, folder, device):
    """`pair` in float32, of more features, and a large padded batch."""
    options = dict(VARIANTS[variant], hidden_size=256, initializer_range=0.05)
    return *pair(head, folder, device, **options), *batch_of(device, batch=32)


def stages(model, layers, **inputs):
    """What each part of a model gives: hidden states of its layers, pooled states, and the logits of both heads."""
    found = {}

    def keep(name):
        return lambda module, args, output: found.update({name: output[0] if isinstance(output, tuple) else output})

    parts = {f"layer {i}": layer for i, layer in enumerate(layers)} | {"pooled": model.bert.pooler}
    hooks = [part.register_forward_hook(keep(name)) for name, part in parts.items()]
    outputs = model(**inputs)
    for hook in hooks:
        hook.remove()
    logits = outputs.prediction_logits[..., : SIZES["vocab_size"]]
    return found | {"predictions": logits, "relationship": outputs.seq_relationship_logits}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["flash", "fused", "last layer apart"])
@pytest.mark.cover(1)
def test_half_precision(variant, dtype, device):
    """Part by part, errors as large as those of transformers' model in the same dtype, over models drawn from 8 seeds.

    Of one model, the ratio of the two largest errors of some logits is anything from a half to two.
    """
    options = dict(hidden_size=128, initializer_range=0.05, hidden_act="gelu_new", num_hidden_layers=2)
    squares = {}
    for seed in range(8):
        torch.manual_seed(seed)
        theirs = randomised(transformers.BertForPreTraining(config_of(**options))).eval().to(device, dtype)
        ours = bert.BertForPreTraining(config_of(**VARIANTS[variant] | options)).eval()
        ours.load_state_dict(bert.remap_state_dict(theirs.float().state_dict(), ours.config))
        exact = copy.deepcopy(theirs).double()
        inputs = {name: x for name, x in batch_of(device, batch=16)[0].items() if name != "attention_mask"}
        with torch.no_grad():
            expected = stages(exact, exact.bert.encoder.layer, **inputs)
            baseline = stages(theirs.to(dtype), theirs.bert.encoder.layer, **inputs)
            ours = ours.to(device, dtype)
            found = stages(ours, ours.bert.encoder.layers, **inputs)
        for name, right in expected.items():
            both = [(x[name].double() - right).square().mean().item() for x in (found, baseline)]
            squares.setdefault(name, []).append(both)
    for name, each in squares.items():
        ours, theirs = torch.tensor(each).mean(0).sqrt().tolist()
        assert ours <= 1.25 * theirs, f"{name}: root mean square of the errors {ours:.2e}, transformers' {theirs:.2e}"


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("variant", ["flash", "fused", "last layer apart"])
def test_half_precision_gradients(variant, dtype, tmp_path, device):
    theirs, ours, inputs, mask = half_precision_pair(variant, "BertForMaskedLM", tmp_path, device)
    models = theirs, copy.deepcopy(theirs).to(dtype), ours.to(dtype)
    assert_gradients_of_masked_loss(*models, inputs, masked_labels(mask, -100), at_most=4)


# ---------------------------------------------------------------------------------------------------------------------
# Checkpoints


@pytest.mark.parametrize("options", [{}, FUSED, VARIANTS["last layer apart"] | FUSED], ids=["plain", "fused", "subset"])
@pytest.mark.parametrize("head", HEADS)
def test_round_trip(head, options):
    ours = randomised(getattr(bert, head)(config_of(head, **options)))
    if head in ("BertForPreTraining", "BertForMaskedLM") and options:  # as checkpoints are padded
        ours.cls.predictions.decoder.bias.data[101:] = -100.0
    (ours if head == "BertModel" else ours.bert).embeddings.word_embeddings.weight.data[101:] = 0.0
    state_dict = ours.state_dict()
    for legacy in (True, False):
        theirs = bert.inv_remap_state_dict(state_dict, ours.config, legacy_names=legacy)
        assert any(key.endswith("LayerNorm.gamma") for key in theirs) == legacy
        again = bert.remap_state_dict(theirs, ours.config)
        torch.testing.assert_close(again, type(again)(state_dict), rtol=0, atol=0)
        twice = bert.inv_remap_state_dict(again, ours.config, legacy_names=legacy)
        torch.testing.assert_close(twice, theirs, rtol=0, atol=0)


def test_names_and_shapes():
    """Names and shapes of the parameters are those that checkpoints of other programs have."""
    config = config_of(num_hidden_layers=1, pad_vocab_size_multiple=8, **VARIANTS["last layer apart"])
    shapes = {key: tuple(tensor.shape) for key, tensor in bert.BertForPreTraining(config).state_dict().items()}
    layer, weight_and_bias = "bert.encoder.layers.0", functools.partial(sized, shapes)
    assert weight_and_bias(f"{layer}.mixer.Wq") == ((64, 64), (64,))
    assert weight_and_bias(f"{layer}.mixer.Wkv") == ((128, 64), (128,))
    assert weight_and_bias(f"{layer}.mixer.out_proj") == ((64, 64), (64,))
    assert weight_and_bias(f"{layer}.mlp.fc1") == ((96, 64), (96,))
    assert weight_and_bias(f"{layer}.mlp.fc2") == ((64, 96), (64,))
    for norm in (f"{layer}.norm1", f"{layer}.norm2", "bert.emb_ln", "cls.predictions.transform.layer_norm"):
        assert weight_and_bias(norm) == ((64,), (64,))
    assert (
        weight_and_bias("bert.pooler.dense") == weight_and_bias("cls.predictions.transform.dense") == ((64, 64), (64,))
    )
    assert weight_and_bias("cls.predictions.decoder") == ((104, 64), (104,))
    assert weight_and_bias("cls.seq_relationship") == ((2, 64), (2,))
    tables = {"word": (104, 64), "position": (32, 64), "token_type": (2, 64)}
    for name, shape in tables.items():
        assert shapes.pop(f"bert.embeddings.{name}_embeddings.weight") == shape
    assert not shapes


def sized(shapes, module):
    return tuple(shapes.pop(f"{module}.{name}") for name in ("weight", "bias"))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("kind", ["safetensors", "sharded", "bin"])
def test_kinds_of_files(kind, legacy, tmp_path):
    theirs = randomised(transformers.BertForPreTraining(config_of())).eval()
    theirs.save_pretrained(tmp_path, max_shard_size="40KB" if kind == "sharded" else "1GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (kind == "sharded")
    if kind == "bin" or legacy:
        state_dict = theirs.state_dict()
        if legacy:
            del state_dict["cls.predictions.decoder.bias"], state_dict["cls.predictions.decoder.weight"]
            names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
            for new, old in names.items():
                state_dict = {key.replace(new, old): tensor for key, tensor in state_dict.items()}
            state_dict["cls.predictions.bias"] = theirs.cls.predictions.bias
            state_dict["bert.embeddings.position_ids"] = torch.arange(32)[None]
        for file in tmp_path.glob("model*"):
            file.unlink()
        torch.save(state_dict, tmp_path / "pytorch_model.bin")
    ours = bert.BertForPreTraining.from_pretrained(str(tmp_path), strict=True).eval()
    ids = torch.randint(1, 101, (2, 7))
    found = ours(ids).prediction_logits
    torch.testing.assert_close(found, theirs(ids).prediction_logits, rtol=0, atol=1e-4)


def test_memory_of_loading(tmp_path, monkeypatch):
    """When a part of the files is read, the tensors of those before are gone."""
    theirs = transformers.BertForPreTraining(config_of())
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    alive, references, real = [], [], checkpoints.pieces_of_file

    def pieces_of_file(path):
        for piece in real(path):
            alive.append(sum(each() is not None for each in references))
            references.extend(weakref.ref(tensor) for tensor in piece.values())
            yield piece

    monkeypatch.setattr(checkpoints, "pieces_of_file", pieces_of_file)
    bert.BertForPreTraining.from_pretrained(tmp_path)
    assert len(alive) > 3 and len(references) > 20
    assert max(alive) <= 4  # of queries, keys and values, weights and biases that wait for the others


@pytest.mark.parametrize("first", ["cls.predictions.bias", "cls.predictions.decoder.bias"])
def test_biases_that_are_not_the_same(first, tmp_path):
    """The decoder's own counts, in whatever file it lies, as in transformers."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    theirs = transformers.BertForMaskedLM(config_of())
    theirs.config.save_pretrained(tmp_path)
    tensors = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    tensors["cls.predictions.bias"], tensors["cls.predictions.decoder.bias"] = torch.zeros(101), torch.ones(101)
    shards = {name: "1.safetensors" if name == first else "2.safetensors" for name in tensors}
    for shard in set(shards.values()):
        save_file({name: tensors[name] for name in tensors if shards[name] == shard}, tmp_path / shard)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    ours = bert.BertForMaskedLM.from_pretrained(tmp_path)
    assert ours.cls.predictions.decoder.bias[:101].unique().tolist() == [1.0]


def test_hub(tmp_path, monkeypatch):
    """The files are in the cache, and there is no network."""
    constants = pytest.importorskip("huggingface_hub.constants")
    repository, commit = tmp_path / "models--owner--name", "0123456789abcdef0123456789abcdef01234567"
    theirs = transformers.BertModel(config_of())
    theirs.save_pretrained(repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    ours = bert.BertModel.from_pretrained("owner/name", config_of())
    assert torch.equal(ours.emb_ln.weight, theirs.embeddings.LayerNorm.weight)


def test_rotary_positions_are_not_saved_for_transformers(tmp_path):
    model = bert.BertModel(config_of(position_embedding_type="rotary"))
    with pytest.raises(ValueError, match=r"position_embedding_type must be 'absolute' to be saved .* found 'rotary'"):
        model.save_pretrained(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("variant", ["plain", "fused", "untied", "last layer apart"])
@pytest.mark.parametrize("head", HEADS)
@pytest.mark.cover(1)
def test_save_pretrained(head, variant, tmp_path):
    options = VARIANTS[variant]
    ours = randomised(getattr(bert, head)(config_of(head, **options))).eval()
    ours.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["vocab_size"] == 101 and written["architectures"] == [head] and "orig_vocab_size" not in written
    auto = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(auto, transformers.BertConfig)
    theirs, report = getattr(transformers, head).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    again = getattr(bert, head).from_pretrained(tmp_path, strict=True).eval()
    given = inputs_for(head, input_ids=torch.randint(1, 101, (2, 7)))
    expected, found, same = (model.eval()(**given) for model in (ours, theirs, again))
    for name in expected.keys():
        if getattr(expected, name) is not None:
            result = getattr(expected, name)
            peer = getattr(found, name)
            torch.testing.assert_close(result[..., : peer.shape[-1]], peer, rtol=0, atol=1e-4)
            torch.testing.assert_close(getattr(same, name)[..., : peer.shape[-1]], result[..., : peer.shape[-1]])


@pytest.mark.parametrize("head", HEADS[1:])
def test_heads_that_a_checkpoint_lacks(head, tmp_path, caplog):
    """They are drawn as in a new model; those that the model lacks are left out."""
    theirs = transformers.BertModel(config_of(head))
    theirs.save_pretrained(tmp_path)
    ours = getattr(bert, head).from_pretrained(tmp_path).eval()
    assert "has no" in caplog.text and str(tmp_path) in caplog.text
    assert all(parameter.isfinite().all() for parameter in ours.parameters())
    ids = torch.randint(1, 101, (2, 7))
    torch.testing.assert_close(ours.bert(ids)[0], theirs.eval()(ids)[0], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match=rf"fits {head} and its configuration; .* has no (c|qa_outputs)"):
        getattr(bert, head).from_pretrained(tmp_path, strict=True)
    caplog.clear()
    ours.save_pretrained(tmp_path / "head")
    encoder = bert.BertModel.from_pretrained(tmp_path / "head").eval()
    assert re.search("has unexpected (c|qa_outputs)", caplog.text)
    torch.testing.assert_close(encoder(ids)[0], ours.bert(ids)[0])


def test_one_head_of_a_pretraining(tmp_path):
    theirs = randomised(transformers.BertForPreTraining(config_of())).eval()
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(1, 101, (2, 7))
    ours = bert.BertForNextSentencePrediction.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(ours(ids).logits, theirs(ids).seq_relationship_logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encoder.layer.1.output.dense.weight": None}, r"it has no bert.encoder.layer.1.output.dense.weight$"),
        ({"encoder.layer.1.attention.self.key.bias": None}, r"has no bert.encoder.layer.1.attention.self.key.bias$"),
        ({"embeddings.more": (2,)}, "has unexpected bert.embeddings.more$"),
        ({"encoder.layer.3.output.dense.bias": (64,)}, "has unexpected bert.encoder.layer.3.output.dense.bias$"),
        (
            {"embeddings.word_embeddings.weight": (100, 64), "encoder.layer.0.intermediate.dense.bias": (5,)},
            r"has bert.embeddings.word_embeddings.weight \(100, 64\) instead of \(101, 64\), "
            r"bert.encoder.layer.0.intermediate.dense.bias \(5,\) instead of \(96,\)$",
        ),
    ],
)
def test_checkpoints_that_do_not_fit(change, message, tmp_path):
    state_dict = transformers.BertModel(config_of()).state_dict()
    for key, shape in change.items():
        state_dict.pop(key, None)
        if shape is not None:
            state_dict[key] = torch.zeros(shape)
    torch.save(state_dict, tmp_path / "pytorch_model.bin")
    message = message.replace("it has no", f"{tmp_path} has no")
    with pytest.raises(ValueError, match=message) as error:
        bert.BertForMaskedLM.from_pretrained(tmp_path, config_of(), strict=False)
    assert "transformers' BERT that fits BertForMaskedLM" in str(error.value)


def test_what_is_not_known_stays():
    """A projection of which a part is missing, too, so that loading names the rest."""
    state_dict = transformers.BertModel(config_of()).state_dict()
    del state_dict["encoder.layer.0.attention.self.key.weight"]
    given = state_dict | {"more": torch.ones(1)}
    found = bert.remap_state_dict(given, config_of())
    assert {"more", "encoder.layer.0.attention.self.query.weight"} < found.keys()
    assert "encoder.layers.0.mixer.Wqkv.weight" not in found and "encoder.layers.0.mixer.Wqkv.bias" in found
    assert given.keys() == state_dict.keys() | {"more"}


@pytest.mark.parametrize("installed", [True, False])
def test_config_of_a_checkpoint(installed, tmp_path, monkeypatch):
    theirs = transformers.BertForSequenceClassification(config_of(num_labels=7)).eval()
    theirs.save_pretrained(tmp_path)
    if not installed:
        monkeypatch.setitem(sys.modules, "transformers", None)
    ours = bert.BertForSequenceClassification.from_pretrained(tmp_path).eval()
    ids = torch.randint(1, 101, (2, 7))
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    assert bert.BertForSequenceClassification.from_pretrained(tmp_path / "again").num_labels == 7


def test_no_config_or_that_of_another_model(tmp_path):
    with pytest.raises(OSError, match=r"config must be given, as there is no config.json in .*"):
        bert.BertModel.from_pretrained(tmp_path)
    transformers.RobertaConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="model_name must be a checkpoint of model_type 'bert', found 'roberta'"):
        bert.BertModel.from_pretrained(tmp_path)


# ---------------------------------------------------------------------------------------------------------------------
# Configurations


def test_fields_of_the_configuration_by_name(tmp_path):
    given = config_of()
    theirs = randomised(transformers.BertModel(given)).to(torch.bfloat16).eval()
    theirs.save_pretrained(tmp_path)
    head = bert.BertForSequenceClassification
    for config in (None, given):
        ours = head.from_pretrained(tmp_path, config, num_labels=7, use_flash_attn=True, dtype="auto")
        assert ours.classifier.out_features == 7 and ours.bert.encoder.use_flash_attn
        assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert given.num_labels == 5 and not hasattr(given, "use_flash_attn")
    assert bert.BertModel.from_pretrained(tmp_path, add_pooling_layer=False).pooler is None
    with pytest.warns(FutureWarning, match="torch_dtype is the older name of dtype") as notices:
        ours = head.from_pretrained(tmp_path, torch_dtype="float16")
    assert next(ours.parameters()).dtype == torch.float16
    assert [notice.filename for notice in notices] == [__file__]
    with pytest.raises(TypeError, match="found 'num_label'; names like it: num_labels"):
        head.from_pretrained(tmp_path, num_label=7)
    with pytest.raises(ValueError, match=r"dtype must be float32, .* with config.use_flash_attn"):
        head.from_pretrained(tmp_path, use_flash_attn=True, dtype=torch.float64)


def test_unknown_fields_are_reported():
    with pytest.warns(UserWarning, match=r"BertConfig: these fields are not known, .*: \['invented'\]"):
        bert.BertModel(config_of(invented=3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for config in (transformers.BertConfig(), config_of(directionality="bidi", pooler_fc_size=768)):
            _bert_config.check_config(config)
            _bert_config.check_config(types.SimpleNamespace(**config.to_dict()))


def test_any_object_with_the_fields(tmp_path):
    fields = {name: getattr(config_of(), name) for name in bert.Config.__annotations__}
    model = bert.BertForSequenceClassification(types.SimpleNamespace(**fields, pad_vocab_size_multiple=16))
    assert model(torch.ones(1, 3, dtype=torch.long)).logits.shape == (1, 2)
    model.save_pretrained(tmp_path)
    assert transformers.BertForSequenceClassification.from_pretrained(tmp_path).config.vocab_size == 101
    del fields["hidden_act"], fields["layer_norm_eps"]
    with pytest.raises(TypeError, match=r"transformers' BertConfig, found no hidden_act, layer_norm_eps$"):
        bert.BertModel(types.SimpleNamespace(**fields))


def test_vocabulary_is_rounded_in_place():
    config = config_of(pad_vocab_size_multiple=8)
    for _ in range(2):
        model = bert.BertForPreTraining(config)
        assert (config.vocab_size, config.orig_vocab_size) == (104, 101)
        assert model.cls.predictions.decoder.out_features == 104


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(is_decoder=True), "config.is_decoder must be False"),
        (dict(is_causal=True), "config.is_causal must be False"),
        (dict(add_cross_attention=True), "config.add_cross_attention must be False"),
        (dict(chunk_size_feed_forward=2), "config.chunk_size_feed_forward must be 0"),
        (dict(output_hidden_states=True), "config.output_hidden_states must be False"),
        (dict(position_embedding_type="relative_key"), "position_embedding_type must be 'absolute' or 'rotary', found"),
        (dict(hidden_act="silu"), "config.hidden_act must be one of gelu, gelu_new, .* found 'silu'"),
        (dict(fused_mlp=True), "config.hidden_act must be one of gelu_new, .* with fused_mlp, found 'gelu'"),
        (dict(mlp_checkpoint_lvl=1), "config.mlp_checkpoint_lvl must be 0 without fused_mlp, found 1"),
        (
            dict(FUSED, mlp_checkpoint_lvl=[0, 1]),
            r"config.mlp_checkpoint_lvl must be one for each of 3 layers, found \[0, 1\]",
        ),
        (
            dict(rotary_emb_dim=8),
            "config.rotary_emb_dim must be None without position_embedding_type='rotary', found 8",
        ),
        (dict(last_layer_subset=True), "config.dense_seq_output must be True with last_layer_subset, found False"),
        (
            dict(position_embedding_type="rotary", dense_seq_output=True, last_layer_subset=True),
            "config.last_layer_subset must be False with position_embedding_type='rotary', found True",
        ),
        (dict(hidden_size=65), "embed_dim must be a multiple of num_heads, 4, found 65"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(reversed(value)),
)
def test_what_is_not_covered(options, message):
    with pytest.raises(ValueError, match=message):
        bert.BertForPreTraining(config_of(**options))


def test_answers_have_two_ends():
    with pytest.raises(ValueError, match=r"config.num_labels must be 2, the first and the last token .*, found 5"):
        bert.BertForQuestionAnswering(config_of())


def test_other_models_are_refused():
    with pytest.raises(ValueError, match=r"config.model_type must be 'bert', the one supported value, found 'roberta'"):
        bert.BertModel(transformers.RobertaConfig())


def test_checkpoint_levels_of_layers():
    """What is kept for the backward does not change what is computed."""
    ids = torch.randint(1, 101, (2, 7))
    results = []
    for levels in (0, [0, 1, 2]):
        model = bert.BertModel(config_of(**FUSED, mlp_checkpoint_lvl=levels))
        torch.manual_seed(0)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.2)
        model.train(False)
        model(ids).pooler_output.sum().backward()
        results.append(gradients(model))
    torch.testing.assert_close(*results)
    with pytest.raises(ValueError, match=r"layer_idx must be given if config.mlp_checkpoint_lvl is a sequence"):
        bert.create_mlp_cls(config_of(**FUSED, mlp_checkpoint_lvl=[0, 1, 2]))


# ---------------------------------------------------------------------------------------------------------------------
# Inputs


@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        (dict(attention_mask=torch.ones(2, 5)), TypeError, "attention_mask must have dtype .*, found torch.float32"),
        (dict(attention_mask=torch.ones(2, 1, 1, 5).bool()), ValueError, r"attention_mask must have shape \(2, 5\)"),
        (dict(attention_mask=torch.ones(2, 4).bool()), ValueError, r"shape \(2, 5\), found \(2, 4\)"),
        (dict(masked_tokens_mask=torch.ones(2, 5).long()), TypeError, "masked_tokens_mask must have dtype torch.bool"),
        (dict(masked_tokens_mask=torch.ones(5).bool()), ValueError, r"masked_tokens_mask must have shape \(2, 5\)"),
        (dict(position_ids=torch.ones(2, 5).bool()), TypeError, "position_ids must have dtype"),
        (dict(token_type_ids=torch.ones(3, 5).long()), ValueError, "token_type_ids must have shape"),
        (dict(input_ids=torch.ones(5).long()), ValueError, r"input_ids must have 2 dimensions \(batch, seqlen\)"),
        (dict(input_ids=torch.ones(2, 33).long()), ValueError, "must be at most 32, the number of positions, found 33"),
    ],
)
def test_inputs_that_do_not_fit(inputs, error, message):
    model = bert.BertModel(config_of(num_hidden_layers=1))
    with pytest.raises(error, match=message):
        model(**{"input_ids": torch.ones(2, 5, dtype=torch.long)} | inputs)


@pytest.mark.parametrize(
    ("head", "labels", "error", "message"),
    [
        ("BertForPreTraining", dict(labels=torch.ones(2, 4).long()), ValueError, r"labels must have shape \(2, 5\)"),
        ("BertForPreTraining", dict(labels=torch.ones(2, 5)), TypeError, "labels must have dtype torch.int64"),
        (
            "BertForPreTraining",
            dict(next_sentence_label=torch.ones(3).long()),
            ValueError,
            r"next_sentence_label must have shape \(2,\), found \(3,\)",
        ),
        ("BertForMaskedLM", dict(labels=torch.ones(2).long()), ValueError, r"labels must have shape \(2, 5\)"),
        ("BertForTokenClassification", dict(labels=torch.ones(2, 5).int()), TypeError, "dtype torch.int64"),
        ("BertForSequenceClassification", dict(labels=torch.ones(3).long()), ValueError, r"shape \(2,\), found \(3,\)"),
        (
            "BertForSequenceClassification",
            dict(labels=torch.ones(2, 4)),
            ValueError,
            r"labels must have shape \(2, 5\)",
        ),
        (
            "BertForNextSentencePrediction",
            dict(labels=torch.ones(2, 1).long()),
            ValueError,
            r"shape \(2,\), found \(2, 1",
        ),
        ("BertForNextSentencePrediction", dict(labels=torch.ones(2)), TypeError, "labels must have dtype torch.int64"),
        (
            "BertForNextSentencePrediction",
            dict(labels=torch.tensor([0, 2])),
            ValueError,
            "^labels must be -100 or from 0 to 1, found 2$",
        ),
        (
            "BertForMultipleChoice",
            dict(labels=torch.ones(2).long()),
            ValueError,
            r"labels must have shape \(1,\), found",
        ),
        (
            "BertForMultipleChoice",
            dict(labels=torch.tensor([2])),
            ValueError,
            "labels must be -100 or from 0 to 1, found 2",
        ),
        (
            "BertForMaskedLM",
            dict(labels=torch.full((2, 5), -1)),
            ValueError,
            r"labels must be -100 or from 0 to \d+, found -1",
        ),
        (
            "BertForPreTraining",
            dict(labels=torch.full((2, 5), 10**6)),
            ValueError,
            r"labels must be -100 or from 0 to \d+, found 1000000",
        ),
        (
            "BertForPreTraining",
            dict(next_sentence_label=torch.tensor([-1, 2])),
            ValueError,
            "next_sentence_label must be -1 or from 0 to 1, found 2",
        ),
        (
            "BertForSequenceClassification",
            dict(labels=torch.tensor([4, 5])),
            ValueError,
            "labels must be -100 or from 0 to 4, found 5",
        ),
        (
            "BertForTokenClassification",
            dict(labels=torch.full((2, 5), 5)),
            ValueError,
            "labels must be -100 or from 0 to 4, found 5",
        ),
        (
            "BertForQuestionAnswering",
            dict(start_positions=torch.ones(3).long()),
            ValueError,
            r"start_positions must have shape \(2,\), found \(3,\)",
        ),
        ("BertForQuestionAnswering", dict(end_positions=torch.ones(2)), TypeError, "end_positions must have dtype"),
    ],
)
def test_labels_that_do_not_fit(head, labels, error, message):
    model = getattr(bert, head)(config_of(head, num_hidden_layers=1))
    with pytest.raises(error, match=message):
        model(**inputs_for(head, input_ids=torch.ones(2, 5, dtype=torch.long)), **labels)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (
            dict(input_ids=torch.ones(6, 5).long()),
            r"input_ids must have 3 dimensions \(batch, choices, seqlen\), found",
        ),
        (dict(attention_mask=torch.ones(6, 5).long()), r"attention_mask must have shape \(2, 3, 5\), found \(6, 5\)"),
        (dict(token_type_ids=torch.ones(2, 3, 4).long()), r"token_type_ids must have shape \(2, 3, 5\), found"),
        (dict(position_ids=torch.ones(3, 2, 5).long()), r"position_ids must have shape \(2, 3, 5\), found \(3, 2, 5\)"),
        (dict(position_ids=torch.ones(2, 5).long()), "position_ids must have shape"),
    ],
)
def test_choices_that_do_not_fit(inputs, message):
    model = bert.BertForMultipleChoice(config_of(num_hidden_layers=1))
    with pytest.raises(ValueError, match=message):
        model(**{"input_ids": torch.ones(2, 3, 5, dtype=torch.long)} | inputs)


def test_problem_type_is_known():
    model = bert.BertForSequenceClassification(config_of(num_hidden_layers=1))
    model.config.__dict__["problem_type"] = "ranking"
    with pytest.raises(ValueError, match=r"config.problem_type must be one of regression, .* found 'ranking'"):
        model(torch.ones(2, 5, dtype=torch.long), labels=torch.ones(2, 5))


def test_masks_of_integers_count_as_bool():
    model = bert.BertModel(config_of(use_flash_attn=True)).eval()
    inputs, mask = batch_of()
    expected = model(inputs["input_ids"], attention_mask=mask)[0]
    for dtype in (torch.int32, torch.uint8):
        assert torch.equal(model(inputs["input_ids"], attention_mask=mask.to(dtype))[0], expected)


SIGNATURES = {
    "create_mixer_cls": "config cross_attn=False return_residual=False",
    "create_mlp_cls": "config layer_idx=None return_residual=False",
    "create_block": "config layer_idx=None",
    "_init_weights": "module initializer_range=0.02",
    "BertEncoder.forward": "self hidden_states key_padding_mask=None subset_mask=None",
    "BertPooler.forward": "self hidden_states pool=True",
    "BertPredictionHeadTransform.forward": "self hidden_states",
    "BertLMPredictionHead.forward": "self hidden_states",
    "BertPreTrainingHeads.forward": "self sequence_output pooled_output",
    "BertPreTrainedModel.__init__": "self config inputs kwargs",
    "BertModel.__init__": "self config add_pooling_layer=True",
    "BertModel.forward": (
        "self input_ids=None position_ids=None token_type_ids=None attention_mask=None masked_tokens_mask=None "
        "inputs_embeds=None return_dict=None options"
    ),
    "BertForPreTraining.forward": (
        "self input_ids=None position_ids=None token_type_ids=None attention_mask=None labels=None "
        "next_sentence_label=None inputs_embeds=None return_dict=None options"
    ),
    "BertForPreTraining.tie_weights": "self",
    "remap_state_dict": "state_dict config",
    "inv_remap_state_dict": "state_dict config legacy_names=True",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    function = functools.reduce(getattr, name.split("."), bert)
    parameters = inspect.signature(function).parameters.values()
    found = [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters]
    assert " ".join(found) == SIGNATURES[name]


# ---------------------------------------------------------------------------------------------------------------------
# Graphs, the meta device, autocast


@pytest.mark.parametrize(
    "variant",
    [*(pytest.param(name, marks=pytest.mark.slow) for name in ("flash", "fused")), "plain", "last layer apart"],
)
def test_compiles_whole(variant):
    layers = 2 if variant == "last layer apart" else 1
    model = randomised(bert.BertForPreTraining(config_of(**VARIANTS[variant], num_hidden_layers=layers))).eval()
    inputs, mask = batch_of()
    labels, follows = masked_labels(mask, 0), torch.tensor([0, 1, 1, 0])

    def loss_and_gradients(function, inputs):
        model.zero_grad()
        loss = function(**inputs, labels=labels, next_sentence_label=follows).loss
        loss.backward()
        return loss, gradients(model)

    # How many tokens there are is known to the graph as a number that stays open.
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        for given in (inputs, {"input_ids": inputs["input_ids"]})[: 2 if variant == "plain" else 1]:
            found, expected = (loss_and_gradients(function, given) for function in (compiled, model))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_meta_device(head):
    config = config_of(head, **FUSED)
    with torch.device("meta"):
        model = getattr(bert, head)(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    given = inputs_for(head, input_ids=torch.ones(2, 5, dtype=torch.long, device="meta"))
    assert model(**given)[-1 if head != "BertModel" else 0].is_meta


@pytest.mark.parametrize("variant", ["plain", "flash", "fused", "last layer apart"])
def test_autocast(variant, device):
    model = bert.BertForPreTraining(config_of(**VARIANTS[variant], hidden_dropout_prob=0.0)).eval()
    inputs, mask = batch_of()
    inputs |= dict(labels=masked_labels(mask, 0), next_sentence_label=torch.tensor([0, 1, 1, 0]))
    expected = model(**inputs).loss
    model, inputs = model.to(device), {name: tensor.to(device) for name, tensor in inputs.items()}
    with torch.autocast(device.type, torch.bfloat16):
        found = model(**inputs)
    found.loss.backward()
    assert found.prediction_logits.dtype == torch.bfloat16 and found.loss.dtype == torch.float32
    assert all(gradient.dtype == torch.float32 and gradient.isfinite().all() for gradient in gradients(model).values())
    torch.testing.assert_close(found.loss.cpu(), expected, rtol=5e-2, atol=5e-2)


@pytest.mark.cuda
@pytest.mark.parametrize("variant", ["flash", "fused", "last layer apart"])
def test_compiles_with_inductor(variant, device):
    model = bert.BertForPreTraining(config_of(**VARIANTS[variant], hidden_dropout_prob=0.0)).to(device).eval()
    inputs, mask = batch_of(device)
    inputs |= dict(labels=masked_labels(mask, 0), next_sentence_label=torch.tensor([0, 1, 1, 0], device=device))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True):
        with torch.autocast("cuda", torch.bfloat16):
            found, expected = torch.compile(model, fullgraph=True)(**inputs).loss, model(**inputs).loss
    found.backward()
    assert all(gradient.isfinite().all() for gradient in gradients(model).values())
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
