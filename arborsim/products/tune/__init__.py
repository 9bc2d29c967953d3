"""Settings of a policy, searched by trials."""
