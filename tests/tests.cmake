# Tests that are not one gtest binary of a room.

# Expected values are read by checkpoint, a room beside model.
fox_test(${CMAKE_SOURCE_DIR}/tests/golden_test.cpp model checkpoint)

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME check_layers COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/check_layers.py)

# The Python libraries whose formats are shared; skipped where requirements-test.txt is not installed.
find_program(FOX_TEST_PYTHON python3 HINTS ${CMAKE_SOURCE_DIR}/.venv/bin NO_CMAKE_SYSTEM_PATH)
add_test(NAME data_peers COMMAND ${FOX_TEST_PYTHON} ${CMAKE_SOURCE_DIR}/tests/data/peer_test.py $<TARGET_FILE:peer_test>)
set_tests_properties(data_peers PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 300)

# Fuzzers are run by hand, for minutes and with clang; `make test` has a seeded mutation test of the same code.
option(FOX_FUZZ "Build the libFuzzer targets (needs clang and its fuzzer runtime)" OFF)
if(FOX_FUZZ)
  add_executable(safetensors_fuzz ${CMAKE_SOURCE_DIR}/tests/fuzz/safetensors_fuzz.cpp
                 ${CMAKE_SOURCE_DIR}/src/checkpoint/safetensors_header.cpp)
  fox_compile_settings(safetensors_fuzz NONE)
  target_compile_options(safetensors_fuzz PRIVATE -fsanitize=fuzzer,address,undefined)
  target_link_options(safetensors_fuzz PRIVATE -fsanitize=fuzzer,address,undefined)
endif()

# The command itself, run as a user runs it.
fox_test(${CMAKE_SOURCE_DIR}/tests/cli/command_test.cpp base)
add_dependencies(command_test fox_cli)

# The same under torchrun, which comes with torch's Python side; skipped where that is not installed.
add_test(NAME torchrun COMMAND ${FOX_TEST_PYTHON} ${CMAKE_SOURCE_DIR}/tests/cli/torchrun_test.py $<TARGET_FILE:fox_cli>)
set_tests_properties(torchrun PROPERTIES SKIP_RETURN_CODE 77 TIMEOUT 600)
