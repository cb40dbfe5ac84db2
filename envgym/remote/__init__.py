"""Environments over HTTP: `server` offers one, `client` plays it as if it were local, `wire` is what they say."""
