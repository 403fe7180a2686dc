"""Our models in EleutherAI's lm-evaluation-harness (pip install lm_eval), with all options of its own command:

    python -m src.evaluation.lm_harness run --model flash_attn --model_args checkpoint=CHECKPOINT --tasks lambada_openai

--model_args are the arguments of `FlashAttnLM`, such as checkpoint=PATH,batch_size=32,dtype=float32. Tasks of your own
need no network: --include_path FOLDER --tasks NAME, with a .yaml file in FOLDER that describes the task.
In Python: `lm_eval.simple_evaluate(FlashAttnLM(model=model, tokenizer=tokenizer), tasks=[...])`.
"""

import torch

from src.evaluation.batched import continue_prompts, score_continuations
from src.evaluation.loading import longest_input, open_model, text_ids

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError("the lm-evaluation-harness is not installed: pip install lm_eval") from error


@register_model("flash_attn")
class FlashAttnLM(TemplateLM):
    """A `GPTLMHeadModel` as the harness takes models.

    Arguments:
        checkpoint: a training checkpoint, or a folder of `save_pretrained`.
        model, tokenizer: instead of a checkpoint, what `open_model` returns; or tokenizer is the name of another one.
        max_length: how many tokens the model reads; by default its positions, or 2048 if it has no learned ones.
            Contexts that are too long lose their beginning.
        batch_size: sequences at a time.
        max_gen_toks: how many tokens a task gets that does not say.
        device, dtype: as in `open_model`.
    """

    def __init__(
        self,
        checkpoint=None,
        tokenizer=None,
        model=None,
        max_length=None,
        batch_size=8,
        max_gen_toks=256,
        device=None,
        dtype=None,
        max_batch_size=None,  # the harness gives it to every model; it is for automatic sizes
    ) -> None:
        super().__init__()
        if (checkpoint is None) == (model is None):
            raise ValueError("either checkpoint or model must be given")
        if str(device).startswith("cuda") and not torch.cuda.is_available():
            device = None  # the harness asks for a GPU unless it is told otherwise
        if model is None:
            model, tokenizer = open_model(checkpoint, tokenizer, device, dtype)
        self.model, self.tokenizer = model.eval(), tokenizer
        self._device = next(model.parameters()).device
        self.max_length = int(max_length or longest_input(model) or 2048)
        if not str(batch_size).isdecimal():
            raise ValueError(f"batch_size must be a number, found {batch_size!r}")
        self.batch_size = int(batch_size)
        self.max_gen_toks = int(max_gen_toks)

    @property
    def eot_token_id(self) -> int:
        return self.tokenizer.eos_token_id

    @property
    def tokenizer_name(self) -> str:
        return str(getattr(self.tokenizer, "name_or_path", type(self.tokenizer).__name__)).replace("/", "__")

    def tok_encode(self, string, add_special_tokens=None, **kwargs):
        return text_ids(self.tokenizer, string)

    def _loglikelihood_tokens(self, requests, disable_tqdm=False, **kwargs):
        pairs = [(context, continuation) for _, context, continuation in requests]
        scores = score_continuations(self.model, pairs, self.max_length, self.batch_size, not disable_tqdm)
        for (texts, _, _), score in zip(requests, scores):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, score)
        return scores

    def loglikelihood_rolling(self, requests, disable_tqdm=False):
        """log P(text) of each request, from windows that do not overlap, except the last, which is a full one."""
        windows, owners = [], []
        for i, request in enumerate(requests):
            rolling = utils.get_rolling_token_windows(
                self.tok_encode(request.args[0]), self.prefix_token_id, max_seq_len=self.max_length, context_len=1
            )
            for context, continuation in map(utils.make_disjoint_window, rolling):
                windows.append((None, context, continuation))
                owners.append(i)
        totals = [0.0] * len(requests)
        for i, (score, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm)):
            totals[i] += score
        for request, total in zip(requests, totals):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests, disable_tqdm=False):
        """What the model writes after each context, up to the first of the task's stop strings."""
        groups: dict[str, list[int]] = {}  # requests with equal options run together
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        texts = [""] * len(requests)
        for members in groups.values():
            options = normalize_gen_kwargs(requests[members[0]].args[1], self.max_gen_toks)
            contexts = [requests[i].args[0] for i in members]
            for i, text in zip(members, self._continue(contexts, options, not disable_tqdm)):
                texts[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return texts

    def _continue(self, contexts, options, progress):
        options = dict(options)
        until = handle_stop_sequences(options.pop("until", None), eos=None)
        max_new_tokens = options.pop("max_gen_toks")
        room = self.max_length - max_new_tokens
        if room < 1:
            raise ValueError(
                f"max_gen_toks must be less than the {self.max_length} tokens that the model reads, "
                f"found {max_new_tokens}"
            )
        prompts = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]

        def stopped(ids):
            text = self.tokenizer.decode(ids)
            return any(stop and stop in text for stop in until)

        written = continue_prompts(
            self.model,
            prompts,
            max_new_tokens,
            self.batch_size,
            self.eot_token_id,
            stopped,
            progress,
            **_sampling(options),
        )
        return [postprocess_generated_text(self.tokenizer.decode(ids), until, None) for ids in written]


def _sampling(options):
    """The harness's options as those of our `generate`."""
    do_sample, temperature = options.pop("do_sample"), options.pop("temperature", 0.0)
    given = {name: options.pop(name) for name in ("top_k", "top_p", "repetition_penalty") if name in options}
    if do_sample and temperature > 0:
        sampling = dict(top_k=0, temperature=temperature) | given
    else:
        sampling = given | dict(top_k=1)
    if options:
        raise ValueError(f"generation options that are not known: {', '.join(sorted(options))}")
    return sampling


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
