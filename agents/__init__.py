"""The agents that ship with envgym. Import them as `envgym.agents`."""

if __name__ != "envgym.agents":
    raise ImportError("import envgym.agents, not agents: a second copy of every class would not be the registered one")
