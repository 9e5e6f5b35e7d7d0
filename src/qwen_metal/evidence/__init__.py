"""Evidence that a user can run again: measurements, each against stock mlx-lm."""
