# reward_func_code_gen.py
import torch
import subprocess
import tempfile
import os

def reward_func(queries, prompts, labels):
    """Reward based on code execution and test passing."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        # Extract generated code (after prompt)
        generated_code = query.split(prompt)[-1].strip()
        try:
            # Write code to temporary file
            with tempfile.NamedTemporaryFile(mode='w', suffix='.py', delete=False) as f:
                f.write(generated_code)
                temp_file = f.name
            # Execute code and run tests
            result = subprocess.run(
                ["python", "-m", "pytest", temp_file],
                capture_output=True,
                text=True,
                timeout=5
            )
            # Reward based on test results
            if "passed" in result.stdout:
                rewards.append(1.0) # All tests passed
            elif "failed" in result.stdout:
                rewards.append(0.3) # Some tests failed
            else:
                rewards.append(0.0) # No tests passed
        except subprocess.TimeoutExpired:
            rewards.append(-0.5) # Code execution timeout
        except Exception as e:
            rewards.append(-1.0) # Syntax error or crash
        finally:
            if os.path.exists(temp_file):
                os.remove(temp_file)
    rewards_tensor = torch.tensor(rewards).float()
    return {
        "rewards": rewards_tensor,
        "scores": (rewards_tensor + 1.0) / 2.0, # Normalize to [0, 1]
        "extra_logs": {
            "code_correctness": rewards_tensor,
            "avg_correctness": rewards_tensor.mean()
        }
    }
