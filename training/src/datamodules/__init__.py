"""Data of the training harness: language-model corpora and images."""
