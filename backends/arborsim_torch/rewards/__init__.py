"""Scores and embeddings of thoughts: verifiers, reward models, embedding models."""
