# Tests that are not one gtest binary of a room.
