"""Datasets over prepared data, and what is done to text before it is tokenised."""
