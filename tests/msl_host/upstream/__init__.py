"""MLX's and mlx-lm's own kernels on the host executor: what proves the executor right."""
