# make demo    train and compare three small models on the King James Bible, write runs/demo/report.html
# make compare the nine systems at equal size on the same text (some tens of minutes): runs/demo/compare.html
# make build   leaves build/fox (and build/libfox.so; with nvcc also build/libfox_cuda.so)
# make test    everything that `make build` does, then all tests
# make lint    formatting, layers, clang-tidy
#
# Another libtorch: make build TORCH_DIR=/path/to/torch (holds include/ and lib/). Another build folder: BUILD=dir.

BUILD ?= build
TORCH_DIR ?=
JOBS ?= $(shell nproc)
CMAKE = PATH="$(CURDIR)/.venv/bin:$$PATH" cmake
CONFIGURE = $(CMAKE) -S . -B $(BUILD) -G Ninja $(if $(TORCH_DIR),-DFOX_TORCH_DIR=$(TORCH_DIR))
# clang-tidy cannot read GCC's precompiled headers.
CONFIGURE_LINT = $(CMAKE) -S . -B $(BUILD)-lint -G Ninja $(if $(TORCH_DIR),-DFOX_TORCH_DIR=$(TORCH_DIR)) \
  -DFOX_CUDA=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON

.PHONY: build test lint demo compare setup clean

build: setup
	@$(CONFIGURE)
	@$(CMAKE) --build $(BUILD) --target product

setup:
	@tools/setup.sh

test:
	@tools/setup.sh --test
	@$(CONFIGURE)
	@$(CMAKE) --build $(BUILD)
	@PATH="$(CURDIR)/.venv/bin:$$PATH" ctest --test-dir $(BUILD) -j$(JOBS) --output-on-failure

lint:
	@FOX_EXTRA_PACKAGES="clang-format clang-tidy" tools/setup.sh
	@$(CONFIGURE_LINT)
	@tools/lint.sh $(BUILD)-lint

demo: setup
	@$(CONFIGURE)
	@$(CMAKE) --build $(BUILD) --target fox_cli
	@tools/demo.sh $(BUILD)/fox

compare: setup
	@$(CONFIGURE)
	@$(CMAKE) --build $(BUILD) --target fox_cli
	@tools/demo.sh $(BUILD)/fox compare

clean:
	rm -rf $(BUILD)
