"""The learners that ship with envgym. Import them as `envgym.learners`."""

if __name__ != "envgym.learners":
    raise ImportError("import envgym.learners, not learners: a second copy of every class is not the registered one")
