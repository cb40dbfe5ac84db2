"""Where NeMo-Gym sets a limit of wandb's."""

VALUE_BYTES_LIMIT = 0
