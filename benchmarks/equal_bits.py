"""What a sampler and a trainer make of the same tokens: log-probabilities at levels 0 and 2 of batch invariance.

A language model learns Python for a minute. Then it continues texts, token by token over pages beside others, as
a server does, and one forward over the whole sequences computes the same log-probabilities, as training does. A row for
each token of one text has both. At level 0 they differ in their rounding, at level 2 they have the same bits.

    python -m benchmarks.equal_bits                       # rows go to build/benchmarks; on a CPU a smaller model
    python -m benchmarks.equal_bits --steps 500 --dim 768 --layers 12
"""

import argparse
import csv
import os
import pathlib

import torch

from benchmarks.harness import environment
from benchmarks.rows import ROWS, append_csv

LEVELS = (0, 2)
TEXTS, PROMPT, TOKENS = 16, 64, 128  # texts that are continued at once; bytes of each prompt; bytes that follow it
BATCH, CONTEXT = 16, 256


def main() -> None:
    """Train the model, write the rows, and say how far sampler and trainer are apart."""
    args = _parse()
    torch.manual_seed(0)
    text = _text().to(args.device)
    model = _make_model(args.dim, args.layers, args.device)
    _train(model, text, args.steps)
    model.eval()
    if args.device != "cpu":
        model.bfloat16()
    prompts = _windows(text, TEXTS, PROMPT)
    for level in LEVELS:
        sampler, trainer = log_probabilities(model, prompts, level)
        apart = [abs(one - other) for one, other in zip(sampler, trainer, strict=True)]
        print(
            f"level {level}: at most {max(apart):.2g} nats apart, {sum(map(bool, apart))} of {len(apart)} tokens differ"
        )
        both = [(f"{one:.9g}", f"{other:.9g}") for one, other in zip(sampler, trainer, strict=True)]  # all of float32
        rows = [{"level": level, "token": i, "sampler": one, "trainer": other} for i, (one, other) in enumerate(both)]
        append_csv(args.csv, [row | environment(args.device) for row in rows])
    print("rows:", args.csv)


def _parse():
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=500 if on_gpu else 150, help="of training (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=768 if on_gpu else 128, help="width, a multiple of 64")
    parser.add_argument("--layers", type=int, default=12 if on_gpu else 2, help="default: %(default)s")
    parser.add_argument("--csv", type=pathlib.Path, default=ROWS / "equal_bits.csv", help="default: %(default)s")
    return parser.parse_args()


def _text():
    """uint8 (bytes,): the modules of Python's own library."""
    files = sorted(pathlib.Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def _windows(text, count, length):
    starts = torch.randint(len(text) - length, (count,)).tolist()
    return torch.stack([text[start : start + length] for start in starts]).long()


def _make_model(dim, layers, device):
    from transformers import GPT2Config

    from flash_attn.models.gpt import GPTLMHeadModel

    config = GPT2Config(
        vocab_size=256,
        n_embd=dim,
        n_layer=layers,
        n_head=dim // 64,
        n_positions=0,
        bos_token_id=None,
        eos_token_id=None,
        rotary_emb_fraction=1.0,
        rms_norm=True,
        activation_function="swiglu",
        attn_pdrop=0.0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        use_flash_attn=True,
        fused_bias_fc=True,
        fused_dropout_add_ln=True,
        residual_in_fp32=True,
    )
    return GPTLMHeadModel(config, device=device)


def _train(model, text, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, steps)
    for _ in range(steps):
        tokens = _windows(text, BATCH, CONTEXT)
        with torch.autocast(text.device.type, torch.bfloat16, enabled=text.is_cuda):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    print(f"loss after {steps} steps: {loss.item():.2f} nats a byte")


def log_probabilities(model, prompts: torch.Tensor, level: int) -> tuple[list[float], list[float]]:
    """Continue prompts (texts, bytes) at this level: the log-probabilities of the first text's new bytes.

    Returns:
        As the sampler had them, and as one forward over all tokens has them.
    """
    import flash_attn
    from flash_attn.losses.cross_entropy import CrossEntropyLoss

    def of(logits, tokens):  # both sides take the same operation, since another one would round otherwise
        losses = CrossEntropyLoss(reduction="none")(logits.flatten(0, -2).float(), tokens.flatten())
        return -losses.view(tokens.shape)

    torch.manual_seed(1)
    with flash_attn.batch_invariant(level), torch.no_grad():
        output = model.generate(
            prompts, max_new_tokens=TOKENS, top_k=0, page_size=16, return_dict_in_generate=True, output_scores=True
        )
        new = output.sequences[:, -TOKENS:]
        sampler = torch.stack([of(*each) for each in zip(output.scores, new.unbind(1))], dim=1)
        trainer = of(model(output.sequences[:, :-1], num_last_tokens=TOKENS).logits, new)
    return sampler[0].tolist(), trainer[0].tolist()


def read(path: pathlib.Path) -> list[dict]:
    """The rows of a file that this has written."""
    with path.open(newline="") as lines:
        return [
            row | dict(level=int(row["level"]), sampler=float(row["sampler"]), trainer=float(row["trainer"]))
            for row in csv.DictReader(lines)
        ]


def draw(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
    """For each level, the log-probabilities of both sides over the tokens, and below how far they are apart."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        2, len(LEVELS), figsize=(11, 4.8), layout="constrained", sharex=True, sharey="row", height_ratios=(3, 2)
    )
    for level, (curves, apart) in zip(LEVELS, axes.T, strict=True):
        sampler, trainer = ([row[side] for row in rows if row["level"] == level] for side in ("sampler", "trainer"))
        curves.plot(sampler, color="#000000", linewidth=2.2, label="sampler: token by token, over pages")
        curves.plot(trainer, color="#e69f00", linewidth=1, label="trainer: one forward over all tokens")
        differences = [one - other for one, other in zip(sampler, trainer, strict=True)]
        apart.bar(range(len(differences)), differences, width=1, color="#d55e00")
        equal = differences.count(0)
        curves.set_title(f"level {level}: {equal} of {len(differences)} tokens have the same bits", fontsize=10)
        apart.set_xlabel("token")
        for axis in (curves, apart):
            axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("log-probability")
    axes[1, 0].set_ylabel("sampler - trainer")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.suptitle(
        f"The same tokens to a sampler and to a trainer\n{rows[0]['device']}, PyTorch {rows[0]['torch']}", fontsize=11
    )
    figure.savefig(path, dpi=100, metadata={"Software": None})
    pyplot.close(figure)
    return path


if __name__ == "__main__":
    main()
