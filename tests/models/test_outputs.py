"""What models return, and what transformers.Trainer makes of it."""

import copy
import inspect
import pickle

import pytest
import torch
import transformers
from torch.utils import _pytree as pytree

from flash_attn.models import bert as berts
from flash_attn.models._outputs import ModelOutput
from flash_attn.models.gpt import CausalLMLoss, CausalLMOutput
from tests.models.test_trainers import bert, gpt

HEADS = [
    "BertForPreTraining",
    "BertForMaskedLM",
    "BertForNextSentencePrediction",
    "BertForMultipleChoice",
    "BertForSequenceClassification",
    "BertForTokenClassification",
    "BertForQuestionAnswering",
]
A, B, C = torch.randn(2), torch.randn(3), torch.randn(4)
OUTPUTS = {
    "logits": (CausalLMOutput(logits=A), dict(logits=A)),
    "loss": (CausalLMLoss(A), dict(loss=A)),
    "head": (berts.BertHeadOutput(A, B), dict(loss=A, logits=B)),
    "head without loss": (berts.BertHeadOutput(None, B), dict(logits=B)),
    "model": (berts.BertModelOutput(A, pooler_output=B), dict(last_hidden_state=A, pooler_output=B)),
    "model without pooler": (berts.BertModelOutput(A), dict(last_hidden_state=A)),
    "answers": (
        berts.BertForQuestionAnsweringOutput(loss=A, start_logits=B, end_logits=C),
        dict(loss=A, start_logits=B, end_logits=C),
    ),
    "answers without loss": (
        berts.BertForQuestionAnsweringOutput(start_logits=B, end_logits=C),
        dict(start_logits=B, end_logits=C),
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_output(name):
    """Attributes, names, indices and iteration over what there is; copies by all ways that libraries take."""
    output, there = OUTPUTS[name]
    cls, values = type(output), list(there.values())
    copies = [
        output,
        cls(each for each in output),
        cls(map(torch.clone, output)),
        cls(values),
        cls(tuple(values)),
        copy.copy(output),
        copy.deepcopy(output),
        pickle.loads(pickle.dumps(output)),
        cls(**there),
        pytree.tree_map(torch.clone, output),
        output._replace(),
    ]
    for each in copies:
        assert type(each) is cls and isinstance(each, tuple) and type(each.to_tuple()) is tuple
        assert list(each.keys()) == list(there) == list(each._asdict()) and len(each) == len(there)
        for found in (each, each.values(), each.to_tuple(), each[:], dict(each.items()).values()):
            torch.testing.assert_close(list(found), values)
        for i, (key, value) in enumerate(there.items()):
            assert key in each and each.get(key) is not None
            for found in (getattr(each, key), each[key], each[i], dict(each)[key]):
                torch.testing.assert_close(found, value)
        for missing in set(cls._columns) - set(there):
            assert getattr(each, missing) is None and missing not in each and each.get(missing, 5) == 5
            with pytest.raises(KeyError, match=missing):
                each[missing]
    keys = [path[0].name for path, _ in pytree.tree_flatten_with_path(output)[0]]
    assert keys == list(there)
    assert output == cls(*output) or (len(values) == 1 and output[0] is cls(*output)[0])
    assert repr(output).startswith(f"{cls.__name__}({next(iter(there))}=tensor")
    with pytest.raises(AttributeError):
        setattr(output, next(iter(there)), A)


def test_outputs_with_wrong_fields():
    for given, names in (((), {}), ((A, B, C), {}), ((A,), dict(loss=A)), ((), dict(logits=A, other=B))):
        with pytest.raises(TypeError, match="the fields of BertHeadOutput must be loss, logits, found"):
            berts.BertHeadOutput(*given, **names)
    with pytest.raises(TypeError, match="at most one field"):
        type("Wrong", (ModelOutput,), {"__annotations__": {"a": int, "b": int}, "a": None, "b": None})


def test_compiled_outputs():
    """As one graph, in and out of it; torch.export has them as outputs."""
    model, x = bert("BertForSequenceClassification").eval(), torch.arange(1, 13).view(2, 6)

    def function(x):
        output = model(x, labels=x[:, 0] % 2)
        return output, output.loss + output[1].sum() + output["logits"].sum()

    expected, number = function(x)
    compiled, again = torch.compile(function, fullgraph=True, backend="eager")(x)
    assert type(compiled) is type(expected)
    torch.testing.assert_close((compiled.loss, compiled.logits, again), (expected.loss, expected.logits, number))
    exported = torch.export.export(model, (x,)).module()(x)
    assert list(exported.keys()) == ["logits"]
    torch.testing.assert_close(exported.logits, model(x).logits)


# ---------------------------------------------------------------------------------------------------------------------
# transformers.Trainer


def arguments(folder, **options):
    usual = dict(
        max_steps=1,
        per_device_train_batch_size=4,
        per_device_eval_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    return transformers.TrainingArguments(output_dir=str(folder), **usual | options)


def rows_of(name, labels=True):
    """Four rows, two of them with padding on the right, with all that a tokenizer gives."""
    rows = []
    for i in range(4):
        x, mask = torch.randint(1, 90, (12,)), torch.ones(12, dtype=torch.int64)
        mask[12 - 4 * (i % 2) :] = 0
        row = dict(input_ids=x, attention_mask=mask) | ({} if name == "gpt" else dict(token_type_ids=x % 2))
        if name == "BertForMultipleChoice":
            row = {
                key: torch.stack((value, value.roll(1) if key == "input_ids" else value)) for key, value in row.items()
            }
        of_head = dict(labels=torch.tensor(i % 2))
        if name in ("gpt", "BertForMaskedLM", "BertForPreTraining"):
            of_head = dict(labels=x.masked_fill(mask == 0, 0 if name == "BertForPreTraining" else -100))
            of_head |= dict(next_sentence_label=torch.tensor(i % 2)) if name == "BertForPreTraining" else {}
        elif name == "BertForTokenClassification":
            of_head = dict(labels=(x % 2).masked_fill(mask == 0, -100))
        elif name == "BertForQuestionAnswering":
            of_head = dict(start_positions=torch.tensor(i), end_positions=torch.tensor(i + 1))
        rows.append(row | (of_head if labels else {}))
    return rows


def batch(rows):
    return {key: torch.stack([row[key] for row in rows]) for key in rows[0]}


@pytest.mark.parametrize("labels", [False, True])
@pytest.mark.parametrize("name", ["gpt", *HEADS])
def test_predictions_of_trainer(name, labels, tmp_path):
    """Those of the model called with all columns, and its loss."""
    model = (gpt() if name == "gpt" else bert(name)).eval()
    rows = rows_of(name, labels)
    with torch.no_grad():
        expected = model(**batch(rows))
    found = transformers.Trainer(model, arguments(tmp_path)).predict(rows)
    if labels:
        with torch.no_grad():
            loss = sum(model(**batch(rows[i : i + 2])).loss for i in (0, 2)) / 2
        assert found.metrics["test_loss"] == pytest.approx(loss.item(), rel=1e-5)
    if name == "gpt" and labels:
        return  # a loss without logits
    there = [value for key, value in expected.items() if key != "loss"]
    predictions = (found.predictions,) if len(there) == 1 else found.predictions
    for each, value in zip(predictions, there, strict=True):
        torch.testing.assert_close(torch.from_numpy(each), value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", HEADS)
def test_columns_that_forward_names(name):
    """Trainer drops all others: each head names what its encoder does."""
    named = inspect.signature(berts.BertModel.forward).parameters
    of_encoder = {key for key, each in named.items() if each.kind != each.VAR_KEYWORD} - {"masked_tokens_mask"}
    assert of_encoder <= set(inspect.signature(getattr(berts, name).forward).parameters)


@pytest.mark.parametrize("padding", ["right", "left"])
@pytest.mark.parametrize("labels", ["of tokens", "of padding, too"])
def test_accumulated_gradients_of_padded_rows(padding, labels, tmp_path):
    """Two batches of two rows in one step of Trainer: the gradient of the mean over all of their labels."""
    model, rows = gpt(), rows_of("gpt")
    for row in rows:
        row["labels"] = row["input_ids"]
        if padding == "left":
            row["attention_mask"] = row["attention_mask"].flip(0)
        if labels == "of tokens":
            row["labels"] = row["labels"].masked_fill(row["attention_mask"] == 0, -100)
    model(**batch(rows)).loss.backward()
    expected = [each.detach() - each.grad for each in model.parameters()]
    model.zero_grad()
    options = dict(gradient_accumulation_steps=2, per_device_train_batch_size=2, optim="sgd", learning_rate=1.0)
    how = arguments(
        tmp_path, **options, max_grad_norm=0.0, lr_scheduler_type="constant", train_sampling_strategy="sequential"
    )
    transformers.Trainer(model, how, train_dataset=rows).train()
    torch.testing.assert_close([each.detach() for each in model.parameters()], expected, rtol=1e-4, atol=1e-5)


def test_label_smoothing_of_trainer(tmp_path):
    """It compares each label with the logits before it, as its list of names says of decoders; ours is on it."""
    model, rows = gpt(), rows_of("gpt")
    trainer = transformers.Trainer(model, arguments(tmp_path, label_smoothing_factor=0.2), train_dataset=rows)
    given = batch(rows)
    logits, labels = model(given["input_ids"]).logits[:, :-1], given["labels"][:, 1:]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.2)
    torch.testing.assert_close(trainer.compute_loss(model, given), expected)
    assert repr(model).startswith("GPTLMHeadModel(") and "GPT2LM" not in repr(model)
