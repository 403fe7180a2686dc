"""A checkpoint of transformers' BERT: loaded, compared on a padded batch, fine-tuned a little, and given back.

    pip install transformers safetensors                        # once
    python examples/bert.py                                     # a tiny random checkpoint, made on the spot
    python examples/bert.py google-bert/bert-base-uncased       # or one from a folder or the hub

The tiny checkpoint takes seconds on a CPU; another one takes as long as 20 steps of fine-tuning take with it.
"""

import argparse
import tempfile

import torch
import transformers

from flash_attn.models.bert import BertForSequenceClassification

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)


def random_checkpoint(folder):
    """Write a checkpoint, as training with transformers leaves one, and return where it is."""
    config = transformers.BertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    return folder


def random_batch(vocab_size):
    """Sentences of 48, 7 and 20 tokens, as a tokenizer pads them."""
    attention_mask = (torch.arange(48) < torch.tensor([48, 7, 20])[:, None]).long()
    input_ids = torch.randint(1, vocab_size, attention_mask.shape) * attention_mask
    return {"input_ids": input_ids.to(device), "attention_mask": attention_mask.to(device)}


def compare(ours, theirs, batch):
    """Print the difference of the logits that the two models compute for the same batch."""
    with torch.no_grad():
        expected = theirs.to(device).eval()(**batch).logits
        logits = ours.eval()(**batch).logits
    difference = ((logits - expected).norm() / expected.norm()).item()
    print(f"logits {tuple(logits.shape)}, relative difference {difference:.1e}")
    assert difference < 5e-2, "larger than rounding to bfloat16 explains"


parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("checkpoint", nargs="?", help="a folder, or a name on the Hugging Face hub")
with tempfile.TemporaryDirectory() as folder:
    checkpoint = parser.parse_args().checkpoint or random_checkpoint(folder)

    # With use_flash_attn, padding takes no time; the kernels are for 16 bits, which autocast provides on a GPU.
    config = transformers.BertConfig.from_pretrained(checkpoint, use_flash_attn=True)
    model = BertForSequenceClassification.from_pretrained(checkpoint, config, device=device)
    theirs = transformers.BertForSequenceClassification.from_pretrained(checkpoint)
    batch, labels = random_batch(config.vocab_size), torch.tensor([0, 1, 1], device=device)
    mixed_precision = torch.autocast(device, torch.bfloat16, enabled=device == "cuda")

    with mixed_precision:
        compare(model, theirs, batch)

    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    for _ in range(20):
        with mixed_precision:
            loss = model(**batch, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad(), mixed_precision:
        classes = model.eval()(**batch).logits.argmax(-1)
    print(f"loss {loss.item():.3f}, classes {classes.tolist()}, labels {labels.tolist()}")

    model.save_pretrained(f"{folder}/fine-tuned")
    again = transformers.BertForSequenceClassification.from_pretrained(f"{folder}/fine-tuned")
    with mixed_precision:
        compare(model, again, batch)
