"""What scores and embeds the thoughts of a search: verifiers, reward models, embedding models."""
