# The host executor's own proof: docs/HOST_EXECUTOR.md.
.PHONY: msl-selftest
msl-selftest: .venv/.tests
	@echo "qwen-metal: proving the host executor on MLX's own kernels"
	@PYTHONPATH=tests .venv/bin/python -m msl_host.selftest --json build/msl-selftest.json
