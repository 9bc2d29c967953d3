"""Policies, models, GPUs and the installation, listed."""
