"""Published methods.  ``methods.toml`` has what is said of them."""
