"""Environments over HTTP: `server` serves one, `client` steps it like a local one, and `wire` has their messages."""
