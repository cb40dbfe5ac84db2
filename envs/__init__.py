"""The envs that ship with envgym. Import them as `envgym.envs`."""

if __name__ != "envgym.envs":
    raise ImportError("import envgym.envs, not envs: a second copy of every class would not be the registered one")
