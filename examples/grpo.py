"""Reinforcement learning in which sampler and trainer agree, bit for bit: GRPO on a task whose reward is computed.

    pip install '.[examples]' transformers                          # once
    python examples/grpo.py                                         # learn to sort digits, in about a minute
    python examples/grpo.py --level 0                               # the same without batch invariance

A model reads a few digits and is rewarded for writing them in order. In each step a group of answers to each prompt is
sampled over pages, token by token; their rewards, less the mean of the group and divided by its deviation, say which
answers become likelier (GRPO, arXiv:2402.03300). The gradient assumes that the sampler's probabilities are the
trainer's. With set_batch_invariant(2) they are: before the first update, the KL divergence between the two is 0.0 and
every importance ratio is 1. At level 0, decoding and training round differently, and neither holds.
"""

import argparse
import pathlib

import torch
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import GPT2Config

import flash_attn
from flash_attn.losses.cross_entropy import CrossEntropyLoss
from flash_attn.models.gpt import GPTLMHeadModel

PLOT = pathlib.Path(__file__).resolve().parents[1] / "demo" / "grpo.png"
EQUALS, VOCAB = 10, 16  # the digits are tokens 0 to 9; the others are never right
PAGE = 16  # tokens in a page of the sampler's cache


def make_model(dim, layers, device):
    """A decoder as Llama has it: rotary positions, RMSNorm, a gated MLP."""
    config = GPT2Config(
        vocab_size=VOCAB,
        n_embd=dim,
        n_layer=layers,
        n_head=dim // 32,
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


def mixed_precision(device):
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def draw_prompts(count, digits, device):
    """(count, digits + 1): digits, then the sign after which the answer begins."""
    prompts = torch.randint(10, (count, digits + 1), device=device)
    prompts[:, -1] = EQUALS
    return prompts


def reward(prompts, answers):
    """The share of places of each answer (rows, digits) that hold the right digit."""
    return (answers == prompts[:, :-1].sort(dim=1).values).float().mean(1)


def log_probabilities(logits, tokens):
    """The log-probability of each of tokens (...) under logits (..., vocabulary), in float32.

    Sampler and trainer both call this, since another operation would round otherwise.
    """
    losses = CrossEntropyLoss(reduction="none")(logits.flatten(0, -2).float(), tokens.flatten())
    return -losses.view(tokens.shape)


@torch.no_grad()
def sample(model, prompts, digits):
    """Answers to the prompts, and the log-probability with which the sampler has drawn each token."""
    with mixed_precision(prompts.device):
        output = model.eval().generate(
            prompts,
            max_new_tokens=digits,
            top_k=0,  # from the whole distribution
            page_size=PAGE,
            return_dict_in_generate=True,
            output_scores=True,
        )
    answers = output.sequences[:, -digits:]
    return answers, torch.stack([log_probabilities(*each) for each in zip(output.scores, answers.unbind(1))], dim=1)


def evaluate(model, prompts, answers):
    """The log-probability of each token of the answers by one forward over whole sequences, as training makes it."""
    tokens, digits = torch.cat([prompts, answers], dim=1), answers.shape[1]
    with mixed_precision(prompts.device):
        logits = model.train()(tokens[:, :-1], num_last_tokens=digits).logits
    return log_probabilities(logits, answers)


def advantages(rewards, group):
    """How much better each answer is than the others of its group, in deviations."""
    rewards = rewards.view(-1, group)
    centred = rewards - rewards.mean(1, keepdim=True)
    return (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()


def train(model, args):
    """Returns (mean reward, KL divergence, largest |ratio - 1|) of each step, the last two before its first update."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.0)
    device, history = torch.device(args.device), []
    progress = tqdm(range(args.steps), desc="learning to sort", unit="step")
    for step in progress:
        prompts = draw_prompts(args.prompts, args.digits, device).repeat_interleave(args.group, dim=0)
        answers, sampled = sample(model, prompts, args.digits)
        rewards = reward(prompts, answers)
        advantage = advantages(rewards, args.group)[:, None]
        for update in range(args.updates):
            now = evaluate(model, prompts, answers)
            ratio = (now - sampled).exp()
            if update == 0:
                kl = (sampled - now).mean().item()
                furthest = (ratio - 1).abs().max().item()
                history.append((rewards.mean().item(), kl, furthest))
                if step == 0:
                    exact = "exactly 1" if furthest == 0 else f"up to {furthest:.1e} from 1"
                    progress.write(f"first step, level {args.level}: KL {kl}, importance ratios {exact}")
            clipped = ratio.clamp(0.8, 1.28)
            loss = -torch.minimum(ratio * advantage, clipped * advantage).mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        progress.set_postfix_str(f"reward {sum(each[0] for each in history[-20:]) / len(history[-20:]):.2f}")
    return history


def plot(history, level, path):
    """Draw the reward, and how far the importance ratios of each step's first update are from 1."""
    figure = Figure(figsize=(10, 4), layout="constrained")
    reward_axes, ratio_axes = figure.subplots(1, 2)
    rewards, _, furthest = zip(*history)
    reward_axes.plot(rewards, color="tab:blue")
    reward_axes.set(title="Digits in their place", xlabel="step", ylabel="mean reward", ylim=(0, 1))
    ratio_axes.plot(furthest, color="tab:red")
    ratio_axes.set(
        title=f"Sampler and trainer at level {level}", xlabel="step", ylabel="largest |importance ratio - 1|"
    )
    ratio_axes.set_ylim(bottom=-0.02 * max(*furthest, 1e-6))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--level", type=int, choices=(0, 1, 2), default=2, help="of batch invariance (default %(default)s)")
    add("--steps", type=int, default=200, help="of sampling (default %(default)s)")
    add("--updates", type=int, default=2, help="of the model, for each step of sampling (default %(default)s)")
    add("--prompts", type=int, default=16, help="in a step (default %(default)s)")
    add("--group", type=int, default=8, help="answers to each prompt (default %(default)s)")
    add("--digits", type=int, default=3, help="to be sorted (default %(default)s)")
    add("--dim", type=int, default=64, help="width, a multiple of 32 (default %(default)s)")
    add("--layers", type=int, default=2, help="default: %(default)s")
    add("--lr", type=float, default=1e-3, help="default: %(default)s")
    add("--seed", type=int, default=0)
    add("--out", type=pathlib.Path, default=PLOT, help="the plot (default: demo/grpo.png)")
    args = parser.parse_args()
    for name, least in (("steps", 1), ("updates", 1), ("prompts", 1), ("group", 2), ("digits", 1), ("layers", 1)):
        if getattr(args, name) < least:
            parser.error(f"--{name} must be at least {least}, found {getattr(args, name)}")
    if args.dim <= 0 or args.dim % 32:
        parser.error(f"--dim must be a positive multiple of 32, found {args.dim}")

    torch.manual_seed(args.seed)
    if args.device == "cpu":
        torch.set_num_threads(1)  # faster for tensors as small as these
    model = make_model(args.dim, args.layers, args.device)
    with flash_attn.batch_invariant(args.level):
        history = train(model, args)
        prompts = draw_prompts(5, args.digits, torch.device(args.device))
        answers, _ = sample(model, prompts, args.digits)
    plot(history, args.level, args.out)
    print(f"mean reward of the last steps: {sum(each[0] for each in history[-10:]) / len(history[-10:]):.2f}")
    for prompt, answer in zip(prompts[:, :-1].tolist(), answers.tolist()):
        print("".join(map(str, prompt)), "->", "".join(str(token) if token < EQUALS else "?" for token in answer))
    print(f"plot: {args.out}")


if __name__ == "__main__":
    main()
