"""Fine-tune a language model with LoRA, by trl's SFTTrainer: the model stays as it is, and small adapters learn.

    pip install '.[examples]' accelerate datasets peft trl          # once
    python examples/lora.py                                         # a small model of its own: minutes on two cores
    python examples/lora.py --model FOLDER --text FILE              # a checkpoint of transformers, a text of yours

1. Without --model, a small Llama learns Python's own library first, as bytes. Without --text, what the adapters learn
   is the same library in capital letters.
2. SFTTrainer trains adapters of rank --rank on the projections of attention and of the MLP.
3. The adapters are saved, loaded beside the model anew, which must give the same logits, and merged into it. Before and
   after, it prints the loss of texts that were not trained on, and what the model writes.
"""

import argparse
import pathlib
import sysconfig
import tempfile

import torch
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from flash_attn.models.gpt import GPTLMHeadModel

LAYERS = ["Wqkv", "out_proj", "fc1", "fc2"]  # as the layers of flash_attn.models are called
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True)
CONTEXT, BATCH = 128, 16  # characters of a text, which are at most as many tokens; texts of a step


def tokenizer_of_bytes():
    """A byte is a token."""
    special = ["<pad>", "<eos>"]
    vocabulary = {word: i for i, word in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def small_llama(tokenizer):
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=2 * CONTEXT,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return GPTLMHeadModel.from_config(config, **FUSED)


def texts_of(text, steps):
    """As many pieces of a text as these steps read, and some for validation."""
    pieces = [text[i : i + CONTEXT] for i in range(0, len(text), CONTEXT)]
    return pieces[BATCH : BATCH * (steps + 1)], pieces[:BATCH]


def trainer_of(model, tokenizer, texts, folder, args, peft_config=None, **options):
    usual = dict(
        output_dir=str(folder),
        per_device_train_batch_size=BATCH,
        lr_scheduler_type="cosine",
        max_length=CONTEXT,
        logging_steps=args.steps // 4 or 1,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        bf16=args.device == "cuda",
        use_cpu=args.device == "cpu",
        dataloader_pin_memory=args.device == "cuda",
    )
    return SFTTrainer(
        model,
        SFTConfig(**usual | options),
        train_dataset=Dataset.from_dict({"text": texts}),
        processing_class=tokenizer,
        peft_config=peft_config,
    )


@torch.no_grad()
def loss_of(model, tokenizer, texts):
    tokens = tokenizer(texts, return_tensors="pt", padding=True, truncation=True, max_length=CONTEXT)
    tokens = tokens.to(next(model.parameters()).device)
    labels = tokens.input_ids.masked_fill(tokens.attention_mask == 0, -100)
    return model.eval()(tokens.input_ids, attention_mask=tokens.attention_mask, labels=labels).loss.item()


def written(model, tokenizer, prompt, length=60):
    tokens = tokenizer(prompt, return_tensors="pt").input_ids.to(next(model.parameters()).device)
    sequences = model.eval().generate(tokens, max_length=tokens.shape[1] + length, top_k=5)
    return tokenizer.decode(sequences[0, tokens.shape[1] :].tolist())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    add("--model", type=pathlib.Path, help="a folder with a checkpoint of transformers, and its tokenizer")
    add("--text", type=pathlib.Path, help="a file with the text to learn")
    add("--steps", type=int, default=80, help="of each training (default: %(default)s)")
    add("--rank", type=int, default=8, help="of the adapters (default: %(default)s)")
    add("--out", type=pathlib.Path, help="where the adapters and the merged model go (default: they are not kept)")
    args = parser.parse_args()
    for name in ("steps", "rank"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} must be at least 1, found {getattr(args, name)}")

    torch.manual_seed(0)
    disable_progress_bars()
    python = "".join(path.read_text() for path in sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40])
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or pathlib.Path(scratch)
        if args.model:
            tokenizer = AutoTokenizer.from_pretrained(args.model)
            model = GPTLMHeadModel.from_pretrained(args.model, device=args.device, dtype=torch.float32, **FUSED)
        else:
            tokenizer = tokenizer_of_bytes()
            model = small_llama(tokenizer).to(args.device)
            trainer_of(
                model,
                tokenizer,
                texts_of(python, args.steps)[0],
                folder,
                args,
                learning_rate=3e-3,
                max_steps=args.steps,
            ).train()
        fine_tune(model, tokenizer, args.text.read_text() if args.text else python.upper(), folder, args)


def fine_tune(model, tokenizer, text, folder, args):
    train, held_out = texts_of(text, args.steps)
    prompt = held_out[0][: CONTEXT // 4]
    print(
        f"before: loss {loss_of(model, tokenizer, held_out):.2f}; {prompt!r} -> {written(model, tokenizer, prompt)!r}"
    )

    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, target_modules=LAYERS, task_type="CAUSAL_LM")
    weights = {name: weight.clone() for name, weight in model.state_dict().items()}
    trainer = trainer_of(model, tokenizer, train, folder, args, lora, learning_rate=5e-3, max_steps=args.steps)
    trainer.train()
    trainer.save_model(folder / "adapter")
    trainer.model.print_trainable_parameters()
    after = loss_of(trainer.model, tokenizer, held_out)

    base = GPTLMHeadModel(model.config, device=args.device)
    base.load_state_dict(weights)
    loaded = PeftModel.from_pretrained(base, folder / "adapter")
    difference = abs(loss_of(loaded, tokenizer, held_out) - after)
    assert difference < 1e-4, f"the adapters that were saved give another loss, by {difference}"
    merged = loaded.merge_and_unload()
    merged.save_pretrained(folder / "merged")
    tokenizer.save_pretrained(folder / "merged")
    print(f"after: loss {after:.2f}; {prompt!r} -> {written(merged, tokenizer, prompt)!r}")
    if args.out:
        print(f"adapters: {folder / 'adapter'}; merged, as transformers loads it: {folder / 'merged'}")


if __name__ == "__main__":
    main()
