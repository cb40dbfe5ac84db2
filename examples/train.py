"""The main job from Python: what `envgym train --env math_verify` does, and the summary it leaves."""

import envgym

summary = envgym.train({"env": "math_verify", "steps": 60, "seed": 0})
before, after = summary["eval"]["before"], summary["eval"]["after"]
print(f"held-out score {before['score']:.3f} -> {after['score']:.3f}, 95% interval {after['ci95']}")
