# Tests that are not one gtest binary of a room.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
add_test(NAME check_layers COMMAND ${Python3_EXECUTABLE} ${CMAKE_SOURCE_DIR}/tools/check_layers.py)
