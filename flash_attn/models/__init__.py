"""Language models: one decoder for GPT-2 and its relatives, and how checkpoints of each family become its weights.

    from flash_attn.models.gpt import GPTLMHeadModel

    model = GPTLMHeadModel.from_pretrained("path/of/a/checkpoint", dtype=torch.bfloat16, device="cuda")
    tokens = model.generate(input_ids, max_length=100, eos_token_id=2)
    model.save_pretrained("another/path")                   # which transformers loads

A family is two tables: which fields of its configuration become which of ours, and which tensors of its checkpoints
become which of ours. All run the same model, `flash_attn.models.gpt`.

| module     | model_type of transformers     | what is covered |
|------------|--------------------------------|---|
| `gpt`      | gpt2                           | all but cross attention; Megatron checkpoints of rotary models |
| `llama`    | llama, mistral, qwen2, gemma   | GQA, biases, sliding windows, Gemma's norms; Meta's checkpoints, too |
| `opt`      | opt                            | norms first or last, narrower embeddings (350M) |
| `gptj`     | gptj                           | |
| `gpt_neox` | gpt_neox                       | parallel and sequential residuals |
| `falcon`   | falcon                         | multi-query, the new decoder, one or two norms; without ALiBi |
| `bigcode`  | gpt_bigcode                    | multi-query, expanded to all heads when it is loaded |
| `btlm`     | btlm                           | with ALiBi or learned positions |
| `baichuan` | baichuan                       | 7B (rotary) and 13B (ALiBi), versions 1 and 2 |
| `phi`      | phi                            | Phi-1 and Phi-2 |

Rotary embeddings can be scaled as `linear`, `llama3` and `yarn` do it. What the model does not do is refused, by an
error that names the field: `dynamic` and `longrope` scaling, whose angles depend on the length of a sequence; a
`head_dim` other than hidden_size / num_attention_heads (Gemma 7B, small Qwen3); norms of queries and keys (Qwen3); soft
caps (Gemma 2); ALiBi of Falcon, which is scaled like the scores; cross attention; quantised weights. A field that no
table knows is reported by a warning.
"""
