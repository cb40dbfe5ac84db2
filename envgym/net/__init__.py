"""HTTP: the client with its retry policy, and the building blocks of every server."""
