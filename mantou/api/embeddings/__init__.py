"""Embeddings, rerank and score."""
