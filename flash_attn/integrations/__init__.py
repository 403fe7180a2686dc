"""Integrations of this library's attention into others: one module for each, with a function `register`.

    from flash_attn.integrations import transformers
    transformers.register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="fused_attention")

Importing a module here imports nothing of the library that it is for; `register` does.
"""
