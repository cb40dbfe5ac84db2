"""The agents that ship with envgym. Import them as `envgym.agents`."""

if __name__ != "envgym.agents":
    raise ImportError("write import envgym.agents: import agents makes a second, unregistered copy of every class")
