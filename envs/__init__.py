"""The envs that ship with envgym. Import them as `envgym.envs`."""

if __name__ != "envgym.envs":
    raise ImportError("write import envgym.envs: import envs makes a second, unregistered copy of every class")
