# The commit is read when CMake configures; `make build` configures each time, so it is that of the sources built.
find_package(Git QUIET)
set(FOX_COMMIT "unknown")
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} -C ${CMAKE_SOURCE_DIR} rev-parse --show-toplevel
                  OUTPUT_VARIABLE _top OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # Sources unpacked inside somebody else's repository are not at that repository's commit.
  file(REAL_PATH "${CMAKE_SOURCE_DIR}" _source)
  if(_top STREQUAL _source)
    execute_process(COMMAND ${GIT_EXECUTABLE} -C ${CMAKE_SOURCE_DIR} describe --always --dirty --abbrev=40 --match=
                    OUTPUT_VARIABLE _commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _result)
    if(_result EQUAL 0)
      set(FOX_COMMIT "${_commit}")
    endif()
  endif()
endif()
set_source_files_properties(${CMAKE_SOURCE_DIR}/src/base/version.cpp PROPERTIES COMPILE_DEFINITIONS
  "FOX_VERSION=\"${PROJECT_VERSION}\";FOX_COMMIT=\"${FOX_COMMIT}\"")
