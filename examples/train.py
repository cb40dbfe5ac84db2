"""Training from Python, as `envgym train --env math_verify` does it, and the result of the run."""

import envgym

result = envgym.train({"env": "math_verify", "steps": 60, "seed": 0})
print(f"held-out score {result.initial_score:.3f} -> {result.score:.3f}, 95% interval {result.interval}")
