"""Checkpoints of all models: found, compared with the model, loaded piece by piece, divided over processes, saved.

key_map          how tensors of a checkpoint become ours and back, from one table for each family
decoder          loading and saving GPT and its relatives, in the format of any family
bert, vit        the same for BERT, in the format of transformers, and for ViT, in that of timm
arguments        the keyword arguments of from_pretrained and from_config, and which dtype they mean
reading          files piece by piece, under a bar; lists of names in errors
writing          a folder of weights and JSON files that replaces another only when it is complete
tensor_parallel  state dicts divided over processes, and put together again
tied_weights     models whose head has the weight of the embedding
"""
