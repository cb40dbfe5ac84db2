"""Training from Python, as `envgym train --env math_verify` does it, and the summary of the run."""

import envgym

summary = envgym.train({"env": "math_verify", "steps": 60, "seed": 0})
initial, final = summary["eval"]["before"], summary["eval"]["after"]
print(f"held-out score {initial['score']:.3f} -> {final['score']:.3f}, 95% interval {final['ci95']}")
