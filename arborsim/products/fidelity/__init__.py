"""Fidelity: how near a policy keeps the next token to full retention."""
