"""Models in transformers' Trainer, trl's SFTTrainer and under adapters of peft. Nothing is downloaded."""

import copy
import pathlib
import runpy
import sys
import warnings

import datasets
import peft
import pytest
import torch
import transformers
import trl
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import BertConfig, GPT2Config

from flash_attn.models.bert import BertForMaskedLM, BertForSequenceClassification
from flash_attn.models.gpt import GPTLMHeadModel
from flash_attn.models.vit import VisionTransformer

WORDS = ["<pad>", "<eos>", *(f"w{i}" for i in range(20))]
TEXTS = [" ".join(f"w{(i + j) % 20}" for j in range(4 + i % 5)) for i in range(8)]


@pytest.fixture(scope="module")
def tokenizer():
    """A word is a token."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def gpt(**options):
    sizes = dict(vocab_size=len(WORDS), n_embd=32, n_layer=2, n_head=2, n_positions=32, bos_token_id=1, eos_token_id=1)
    torch.manual_seed(0)
    return GPTLMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **options))


def bert(cls=BertForMaskedLM, **options):
    sizes = dict(vocab_size=40, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48)
    torch.manual_seed(0)
    return cls(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0, **options))


def vit():
    torch.manual_seed(0)
    return VisionTransformer(img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=3)


def arguments(folder, cls=transformers.TrainingArguments, **options):
    usual = dict(
        output_dir=str(folder),
        max_steps=6,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        logging_steps=1,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        save_strategy="no",
        seed=1,
        lr_scheduler_type="constant",
        dataloader_pin_memory=False,
    )
    return cls(**usual | options)


def losses_of(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def logits_of(model, *args, **kwargs):
    with torch.no_grad():
        return model.eval()(*args, **kwargs).logits


X = torch.tensor([[2, 3, 4, 5, 6, 1], [8, 9, 10, 11, 12, 1]])
ROWS = [{"input_ids": X[i % 2], "labels": X[i % 2]} for i in range(8)]

# ---------------------------------------------------------------------------------------------------------------------
# Trainer


@pytest.mark.parametrize("options", [dict(), dict(pad_vocab_size_multiple=8, use_flash_attn=True, fused_mlp=True)])
def test_trainer(options, tmp_path):
    """The loss falls; what it saves has tied weights as any, and is loaded by state dict or by resuming."""
    model = gpt(**options)
    checkpointed = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=False))
    args = arguments(tmp_path, save_strategy="steps", save_steps=3, **checkpointed)
    trainer = transformers.Trainer(model, args, train_dataset=ROWS, eval_dataset=ROWS)
    trainer.train()
    losses = losses_of(trainer)
    assert losses[-1] < 0.7 * losses[0] and model.is_gradient_checkpointing
    assert trainer.evaluate()["eval_loss"] < losses[0]
    trainer.save_model(tmp_path / "saved")
    again = gpt(**options)
    again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    assert again.is_tied
    torch.testing.assert_close(logits_of(again, X), logits_of(model, X))
    resumed = gpt(**options)
    trainer = transformers.Trainer(resumed, args, train_dataset=ROWS)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.is_tied
    torch.testing.assert_close(logits_of(resumed, X), logits_of(model, X))


def test_accumulated_gradients(tmp_path):
    """Are those of one batch, although its rows have different numbers of labels."""
    rows = [{"input_ids": X[0], "labels": X[0].where(torch.arange(6) > i, -100)} for i in range(4)]
    results = []
    for batch in (4, 1):
        model = gpt()
        sizes = dict(per_device_train_batch_size=batch, gradient_accumulation_steps=4 // batch, max_steps=1)
        args = arguments(tmp_path, **sizes, optim="sgd", max_grad_norm=0.0)
        transformers.Trainer(model, args, train_dataset=rows).train()
        results.append([each.detach() for each in model.parameters()])
    torch.testing.assert_close(results[1], results[0])


def test_trainer_of_classifiers(tmp_path):
    rows = [{"input_ids": X[i % 2], "attention_mask": (X[i % 2] > 1).long(), "labels": i % 2} for i in range(8)]
    model = bert(BertForSequenceClassification)
    trainer = transformers.Trainer(model, arguments(tmp_path), train_dataset=rows, eval_dataset=rows)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < losses_of(trainer)[0]
    assert trainer.predict(rows).predictions.shape == (8, 2)


def test_trainer_of_images(tmp_path):
    """With a loss function, as the model takes no labels."""
    images, losses = [{"x": torch.full((3, 16, 16), i % 3 - 1.0), "labels": i % 3} for i in range(9)], nn.functional

    def loss_of(logits, labels, num_items_in_batch=None):
        return losses.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch

    args = arguments(tmp_path, remove_unused_columns=False, gradient_checkpointing=True)
    trainer = transformers.Trainer(vit(), args, train_dataset=images, compute_loss_func=loss_of)
    trainer.train()
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]


# ---------------------------------------------------------------------------------------------------------------------
# Adapters


def fused_gpt():
    """With a head of its own: merged into that, an adapter would change a tied embedding, too."""
    fused = dict(use_flash_attn=True, fused_bias_fc=True, fused_mlp=True, fused_dropout_add_ln=True)
    return gpt(**fused, activation_function="gelu_new", tie_word_embeddings=False)


MODELS = {
    "gpt": (gpt, ["Wqkv", "out_proj", "fc1", "fc2"], "CAUSAL_LM"),
    "gpt, fused": (fused_gpt, ["Wqkv", "fc1", "fc2", "lm_head"], None),
    "bert": (bert, ["Wqkv", "out_proj"], None),
    "bert, fused": (lambda: bert(fused_bias_fc=True, fused_dropout_add_ln=True), ["Wqkv", "dense"], None),
    "vit": (vit, ["Wqkv", "Wq", "out_proj", "head"], None),
}


def run(model):
    return model(torch.ones(1, 3, 16, 16)) if isinstance(unwrapped(model), VisionTransformer) else model(X).logits


def unwrapped(model):
    return model.get_base_model() if isinstance(model, peft.PeftModel) else model


@pytest.mark.parametrize("name", MODELS)
def test_adapters(name, tmp_path):
    """Every adapter gets a gradient and changes the logits; saved and loaded, and merged, it gives the same."""
    make, target_modules, task = MODELS[name]
    config = peft.LoraConfig(r=2, target_modules=target_modules, task_type=task, init_lora_weights=False)
    base = run(make().eval())
    model = peft.get_peft_model(make(), config)
    run(model).square().sum().backward()
    adapters = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert len(adapters) >= 2 * len(target_modules)
    assert all("lora" in name and each.grad.abs().sum() > 0 for name, each in adapters.items())
    expected = run(model.eval()).detach()
    assert (expected - base).abs().max() > 1e-3
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(make(), tmp_path).eval()
    torch.testing.assert_close(run(loaded).detach(), expected)
    with loaded.disable_adapter():
        torch.testing.assert_close(run(loaded).detach(), base.detach())
    merged = loaded.merge_and_unload()
    torch.testing.assert_close(run(merged).detach(), expected, rtol=1e-4, atol=1e-4)  # sums of other terms
    assert type(merged) is type(make()) and set(merged.state_dict()) == set(make().state_dict())


def test_heads_that_are_trained_as_a_whole(tmp_path):
    """Are apart from the embedding, and are saved so when the adapter is merged."""
    config = peft.LoraConfig(r=2, target_modules=["Wqkv"], modules_to_save=["lm_head"])
    model = peft.get_peft_model(gpt(), config)
    head = model.get_base_model().lm_head.modules_to_save["default"]
    head.weight.data += 1
    expected = logits_of(model, X)
    model.load_state_dict(model.state_dict(), assign=True)
    unwrapped(model).tie_weights()
    assert unwrapped(model).get_input_embeddings().weight is unwrapped(model).lm_head.original_module.weight
    torch.testing.assert_close(logits_of(model, X), expected)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Input and output embeddings are no longer tied")
        merged = model.merge_and_unload()
    merged.save_pretrained(tmp_path)
    for again in (GPTLMHeadModel, transformers.AutoModelForCausalLM):
        again = again.from_pretrained(tmp_path)
        torch.testing.assert_close(logits_of(again, X), expected, rtol=1e-4, atol=1e-4)


def test_generation_after_a_learned_prompt():
    """The model is called with it; generate, which would leave it out, says so."""
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, x = peft.get_peft_model(gpt().eval(), config), torch.arange(1, 7)[None]
    assert model(x).logits.shape[1] == 9 and model(x, labels=x).loss.isfinite()
    with pytest.raises(NotImplementedError, match="without a learned prompt, found PromptTuningConfig"):
        model.generate(input_ids=x, max_length=9)


def test_generation_under_an_adapter():
    config = peft.LoraConfig(r=2, target_modules=["Wqkv"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = peft.get_peft_model(gpt(), config).eval()
    found = model.generate(input_ids=X[:, :3], max_new_tokens=4)
    expected = X[:, :3]
    for _ in range(4):
        expected = torch.cat([expected, logits_of(model, expected)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(found, expected)
    with pytest.raises(TypeError, match="found 'num_beams'; there is no beam search"):
        model.generate(input_ids=X, max_new_tokens=4, num_beams=2)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_trainer_of_adapters(use_reentrant, tmp_path):
    """With layers computed again in the backward, and a frozen embedding before them."""
    model = peft.get_peft_model(gpt(), peft.LoraConfig(r=2, target_modules=["Wqkv"], task_type="CAUSAL_LM"))
    checkpointed = dict(gradient_checkpointing=True, gradient_checkpointing_kwargs=dict(use_reentrant=use_reentrant))
    trainer = transformers.Trainer(model, arguments(tmp_path, **checkpointed), train_dataset=ROWS)
    before = copy.deepcopy(model.state_dict())
    trainer.train()
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {name for name, each in model.named_parameters() if each.requires_grad}


# ---------------------------------------------------------------------------------------------------------------------
# trl


@pytest.mark.parametrize("adapters", [False, True])
def test_sft(adapters, tokenizer, tmp_path):
    """A few steps on texts: the loss is that of the model, and falls; saved and loaded, it gives the same logits."""
    model = gpt()
    config = peft.LoraConfig(r=2, target_modules=["Wqkv", "out_proj"], task_type="CAUSAL_LM") if adapters else None
    trainer = trl.SFTTrainer(
        model,
        arguments(tmp_path, trl.SFTConfig, max_length=16, bf16=False, dataset_num_proc=None),
        train_dataset=datasets.Dataset.from_dict({"text": TEXTS}),
        processing_class=tokenizer,
        peft_config=config,
    )
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["attention_mask"].min() == 0  # padded
    with torch.no_grad():
        expected = gpt()(batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
        torch.testing.assert_close(trainer.compute_loss(trainer.model, dict(batch)), expected)
    before = copy.deepcopy(trainer.model.state_dict())
    trainer.train()
    assert losses_of(trainer)[-1] < losses_of(trainer)[0]
    changed = {name for name, value in trainer.model.state_dict().items() if not torch.equal(value, before[name])}
    trainer.save_model(tmp_path / "saved")
    x = batch["input_ids"]
    again = gpt()
    if adapters:
        assert changed == {name for name, each in trainer.model.named_parameters() if each.requires_grad}
        again = peft.PeftModel.from_pretrained(again, tmp_path / "saved")
    else:
        assert changed == set(before) and model.is_tied
        again.load_state_dict(load_file(tmp_path / "saved" / "model.safetensors"))
    torch.testing.assert_close(logits_of(again, x), logits_of(trainer.model, x))


def test_the_example_of_lora(tmp_path, monkeypatch, capsys):
    """It raises an error if the adapters that it loads are not those that it saved."""
    monkeypatch.setattr(sys, "argv", ["lora.py", "--device=cpu", "--steps=2", "--rank=2", f"--out={tmp_path}"])
    runpy.run_path(str(pathlib.Path(__file__).parents[2] / "examples/lora.py"), run_name="__main__")
    assert "after: loss" in capsys.readouterr().out
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.model_type == "llama"
