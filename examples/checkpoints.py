"""A checkpoint of transformers in and out: load it, compare the two models, fine-tune, generate, give it back.

    pip install transformers safetensors                            # once
    python examples/checkpoints.py                                  # a small random Llama, made on the spot
    python examples/checkpoints.py --checkpoint path/of/a/folder    # or one of yours

The folder can hold any model of the families that `flash_attn.models` lists. The text is random tokens in either case.
With the random Llama this takes seconds on a CPU; with a model of yours, as long as the steps of fine-tuning take.
"""

import argparse
import pathlib
import tempfile

import torch
import transformers

from flash_attn.models.gpt import GPTLMHeadModel

DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
FUSED = dict(use_flash_attn=True, fused_bias_fc=True, fused_dropout_add_ln=True)  # what makes it fast


def make_checkpoint(folder):
    """A Llama with random weights, as transformers writes it."""
    config = transformers.LlamaConfig(
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        max_position_embeddings=512,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def load(folder, device):
    """(transformers' model, ours), with the same weights."""
    dtype = DTYPES[device]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    config = GPTLMHeadModel.from_config(theirs.config, device="meta").config  # the meta device takes no memory
    for field, value in FUSED.items():
        setattr(config, field, value)
    ours = GPTLMHeadModel.from_pretrained(folder, config, device=device, dtype=dtype)
    return theirs.eval(), ours.eval()


@torch.no_grad()
def largest_difference(theirs, ours, tokens):
    """The largest difference of the logits, as a share of the largest logit."""
    expected, found = theirs(tokens).logits.float(), ours(tokens).logits.float()
    return ((found - expected).abs().max() / expected.abs().max()).item()


def fine_tune(model, tokens, steps):
    """Learn sequences (batch, seqlen) by heart; return the first and the last loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        loss = model.train()(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses[0], losses[-1]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, help="a folder (default: made with random weights)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=60, help="of fine-tuning (default %(default)s)")
    args = parser.parse_args()

    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.checkpoint
        if folder is None:
            folder = pathlib.Path(temporary, "checkpoint")
            make_checkpoint(folder)
        theirs, ours = load(folder, args.device)
        tokens = torch.randint(3, theirs.config.vocab_size, (4, 32), device=args.device)
        print(f"logits differ by at most {largest_difference(theirs, ours, tokens):.1e} of the largest")

        before, after = fine_tune(ours, tokens, args.steps)
        print(f"loss {before:.3f} before, {after:.3f} after {args.steps} steps")

        prompt, expected = tokens[:, :8], tokens
        found = ours.eval().generate(prompt, max_length=32, cg=args.device == "cuda")
        print(f"{(found == expected).float().mean():.0%} of the tokens that it generates are those that it learnt")

        ours.save_pretrained(pathlib.Path(temporary, "tuned"))
        theirs, _ = load(pathlib.Path(temporary, "tuned"), args.device)
        print(f"transformers loads it back: {largest_difference(theirs, ours, tokens):.1e}")


if __name__ == "__main__":
    main()
