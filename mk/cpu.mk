# The CPU kernels where `make test` cannot see them: under sanitizers, and as NEON code under an emulator.
.PHONY: test-neon test-sanitize

# apt install g++-aarch64-linux-gnu qemu-user; Debian keeps the emulated system's libraries in this folder.
ARM_CXX ?= aarch64-linux-gnu-g++
ARM_RUN ?= qemu-aarch64 -L /usr/aarch64-linux-gnu

# Every NEON object is compiled; the products run. This is all that the NEON code has seen: no Arm machine.
test-neon:
	@mkdir -p build/neon
	@echo "qwen-metal: compiling the NEON kernels"
	@for f in csrc/cpu/*_neon.cpp; do \
	  $(ARM_CXX) -std=c++20 -O2 -ffp-contract=fast -Icsrc -c $$f -o build/neon/$$(basename $$f .cpp).o || exit 1; done
	@$(ARM_CXX) -std=c++20 -O1 -DKERNELS=qmm_neon -Icsrc tests/neon/qmm.cpp build/neon/qmm_neon.o -o build/neon/qmm
	@$(ARM_RUN) build/neon/qmm

# The extension with address and undefined-behaviour checks, under the op tests; SANITIZE_TESTS picks them
# (CI runs a fixed sample). Python itself is not built so: its leaks are not ours.
SANITIZE_TESTS ?= tests/ops
SANITIZE_FLAGS := -fsanitize=address,undefined -fno-sanitize-recover=undefined -fno-omit-frame-pointer -O1

test-sanitize: .venv/.tests
	@mkdir -p build/sanitize
	@echo "qwen-metal: building the extension with sanitizers"
	@{ .venv/bin/cmake -S . -B build/sanitize/cmake -G Ninja -DCMAKE_MAKE_PROGRAM=$(CURDIR)/.venv/bin/ninja \
	    -DCMAKE_BUILD_TYPE=Debug -DPython_EXECUTABLE=$(CURDIR)/.venv/bin/python -DCMAKE_CXX_FLAGS="$(SANITIZE_FLAGS)" \
	    -DCMAKE_LIBRARY_OUTPUT_DIRECTORY=$(CURDIR)/build/sanitize/out \
	  && .venv/bin/ninja -C build/sanitize/cmake; } >build/sanitize.log 2>&1 \
	  || { tail -n 20 build/sanitize.log; exit 1; }
	@rm -rf build/sanitize/qwen_metal && cp -r src/qwen_metal build/sanitize/ \
	  && rm -f build/sanitize/qwen_metal/_ext*.so && cp build/sanitize/out/_ext*.so build/sanitize/qwen_metal/
	@echo "qwen-metal: testing $(SANITIZE_TESTS) under them"
	@LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libubsan.so)" \
	  ASAN_OPTIONS=detect_leaks=0 PYTHONPATH=build/sanitize .venv/bin/python -m pytest -q -m "not slow" $(SANITIZE_TESTS)
