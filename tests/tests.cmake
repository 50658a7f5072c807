# Tests that are not one gtest binary of a room.

# Expected values are read by checkpoint, a room beside model.
fox_test(${CMAKE_SOURCE_DIR}/tests/golden_test.cpp model checkpoint)

find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME check_layers COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/check_layers.py)
