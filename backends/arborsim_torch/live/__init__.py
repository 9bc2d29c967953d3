"""Searches on a live model under cache policies: the same controller and policies as a replay."""
