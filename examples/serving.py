"""Serving a language model: requests arrive at random times, and share one pool of pages of keys and values.

    pip install '.[examples]'                            # once: brings tqdm and matplotlib
    python examples/serving.py                           # half a minute on two CPU cores
    python examples/serving.py --rate 50 --pages 32      # more requests than the pool has room for
    python examples/serving.py --float8                  # a pool in float8, half the memory of 16 bits
    python examples/serving.py --transformers            # beside transformers' continuous batching, which this wants

1. tiny_lm.py learns a little Python: a small transformer that continues bytes.
2. A server runs it for many requests at once. There is no batch that begins and ends: each step takes whoever is there
   (continuous batching), and it is one call of the model on the tokens of all of them, one token of each request that
   generates, and a chunk of the prompts of others. The beginning that all prompts have in common is computed and kept
   once. If no page is free, the request that came last gives its pages back, and starts again later.
3. It prints tokens per second and latencies, and draws when each request waited, read its prompt and wrote.

4. With --transformers, all requests arrive at once and get equally many tokens, and the same prompts go to a Llama of
   transformers of the same width and depth, in its continuous batching: with PyTorch's attention, and on a GPU with
   that of flash_attn. Both always take the likeliest token, and it says how many requests got the same tokens.

The server is three calls of flash_attn: `PageAllocator` says which pages each request has, `apply_rotary_emb` rotates
queries and keys, and `flash_attn_varlen_func` with a block table attends to pages, for any number of new tokens each.
"""

import argparse
import collections
import dataclasses
import inspect
import math
import pathlib
import random
import statistics
import time

import torch
from matplotlib.figure import Figure
from tqdm import tqdm

from flash_attn import flash_attn_varlen_func
from flash_attn.functional import float8_descale, to_float8
from flash_attn.layers.rotary import apply_rotary_emb
from flash_attn.utils.generation import OutOfPages, PageAllocator, copy_pages
from tiny_lm import DTYPES, HEAD_DIM, MAX_POSITIONS, VOCAB, TinyLM, cut, mixed_precision, python_sources, train

PLOT = pathlib.Path(__file__).resolve().parents[1] / "demo" / "serving.png"


@dataclasses.dataclass(eq=False)
class Request:
    """A text to be continued. The server adds `tokens`, and when it began and when each token came, in seconds."""

    name: int
    prompt: list[int]  # behind the common prefix
    length: int  # how many tokens to generate
    arrival: float = 0.0
    begin: float | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    times: list[float] = dataclasses.field(default_factory=list)

    def draw(self, logits, temperature=0.8):
        """The next token, which depends on the request, its place and logits (vocabulary,) alone."""
        generator = torch.Generator().manual_seed(1000 * self.name + len(self.tokens))
        return torch.multinomial((logits.float().cpu() / temperature).softmax(-1), 1, generator=generator).item()


class Server:
    """Runs a model for many requests, in steps of at most `budget` tokens, over one pool of pages."""

    def __init__(self, model, prefix, num_pages, page_size, budget, float8=False):
        self.model, self.prefix, self.budget = model, prefix, budget
        self.pages = PageAllocator(num_pages, page_size)
        device, heads = model.cos.device, model.embedding.embedding_dim // HEAD_DIM
        shape = (num_pages, page_size, 2, heads, HEAD_DIM)
        dtype = torch.float8_e4m3fn if float8 else DTYPES[device.type]
        self.caches = {block: torch.zeros(shape, device=device, dtype=dtype) for block in range(len(model.blocks))}
        self.scales = {block: [] for block in self.caches}  # in float8, of keys and of values: those of the prefix fit
        self.waiting, self.running = collections.deque(), []
        self.counts = collections.Counter()  # of what happened, for the report
        self.start = time.perf_counter()
        self.pages.allocate("prefix", len(prefix))
        self.forward({"prefix": prefix})

    def now(self):
        return time.perf_counter() - self.start

    def submit(self, request):
        """Let a request wait for its turn."""
        check_room(request, self.prefix, self.pages.num_pages, self.pages.page_size)
        self.waiting.append(request)

    def step(self):
        """Run the model once, and return the requests that got a token, each with the token in `tokens`."""
        parts = self.schedule()
        logits = self.forward({request.name: tokens for request, tokens in parts.items()})
        got = [request for request in parts if not self.unread(request)]
        for row, request in zip(logits, parts):
            if request in got:  # the others have read a part of their prompt only
                request.tokens.append(request.draw(row))
                request.times.append(self.now())
        for request in got:
            if len(request.tokens) == request.length:
                self.running.remove(request)
                self.pages.free(request.name)
        return got

    def unread(self, request):
        """The tokens of a request that the pages do not hold: of its prompt, or the one that it generated last."""
        return (self.prefix + request.prompt + request.tokens)[self.pages.length(request.name) :]

    def schedule(self):
        """The tokens that the model reads of each request in this step: first those that generate, then prompts."""
        parts, budget = {}, self.budget
        for request in sorted(self.running, key=lambda each: len(self.unread(each)) > 1):
            budget -= self.take(parts, request, budget)
        while self.waiting and budget > 0:
            request = self.waiting[0]
            self.pages.fork("prefix", request.name)
            if self.pages.num_needed(request.name, len(self.unread(request))) > self.pages.num_free:
                self.pages.free(request.name)
                break
            self.waiting.popleft()
            self.running.append(request)
            request.begin = self.now() if request.begin is None else request.begin
            budget -= self.take(parts, request, budget)
        lengths = [len(tokens) for tokens in parts.values()]
        self.counts["mixed steps"] += 1 in lengths and max(lengths) > 1
        self.counts["largest batch"] = max(self.counts["largest batch"], len(parts))
        return parts

    def take(self, parts, request, budget):
        """Give a request pages for what it reads, at most `budget` tokens. Returns how many tokens these are."""
        while request in self.running and budget > 0:
            tokens = self.unread(request)[:budget]
            try:
                copy_pages(self.caches, self.pages.append(request.name, len(tokens)))
            except OutOfPages:
                self.preempt(self.running[-1], parts)
            else:
                parts[request] = tokens
                return len(tokens)
        return 0

    def preempt(self, request, parts):
        """Let a request give back its pages, and read all of its tokens again later."""
        self.counts["preempted"] += 1
        self.running.remove(request)
        self.pages.free(request.name)
        self.waiting.appendleft(request)
        parts.pop(request, None)

    @torch.no_grad()
    def forward(self, parts):
        """Write the tokens of some sequences into their pages. Returns logits (sequences, vocabulary) after them."""
        self.counts["steps"] += 1
        step = Step(self.pages, parts, self.model)
        with mixed_precision(step.tokens.device):
            x = self.model.embedding(step.tokens)
            for block, cache, scales in zip(self.model.blocks, self.caches.values(), self.scales.values()):
                x = x + attend(block.attention, block.attention_norm(x), cache, step, scales)
                x = x + block.mlp(block.mlp_norm(x))
            return self.model.logits(self.model.norm(x[step.last]))


def check_room(request, prefix, num_pages, page_size):
    """Raise ValueError for a request that is too long for the model, or for a pool that it has for itself."""
    tokens = len(prefix) + len(request.prompt) + request.length
    if tokens > MAX_POSITIONS:
        raise ValueError(f"a request must have at most {MAX_POSITIONS} tokens, as many as positions, found {tokens}")
    room = num_pages - (len(prefix) % page_size > 0)  # the last page of the prefix, of which each request has a copy
    pages = -(-tokens // page_size)
    if pages > room:
        raise ValueError(f"a request must have at most {room} pages, as many as the pool, found one for {pages}")


class Step:
    """Where the tokens of one call are: packed one behind the other, and in pages."""

    def __init__(self, pages, parts, model):
        device, names = model.cos.device, list(parts)
        counts = torch.tensor([len(parts[name]) for name in names])
        lengths = torch.tensor([pages.length(name) for name in names])  # these tokens included
        entries = torch.arange(len(names)).repeat_interleave(counts)
        cu_seqlens_q = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
        positions = torch.arange(len(entries)) + (lengths - counts - cu_seqlens_q[:-1])[entries]
        table = pages.block_table(names)
        slots = table[entries, positions // pages.page_size] * pages.page_size + positions % pages.page_size
        self.tokens = torch.tensor([token for part in parts.values() for token in part], device=device)  # (total,)
        self.last = (cu_seqlens_q[1:] - 1).to(device)  # of each sequence
        self.slots = slots.to(device)  # (total,), of all positions of the pool
        self.cos, self.sin = model.cos[positions.to(device)], model.sin[positions.to(device)]
        self.where = dict(
            cu_seqlens_q=cu_seqlens_q.int().to(device),
            seqused_k=lengths.int().to(device),
            max_seqlen_q=max(counts.tolist()),
            max_seqlen_k=max(lengths.tolist()),
            block_table=table.to(device),
        )


def attend(attention, x, cache, step, scales):
    """tiny_lm's attention of packed tokens x (total, dim), over pages (pages, page size, 2, heads, HEAD_DIM).

    scales: of keys and of values, each (heads,), by which a cache in float8 is multiplied; the first call makes them.
    """
    q, k, v = attention.qkv(x).unflatten(-1, (3, -1, HEAD_DIM)).unbind(1)  # each (total, heads, HEAD_DIM)
    q, k = (apply_rotary_emb(each[None], step.cos, step.sin)[0] for each in (q, k))
    options = dict(causal=True, window_size=attention.window)
    if cache.dtype == torch.float8_e4m3fn:
        scales += [] if scales else [2 * float8_descale(each) for each in (k, v)]  # room for larger ones
        k, v = (to_float8(each, scale) for each, scale in zip((k, v), scales))
        options |= dict(k_descale=scales[0], v_descale=scales[1])
        q = q.bfloat16()  # also on the CPU
    else:
        q = q.to(cache.dtype)
    k_pages, v_pages = cache.unbind(2)
    for pages, each in ((k_pages, k), (v_pages, v)):
        pages.flatten(0, 1)[step.slots] = each.to(pages.dtype)
    out = flash_attn_varlen_func(q, k_pages, v_pages, **step.where, **options)
    return attention.out(out.flatten(1).to(x.dtype))


@torch.no_grad()
def alone(model, prefix, request):
    """The tokens of a request that a model generates for it alone, with caches in one piece."""
    device, drawn = model.cos.device, Request(request.name, request.prompt, request.length)
    tokens, filled = prefix + request.prompt, 0
    caches = model.empty_caches(1, capacity=len(tokens) + request.length)
    while len(drawn.tokens) < request.length:
        with mixed_precision(device):
            logits = model(torch.tensor([tokens], device=device), caches, filled)[0, -1]
        filled += len(tokens)
        tokens = [drawn.draw(logits)]
        drawn.tokens += tokens
    return drawn.tokens


def random_requests(text, count, length, rate, seed):
    """Requests that begin somewhere in a text and arrive at random, on average `rate` in a second."""
    draw, arrival, requests = random.Random(seed), 0.0, []
    for name in range(count):
        start, size = draw.randrange(len(text) - 200), draw.randint(20, 120)
        prompt = text[start : start + size].tolist()
        requests.append(Request(name, prompt, draw.randint(max(length // 2, 1), length), arrival))
        arrival += draw.expovariate(rate)
    return requests


def serve(server, requests):
    """Submit each request at its time, and run the server until all have ended."""
    coming = collections.deque(requests)
    server.start = time.perf_counter()
    with tqdm(total=sum(request.length for request in requests), desc="serving", unit="token") as progress:
        while coming or server.waiting or server.running:
            while coming and coming[0].arrival <= server.now():
                server.submit(coming.popleft())
            if server.waiting or server.running:
                progress.update(len(server.step()))
                progress.set_postfix_str(f"{len(server.running)} running, {len(server.waiting)} waiting")
            else:
                time.sleep(coming[0].arrival - server.now())


def small_llama(args, text):
    """A Llama of transformers with the width and depth of the TinyLM, which learns the same text for as long."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=args.dim,
        intermediate_size=4 * args.dim,
        num_hidden_layers=args.layers,
        num_attention_heads=args.dim // HEAD_DIM,
        head_dim=HEAD_DIM,
        max_position_embeddings=MAX_POSITIONS,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).to(args.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(args.seed)
    for _ in tqdm(range(args.steps), desc="training a Llama"):
        starts = torch.randint(len(text) - args.context - 1, (16,), generator=generator)
        windows = cut(text, starts, args.context).to(args.device, torch.int64)
        with mixed_precision(args.device):
            model(windows, labels=windows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.to(DTYPES[args.device.type]).eval()


def batched_by_transformers(model, implementation, prompts, args):
    """The tokens of each prompt in continuous batching, and the seconds that they take the second time."""
    import transformers

    model.set_attn_implementation(implementation)
    pool = dict(num_blocks=args.pages, max_batch_tokens=args.budget) if args.device.type == "cpu" else {}
    known = inspect.signature(transformers.ContinuousBatchingConfig).parameters
    pool["page_size" if "page_size" in known else "block_size"] = args.page_size  # the second until transformers 5.18
    if "auto_switch_to_flash" in known:
        pool["auto_switch_to_flash"] = False
    config = transformers.ContinuousBatchingConfig(**pool)
    generation = transformers.GenerationConfig(
        max_new_tokens=args.length, do_sample=False, eos_token_id=-1, pad_token_id=0
    )
    for _ in range(2):  # the first time, graphs are captured
        start = time.perf_counter()
        results = model.generate_batch(prompts, generation, config, persistent_manager=True)
        seconds = time.perf_counter() - start
    model.destroy_cached_continuous_batching_manager()
    return [tuple(result.generated_tokens) for result in results.values()], seconds


def compare_with_transformers(args, text, prompts):
    """Print tokens per second of transformers' continuous batching with each attention, and if tokens are equal."""
    model, own = small_llama(args, text), None
    ways = {"sdpa": "PyTorch's attention", "flash_attention_2": "flash_attn"}
    for implementation, name in ways.items():
        if implementation != "sdpa" and args.device.type == "cpu":
            print(f"transformers, {name}: needs a GPU")
            continue
        tokens, seconds = batched_by_transformers(model, implementation, prompts, args)
        count = sum(len(each) for each in tokens)
        own = own or tokens
        equal = sum(a == b for a, b in zip(own, tokens))
        print(
            f"transformers, {name}: {count} tokens in {seconds:.2f} s: {count / seconds:.0f} tokens per second"
            + (f"; {equal} of {len(tokens)} requests have the tokens of {ways['sdpa']}" if own is not tokens else "")
        )


def report(server, requests):
    seconds = max(request.times[-1] for request in requests)
    tokens = sum(len(request.tokens) for request in requests)
    first = [request.times[0] - request.arrival for request in requests]
    between = [b - a for request in requests for a, b in zip(request.times, request.times[1:])]
    shared, counts = len(server.prefix) // server.pages.page_size, server.counts
    print(f"{len(requests)} requests, {tokens} tokens in {seconds:.1f} s: {tokens / seconds:.0f} tokens per second")
    for what, values in (("first token after", first), ("then one every", between)):
        if values:  # requests of one token have nothing between
            worst = sorted(values)[len(values) * 9 // 10]
            middle = statistics.median(values)
            print(f"{what} {1e3 * middle:.0f} ms (median), {1e3 * worst:.0f} ms (9 of 10 are faster)")
    print(
        f"{counts['steps']} steps of at most {counts['largest batch']} requests, {counts['mixed steps']} of them with "
        f"prompts beside decoding; {shared} pages of the common prefix kept once; {counts['preempted']} times a "
        "request gave its pages back"
    )


COLORS = {"waiting": "#d0d4d9", "reading": "#e8a33d", "writing": "#1a5fb4"}


def plot(requests, path):
    """Draw when each request waited, read its prompt and wrote, and how long tokens took."""
    figure = Figure(figsize=(12, 4.6), layout="constrained")
    timeline, latency = figure.subplots(1, 2, width_ratios=(3, 2))
    spans = {
        "waiting": [(each.arrival, each.begin) for each in requests],
        "reading": [(each.begin, each.times[0]) for each in requests],
        "writing": [(each.times[0], each.times[-1]) for each in requests],
    }
    for what, pairs in spans.items():
        starts, ends = zip(*pairs)
        widths = [end - start for start, end in pairs]
        timeline.barh(range(len(requests)), widths, left=starts, color=COLORS[what], label=what)
    timeline.invert_yaxis()
    timeline.set(title="Requests", xlabel="seconds", ylabel="request")
    timeline.legend(frameon=False, loc="lower left")
    first = [each.times[0] - each.arrival for each in requests]
    between = [b - a for each in requests for a, b in zip(each.times, each.times[1:])]
    for values, what, label in ((first, "reading", "the first token"), (between, "writing", "each further token")):
        ordered = sorted(1e3 * value for value in values)
        share = [(i + 1) / len(ordered) for i in range(len(ordered))]
        latency.step(ordered, share, where="post", color=COLORS[what], linewidth=2, label=label)
    latency.set(title="Latency", xlabel="at most so many milliseconds", ylabel="share of tokens", xscale="log")
    latency.grid(axis="y", color="#eeeeee")
    latency.legend(frameon=False, loc="upper left")
    for axes in (timeline, latency):
        axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def whole(least, multiple=1):
    """A parser for options that are integers: at least `least`, and a multiple of `multiple`."""

    def read(text):
        value = int(text)
        if value < least or value % multiple:
            factor = f"a multiple of {multiple}, and " if multiple > 1 else ""
            raise argparse.ArgumentTypeError(f"must be {factor}at least {least}, found {value}")
        return value

    read.__name__ = "int"  # what argparse calls it
    return read


def rate(text):
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be positive and finite, found {value}")
    return value


def device(text):
    kinds = [kind for kind in DTYPES if kind == "cpu" or torch.cuda.is_available()]
    if text.partition(":")[0] not in kinds:
        raise argparse.ArgumentTypeError(f"must be {' or '.join(kinds)}, found {text}")
    return torch.device(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add, count = parser.add_argument, whole(1)
    add("--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu")
    add("--dim", type=whole(HEAD_DIM, HEAD_DIM), default=128, help=f"width, a multiple of {HEAD_DIM} (default 128)")
    add("--layers", type=count, default=4, help="blocks (default %(default)s)")
    add("--context", type=count, default=128, help="bytes that attention sees (default %(default)s)")
    add("--steps", type=count, default=60, help="training steps (default %(default)s)")
    add("--requests", type=count, default=24, help="how many (default %(default)s)")
    add("--rate", type=rate, default=8.0, help="requests per second (default %(default)s)")
    add("--length", type=count, default=60, help="most bytes that one generates (default %(default)s)")
    add("--pages", type=count, default=96, help="of the pool (default %(default)s)")
    add("--page-size", type=count, default=16, help="tokens in a page (default %(default)s)")
    add("--budget", type=count, default=64, help="most tokens in a step (default %(default)s)")
    add("--seed", type=int, default=0)
    add("--float8", action="store_true", help="keep keys and values in float8, with scales of each head")
    add("--transformers", action="store_true", help="also serve the requests by transformers, all of them at once")
    add("--check", action="store_true", help="compare with each request served alone")
    add("--out", type=pathlib.Path, default=PLOT, help="the plot (default: demo/serving.png)")
    args = parser.parse_args()

    training, validation = python_sources()
    prefix = list(b'"""Tools for text files."""\n\nimport os\nimport re\nimport sys\n\n\n')
    requests = random_requests(validation, args.requests, args.length, args.rate, args.seed)
    if args.transformers:
        for request in requests:
            request.arrival, request.length = 0.0, args.length
    try:
        for request in requests:
            check_room(request, prefix, args.pages, args.page_size)
    except ValueError as error:
        parser.error(f"{error}: give more --pages, or less --length")

    torch.manual_seed(args.seed)
    model = TinyLM(args.dim, args.layers, args.context).to(args.device)
    train(model, training, args.steps, batch=16, seed=args.seed)
    server = Server(model, prefix, args.pages, args.page_size, args.budget, args.float8)
    serve(server, requests)
    report(server, requests)
    plot(requests, args.out)
    print(f"plot: {args.out}")
    if args.transformers:
        compare_with_transformers(args, training, [prefix + request.prompt for request in requests])
    if args.check:
        equal = sum(alone(model, prefix, each) == each.tokens for each in tqdm(requests, desc="each alone"))
        from_16_bits = ", with a cache that is not in float8" if args.float8 else ""
        print(f"{equal} of {len(requests)} requests have the tokens that they get alone{from_16_bits}")
    last = requests[-1]
    print(f"\nrequest {last.name}:\n{bytes(last.prompt + last.tokens).decode(errors='replace')}")


if __name__ == "__main__":
    main()
