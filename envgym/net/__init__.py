"""Wires: the one client with the one policy for further tries, and the kit that every server is made of."""
