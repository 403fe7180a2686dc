"""What trainers ask of a model, as transformers, trl and peft know its names: embeddings, layers computed again in the
backward, and keyword arguments of `forward`.
"""

import contextlib
import difflib
import functools
import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from flash_attn._ops import checks, invariance
from flash_attn._ops.layers_in_force import layers_in_force
from flash_attn.utils.recompute import keep_attention

# ---------------------------------------------------------------------------------------------------------------------
# Layers computed again in the backward

_FLAGS = ("use_reentrant", "preserve_rng_state", "debug", "early_stop")
_OPTIONS = (*_FLAGS, "context_fn", "determinism_check")


class _Checkpointing(NamedTuple):
    options: dict[str, Any]  # of torch.utils.checkpoint.checkpoint
    every_n_layers: int = 1
    offload: bool = False
    keep_attention: bool = False


_USUAL = _Checkpointing({"use_reentrant": False})


class LayerStack(nn.Module):
    """A module with a list of layers, which it runs by `_run_layer`."""

    gradient_checkpointing: bool = False
    _checkpointing = _USUAL

    def _run_layer(
        self, index: int, layer: nn.Module, *args: Any, mixer_kwargs: dict[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        """layer(*args, mixer_kwargs=mixer_kwargs, **kwargs), where it is asked for computed again in the backward."""
        how = self._checkpointing
        if not (self.gradient_checkpointing and torch.is_grad_enabled() and index % how.every_n_layers == 0):
            return layer(*args, mixer_kwargs=mixer_kwargs, **kwargs)
        # With use_reentrant, only tensors among the arguments themselves get a gradient.
        given, level, count = mixer_kwargs or {}, invariance.level(), len(args)
        names = [name for name, value in given.items() if isinstance(value, Tensor)]
        others = {name: value for name, value in given.items() if name not in names}

        # It lives until the backward, and so does what it refers to: none of the inputs, which may be on the host.
        def run(*inputs):
            tensors = dict(zip(names, inputs[count:]))
            # Also where it runs again, in the backward, perhaps after the context of the forward has ended.
            with invariance.at_level(level), layers_in_force():
                return layer(*inputs[:count], mixer_kwargs=others | tensors, **kwargs)

        on_host = save_on_cpu(pin_memory=torch.accelerator.is_available()) if how.offload else contextlib.nullcontext()
        options = how.options
        if how.keep_attention and not torch.compiler.is_compiling():
            options = options | dict(context_fn=functools.partial(keep_attention, how.offload))
        with on_host:
            return checkpoint(run, *args, *(given[name] for name in names), **options)


# ---------------------------------------------------------------------------------------------------------------------
# Methods


class TrainerMethods(nn.Module):
    """The methods by which trainers know a model of transformers."""

    supports_gradient_checkpointing = True
    model_tags: list[str] | None = None
    _keys_to_ignore_on_save = None
    _require_grads_hook: Any = None
    _checkpointing_has_hook = False  # it is there only for layers that are computed again

    def _input_name(self) -> str:
        """The name of the module that embeds the input."""
        raise NotImplementedError

    def _output_name(self) -> str | None:
        """The name of the layer that gives logits of tokens, None if there is none."""
        return None

    def get_input_embeddings(self) -> nn.Module:
        """The module that embeds the input."""
        return self.get_submodule(self._input_name())

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the module that embeds the input. A head that was tied to it keeps its weight, and is no longer tied.

        value: the new module. With `enable_input_require_grads`, its output gets a gradient, too.
        """
        self._put(self._input_name(), value)
        if self._require_grads_hook is not None:
            self._hook_inputs()

    def get_output_embeddings(self) -> nn.Module | None:
        """The layer that gives logits of tokens, None if there is none."""
        name = self._output_name()
        return None if name is None else self.get_submodule(name)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the layer that gives logits of tokens, which is then not tied to the embeddings.

        new_embeddings: the new layer. Raises ValueError for a model without one.
        """
        name = self._output_name()
        if name is None:
            raise ValueError(f"{type(self).__name__} has no output layer to replace")
        self._put(name, new_embeddings)

    def _put(self, name, module):
        owner, _, leaf = name.rpartition(".")
        setattr(self.get_submodule(owner), leaf, module)

    @property
    def device(self) -> torch.device:
        """That of the first parameter."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """That of the first parameter of floating point numbers."""
        return next(each.dtype for each in self.parameters() if each.is_floating_point())

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether layers are computed again in the backward."""
        return any(each.gradient_checkpointing for each in self._stacks())

    def _stacks(self):
        return [module for module in self.modules() if isinstance(module, LayerStack)]

    def gradient_checkpointing_enable(
        self,
        gradient_checkpointing_kwargs: dict[str, Any] | None = None,
        *,
        every_n_layers: int = 1,
        offload: bool = False,
        keep_attention: bool = False,
    ) -> None:
        """Compute each layer again in the backward instead of saving its activations, with the same dropout.

        Arguments:
            gradient_checkpointing_kwargs: of `torch.utils.checkpoint.checkpoint`: use_reentrant, which is False if it
                is not given, preserve_rng_state, context_fn, determinism_check, debug and early_stop.
            every_n_layers: only every n-th layer, from the first.
            offload: keep the inputs of these layers in the memory of the host.
            keep_attention: keep the results of attention, too (with offload in the memory of the host), and do not
                compute it again, as `flash_attn.utils.recompute.keep_attention` does. Not with use_reentrant or
                context_fn. Graphs of torch.compile compute it again.

        With use_reentrant, the output of the embedding gets a gradient even if the embedding is frozen, as under an
        adapter: without it there would be no gradients at all.

        Raises TypeError for another type or name, ValueError for a number that is not positive.
        """
        given = {} if gradient_checkpointing_kwargs is None else gradient_checkpointing_kwargs
        if not isinstance(given, dict):
            raise TypeError(
                "gradient_checkpointing_kwargs must be a dict or None, found "
                f"{given!r}: gradient_checkpointing_disable() turns it off"
            )
        for name in given:
            if name not in _OPTIONS:
                raise TypeError(f"gradient_checkpointing_kwargs must have names of {_OPTIONS}, found {name!r}")
            if name in _FLAGS:
                checks.flag(f"gradient_checkpointing_kwargs[{name!r}]", given[name])
        checks.integer("every_n_layers", every_n_layers)
        checks.number("every_n_layers", every_n_layers, every_n_layers > 0, "positive")
        checks.flags(offload=offload, keep_attention=keep_attention)
        if keep_attention and (given.get("use_reentrant") or given.get("context_fn") is not None):
            raise ValueError("keep_attention must be False with use_reentrant or context_fn, found True")
        how = _Checkpointing(_USUAL.options | given, every_n_layers, offload, keep_attention)
        for stack in self._stacks():
            stack.gradient_checkpointing, stack._checkpointing = True, how
        if not how.options["use_reentrant"]:
            self._remove_hook_of_checkpointing()
        elif self._require_grads_hook is None:
            self.enable_input_require_grads()
            self._checkpointing_has_hook = True
        else:  # which may be on an embedding that has been replaced
            self._hook_inputs()

    def gradient_checkpointing_disable(self) -> None:
        """Save the activations of all layers for the backward, as without `gradient_checkpointing_enable`.

        What that did to the output of the embedding, it undoes.
        """
        for stack in self._stacks():
            stack.gradient_checkpointing, stack._checkpointing = False, _USUAL
        self._remove_hook_of_checkpointing()

    def _remove_hook_of_checkpointing(self):
        if self._checkpointing_has_hook:
            self.disable_input_require_grads()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """`gradient_checkpointing_enable` under its newer name in transformers, with the same arguments.

        activation_checkpointing_kwargs: its gradient_checkpointing_kwargs. every_n_layers, offload: as there.
        """
        self.gradient_checkpointing_enable(
            activation_checkpointing_kwargs, every_n_layers=every_n_layers, offload=offload
        )

    def activation_checkpointing_disable(self) -> None:
        """`gradient_checkpointing_disable` under its newer name in transformers."""
        self.gradient_checkpointing_disable()

    @property
    def is_activation_checkpointing(self) -> bool:
        """`is_gradient_checkpointing` under its newer name in transformers."""
        return self.is_gradient_checkpointing

    def enable_input_require_grads(self) -> None:
        """Give the output of the embedding a gradient, even where the embedding is frozen."""
        self._hook_inputs()
        self._checkpointing_has_hook = False

    def _hook_inputs(self):
        """Let the present embedding, and no other, have the hook."""
        if self._require_grads_hook is not None:
            self._require_grads_hook.remove()
        self._require_grads_hook = self.get_input_embeddings().register_forward_hook(_require_grad)

    def disable_input_require_grads(self) -> None:
        """Undo `enable_input_require_grads`."""
        if self._require_grads_hook is not None:
            self._require_grads_hook.remove()
            self._require_grads_hook = None
        self._checkpointing_has_hook = False

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Add to `model_tags`, which peft writes to the card of an adapter.

        tags: one or several.
        """
        given = [tags] if isinstance(tags, str) else tags
        self.model_tags = list(dict.fromkeys([*(self.model_tags or []), *given]))


def _require_grad(module, args, output):
    """A forward hook."""
    return output.requires_grad_(True)


# ---------------------------------------------------------------------------------------------------------------------
# Arguments of forward

_OFF: tuple[Any, ...] = (None, False)
# Arguments of transformers' models: the values that ask for nothing, and what to do instead of giving another.
_INSTEAD: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_cache": (_OFF, "generate keeps a cache, and so does a forward with inference_params"),
    "past_key_values": ((None,), "give inference_params, or call generate"),
    "cache_position": ((None,), "give position_ids"),
    "output_attentions": (_OFF, "attention weights are never held in memory"),
    "output_hidden_states": (_OFF, "register a forward hook on each layer"),
    "token_type_ids": ((None,), "leave them out, as by tokenizer(..., return_token_type_ids=False)"),
    "logits_to_keep": ((None, 0), "give num_last_tokens"),
    "encoder_hidden_states": ((None,), "there is no cross attention"),
    "encoder_attention_mask": ((None,), "there is no cross attention"),
    "head_mask": ((None,), "no head can be left out"),
}
_OF_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
_INSTEAD |= dict.fromkeys(_OF_PACKED, ((None,), "give cu_seqlens, and max_seqlen"))
_OF_ENCODERS = {
    "use_cache": (_OFF, "an encoder has no cache"),
    "past_key_values": ((None,), "an encoder has no cache"),
    **dict.fromkeys(_OF_PACKED, ((None,), "give each sequence a row of its own, with padding")),
}


def check_options(model: nn.Module, options: dict[str, Any], is_encoder: bool = False) -> None:
    """Check keyword arguments that a forward does not have: what transformers' models take may only ask for nothing.

    Raises ValueError for an argument of transformers that asks for something, and says what to do instead; TypeError
    for any other name, with similar ones.
    """
    instead = _INSTEAD | (_OF_ENCODERS if is_encoder else {})
    for name, value in options.items():
        if name not in instead:
            names = [*inspect.signature(type(model).forward).parameters, *instead]
            near = ", ".join(difflib.get_close_matches(name, names)) or "none"
            raise TypeError(
                f"keyword arguments must be those of {type(model).__name__}.forward, found {name!r}; names like it: "
                f"{near}"
            )
        allowed, hint = instead[name]
        if not any(value is each or (type(value) is int and value == each) for each in allowed):
            found = f"a {type(value).__name__}" if isinstance(value, (Tensor, tuple, list, dict)) else repr(value)
            raise ValueError(f"{name} must be {' or '.join(map(repr, allowed))}, found {found}: {hint}")


def as_asked(output: Any, return_dict: bool | None) -> Any:
    """`output`, a ModelOutput; with return_dict=False a plain tuple of what is in it, as from transformers' models."""
    if return_dict is not None:
        checks.flag("return_dict", return_dict, "a bool or None")
    return tuple(output) if return_dict is False else output


def tokens_of(input_ids: Tensor | None, inputs_embeds: Tensor | None, layout: str = "(batch, seqlen)") -> Tensor:
    """A tensor with the shape and the device of the tokens of the input, which one of the two must be.

    layout: the dimensions that input_ids must have.
    """
    if (input_ids is None) == (inputs_embeds is None):
        found = "neither" if input_ids is None else "both"
        raise ValueError(f"one of input_ids and inputs_embeds must be given, found {found}")
    if input_ids is not None:
        checks.tensor("input_ids", input_ids)
        checks.ndim("input_ids", input_ids, layout)
        return input_ids
    assert inputs_embeds is not None
    checks.tensor("inputs_embeds", inputs_embeds)
    checks.ndim("inputs_embeds", inputs_embeds, layout.replace(")", ", features)"))
    if not inputs_embeds.is_floating_point():
        raise TypeError(f"inputs_embeds must be of a floating point dtype, found {inputs_embeds.dtype}: give input_ids")
    return inputs_embeds[..., 0]


def divided_by_items(loss_sum: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    """The part that a batch has in the mean over num_items_in_batch labels of several batches."""
    return loss_sum / _items_beside(loss_sum, num_items_in_batch)


def weights_of_items(labels: Tensor, num_items_in_batch: Tensor | int) -> Tensor:
    """What each label weighs in that mean: a loss with these weights gets a gradient of 1, and none to be scaled by."""
    return (labels.new_ones((), dtype=torch.float32) / _items_beside(labels, num_items_in_batch)).expand(labels.shape)


def _items_beside(x: Tensor, num_items_in_batch: Tensor | int) -> Tensor | int:
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(x.device)
    checks.real("num_items_in_batch", num_items_in_batch)
    return num_items_in_batch
