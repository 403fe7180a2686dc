"""Language models: one decoder for GPT-2 and its relatives, with the checkpoints of transformers. BERT and ViT.

    from flash_attn.models.gpt import GPTLMHeadModel

    model = GPTLMHeadModel.from_pretrained("path/of/a/checkpoint", dtype=torch.bfloat16, device="cuda")
    tokens = model.eval().generate(input_ids, max_length=100, eos_token_id=2)
    model.save_pretrained("another/path")                   # transformers loads it, too

A family of models is described by two tables: one maps the fields of its configuration to those of our GPT2Config, the
other the tensors of its checkpoints to those of our model. All run the same model, `flash_attn.models.gpt`.
docs/guides/models.md has the same table, and what to set for speed.

| module       | model_type of transformers  | what is covered |
|--------------|-----------------------------|---|
| `gpt`        | gpt2                        | all except cross attention; also Megatron's, with rotary embeddings |
| `llama`      | llama, mistral, qwen2, qwen3, gemma, granite, smollm3, ministral, seed_oss | all; Meta's own files |
| `gemma2`     | gemma2, gemma3_text         | text: norms on both sides, soft caps, two rotary bases |
| `olmo2`      | olmo2, olmo3, exaone4       | norms of outputs, queries and keys; OLMo on one GPU |
| `cohere`     | cohere, cohere2             | all except norms of queries and keys (Command R+) |
| `stablelm`   | stablelm                    | all except norms of queries and keys (12B) |
| `phi3`       | phi3                        | Phi-3 to Phi-4, their long versions too; text |
| `phi`        | phi                         | Phi-1 and Phi-2 |
| `starcoder2` | starcoder2                  | all |
| `opt`        | opt                         | norms before or after each part, narrower embeddings (350M) |
| `gptj`       | gptj                        | all |
| `gpt_neox`   | gpt_neox                    | parallel and sequential residuals |
| `falcon`     | falcon                      | multi-query, the new decoder, one or two norms, rotary or ALiBi |
| `bigcode`    | gpt_bigcode                 | multi-query, expanded to all heads when it is loaded |
| `btlm`       | btlm                        | ALiBi or learned positions |
| `baichuan`   | baichuan                    | 7B (rotary) and 13B (ALiBi), versions 1 and 2 |

Rotary embeddings can be scaled as `linear`, `dynamic`, `llama3`, `yarn` and `longrope` do it. The angles of `dynamic`
and `longrope` depend on the length of a sequence: here on that of the longest row of a batch, or, when sequences are
continued, on the length that they may reach; transformers changes the angles on the way. What the model does not
support is refused, with an error that names the field of the configuration, or the model_type: mixtures of experts;
cross attention; images; quantised weights; norms of queries and keys that are LayerNorms. ALiBi is exact, while
transformers rounds Falcon's to bfloat16. A field that the library does not know gives a warning.
"""

from flash_attn import _removed

__getattr__ = _removed.getattr_of(__name__, {})
