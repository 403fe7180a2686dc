"""What tests of the plugins share."""

import importlib
import sys
import types

import pytest
import stand_in_vllm

import flash_attn_vllm


@pytest.fixture(scope="module")
def vllm():
    """The stand-in in sys.modules, whether or not there is a vLLM; yields its modules, and the backend over it."""
    with pytest.MonkeyPatch.context() as patch:
        made = stand_in_vllm.modules()
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            patch.delitem(sys.modules, name)
        for name, module in made.items():
            patch.setitem(sys.modules, name, module)
        patch.delitem(sys.modules, "flash_attn_vllm.backend", raising=False)
        patch.setattr(flash_attn_vllm, "_folders_with_cute", list)
        backend = importlib.import_module("flash_attn_vllm.backend")
        yield types.SimpleNamespace(
            backend=backend,
            envs=made["vllm.envs"],
            base=made["vllm.v1.attention.backend"],
            registry=made["vllm.v1.attention.backends.registry"],
        )
        del sys.modules["flash_attn_vllm.backend"]
