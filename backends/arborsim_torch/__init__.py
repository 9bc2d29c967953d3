"""arborsim's live backend: searches on real models through PyTorch and transformers.

Importing this package imports neither; `arborsim_torch.backend` does.
"""
