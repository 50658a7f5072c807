# A room is one folder of src/, compiled once to objects. Its tests link its objects and those of the rooms it depends
# on, nothing else: a room that leans on one above it does not link.
find_package(Threads REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(HWY REQUIRED IMPORTED_TARGET libhwy)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)
pkg_check_modules(ZSTD REQUIRED IMPORTED_TARGET libzstd)
pkg_check_modules(XXHASH REQUIRED IMPORTED_TARGET libxxhash)
find_library(BLOSC_LIBRARY blosc REQUIRED)
find_path(GLOO_INCLUDE_DIR gloo/context.h REQUIRED)  # headers only: dist/gloo.cpp
find_package(Protobuf REQUIRED)

set(FOX_THIRD_PARTY PkgConfig::HWY PkgConfig::PCRE2 PkgConfig::ZSTD PkgConfig::XXHASH ${BLOSC_LIBRARY} protobuf::libprotobuf-lite
    Threads::Threads ${CMAKE_DL_LIBS})

# {fmt} as a library, not header-only: that would compile it into every file, 3 s each. torch's include folder carries a
# newer {fmt} without its library, so ours is found first.
find_library(FMT_LIBRARY fmt REQUIRED)
find_path(FMT_INCLUDE_DIR fmt/format.h REQUIRED NO_CMAKE_SYSTEM_PATH PATHS /usr/local/include /usr/include)
set(FOX_FMT_INCLUDE ${CMAKE_BINARY_DIR}/include)
file(MAKE_DIRECTORY ${FOX_FMT_INCLUDE})
file(CREATE_LINK ${FMT_INCLUDE_DIR}/fmt ${FOX_FMT_INCLUDE}/fmt SYMBOLIC)
list(APPEND FOX_THIRD_PARTY ${FMT_LIBRARY})

# Headers that many files include are compiled once a kind of file: torch's cost 8 s to parse, and another 1.5 s a file
# for the templates in them that a compiler instantiates whether used or not. So who needs no torch gets none, and only
# operators get the dispatcher and autograd functions.
function(fox_precompiled_headers name)
  cmake_parse_arguments(H "TORCH;CALLER" "" "" ${ARGN})
  add_library(${name} OBJECT ${CMAKE_SOURCE_DIR}/cmake/pch.cpp)
  # One precompiled header serves libraries and executables only if all are compiled with the same -fPIC.
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_include_directories(${name} SYSTEM BEFORE PRIVATE ${FOX_FMT_INCLUDE})
  set(headers <fmt/format.h> ${H_UNPARSED_ARGUMENTS})
  if(H_TORCH)
    target_link_libraries(${name} PRIVATE torch_cpu)
    list(PREPEND headers <ATen/ATen.h> <ATen/core/grad_mode.h> <ATen/Parallel.h>)
  else()
    target_compile_options(${name} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  endif()
  target_precompile_headers(${name} PRIVATE ${headers})
  # The command line and the tests only call what is compiled elsewhere: optimizing them would double their build time.
  if(H_CALLER)
    target_compile_options(${name} PRIVATE ${FOX_CALLER_OPTIONS})
  endif()
  set(${name}_CALLER ${H_CALLER} PARENT_SCOPE)
  set(${name}_TORCH ${H_TORCH} PARENT_SCOPE)
endfunction()
set(FOX_CALLER_OPTIONS -O0 -DGTEST_HAS_PTHREAD=1)  # the latter as GoogleTest's own targets ask
fox_precompiled_headers(fox_pch TORCH)
fox_precompiled_headers(fox_ops_pch TORCH <torch/library.h> <torch/csrc/autograd/custom_function.h>)
fox_precompiled_headers(fox_caller_pch TORCH CALLER <gtest/gtest.h> <nlohmann/json.hpp>)
fox_precompiled_headers(fox_plain_caller_pch CALLER <gtest/gtest.h> <nlohmann/json.hpp> <filesystem> <fstream>
                        <functional> <memory> <optional> <random> <sstream> <thread>)

# What a target is compiled with; `headers`: the target whose precompiled headers it uses, or NONE.
function(fox_compile_settings target headers)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/src)
  target_include_directories(${target} SYSTEM BEFORE PRIVATE ${FOX_FMT_INCLUDE})
  if(${headers}_TORCH)
    target_link_libraries(${target} PRIVATE torch_cpu)
  else()
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
  endif()
  if(NOT headers STREQUAL NONE)
    set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-fPIC>)
    if(NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
      target_precompile_headers(${target} REUSE_FROM ${headers})
    endif()
  endif()
  if(${headers}_CALLER)
    target_compile_options(${target} PRIVATE ${FOX_CALLER_OPTIONS})
  endif()
endfunction()

# A file of a few lines costs seconds for the templates that it shares with its neighbours, so rooms whose files get on
# with each other (no two unnamed namespaces define the same) are compiled eight files at a time. Who changes one file
# over and over configures with -DFOX_TOGETHER=OFF.
option(FOX_TOGETHER "Compile the files of a room together: half the time for all of them, more for one" ON)

function(fox_together target)
  if(FOX_TOGETHER)
    set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
    # A file included by another is a header to GCC, where a type of an unnamed namespace would be one per includer.
    target_compile_options(${target} PRIVATE -Wno-subobject-linkage)
  endif()
endfunction()

# fox_room(NAME [TOGETHER] [HEADERS NONE|target] [DIR folder] [DEPS rooms…]): every .cpp below src/<folder> except
# *_cuda.cpp. HEADERS NONE: it sees no torch.
function(fox_room name)
  cmake_parse_arguments(R "TOGETHER" "DIR;HEADERS" "DEPS" ${ARGN})
  if(NOT R_DIR)
    set(R_DIR ${name})
  endif()
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${R_DIR}/*.cpp)
  list(FILTER sources EXCLUDE REGEX "_cuda\\.cpp$")
  if(NOT R_HEADERS)
    set(R_HEADERS fox_pch)
  endif()
  set(closure ${name})
  foreach(dep ${R_DEPS})
    list(APPEND closure ${FOX_CLOSURE_${dep}})
  endforeach()
  list(REMOVE_DUPLICATES closure)
  set(FOX_CLOSURE_${name} ${closure} PARENT_SCOPE)
  set(FOX_HEADERS_${name} ${R_HEADERS} PARENT_SCOPE)
  set(FOX_DIR_${name} ${R_DIR} PARENT_SCOPE)
  set(FOX_ROOMS ${FOX_ROOMS} ${name} PARENT_SCOPE)
  if(sources)
    add_library(room_${name} OBJECT ${sources})
    fox_compile_settings(room_${name} ${R_HEADERS})
    if(R_TOGETHER)
      fox_together(room_${name})
    endif()
  endif()
endfunction()

function(fox_objects out)
  set(objects)
  set(closure)
  foreach(room ${ARGN})
    list(APPEND closure ${FOX_CLOSURE_${room}})
  endforeach()
  list(REMOVE_DUPLICATES closure)
  foreach(room ${closure})
    if(TARGET room_${room})
      list(APPEND objects $<TARGET_OBJECTS:room_${room}>)
    endif()
  endforeach()
  set(${out} ${objects} PARENT_SCOPE)
endfunction()

# The library: all rooms but the command line.
function(fox_library name)
  cmake_parse_arguments(L "" "" "ROOMS" ${ARGN})
  fox_objects(objects ${L_ROOMS})
  add_library(${name} SHARED ${objects})
  target_link_libraries(${name} PRIVATE torch_cpu ${FOX_THIRD_PARTY})
  set_target_properties(${name} PROPERTIES INSTALL_RPATH "$ORIGIN;${FOX_TORCH_DIR}/lib" LINKER_LANGUAGE CXX)
  # What the command line, which is not optimized, has of std::string and other templates must not take the place of the
  # library's own.
  target_link_options(${name} PRIVATE -Wl,-Bsymbolic-functions)
endfunction()

function(fox_executable target)
  cmake_parse_arguments(E "TOGETHER" "OUTPUT;DIR" "" ${ARGN})
  file(GLOB_RECURSE sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/${E_DIR}/*.cpp)
  if(NOT sources)
    return()
  endif()
  add_executable(${target} ${sources})
  fox_compile_settings(${target} fox_caller_pch)
  if(E_TOGETHER)
    fox_together(${target})
  endif()
  # Operators register themselves when the library is loaded: keep it even if no symbol of it were named.
  target_link_libraries(${target} PRIVATE -Wl,--no-as-needed fox -Wl,--as-needed ${FMT_LIBRARY})
  set_target_properties(${target} PROPERTIES OUTPUT_NAME ${E_OUTPUT})
endfunction()

# fox_test(SOURCE rooms…): a gtest binary named after its file, and a ctest; it sees these rooms and the rooms below.
function(fox_test source)
  get_filename_component(name ${source} NAME_WE)
  fox_objects(objects ${ARGN})
  add_executable(${name} ${source} ${objects})
  # Whoever names torch's tensors gets its headers compiled, the others are spared them (2 s a file).
  file(STRINGS ${source} names_torch REGEX "at::|ATen" LIMIT_COUNT 1)
  if(names_torch)
    fox_compile_settings(${name} fox_caller_pch)
  else()
    fox_compile_settings(${name} fox_plain_caller_pch)
    foreach(room ${ARGN})
      if(NOT FOX_HEADERS_${room} STREQUAL NONE)
        target_link_libraries(${name} PRIVATE torch_cpu)
      endif()
    endforeach()
  endif()
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  target_compile_definitions(${name} PRIVATE FOX_SOURCE_DIR="${CMAKE_SOURCE_DIR}" FOX_BUILD_DIR="${CMAKE_BINARY_DIR}")
  target_link_libraries(${name} PRIVATE GTest::gtest_main ${FOX_THIRD_PARTY})
  # So that a CUDA backend it loads finds fox in it (cmake/cuda.cmake).
  set_target_properties(${name} PROPERTIES ENABLE_EXPORTS ON)
  # Tests run side by side on two cores: one thread each unless a test asks for more.
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES ENVIRONMENT "OMP_NUM_THREADS=1" TIMEOUT 600)
endfunction()

# Every tests/<folder>/*_test.cpp is a test of its room; tests/tests.cmake lists the others.
function(fox_tests)
  find_package(GTest REQUIRED)
  foreach(room ${FOX_ROOMS})
    file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/tests/${FOX_DIR_${room}}/*_test.cpp)
    foreach(source ${sources})
      fox_test(${source} ${room})
    endforeach()
  endforeach()
  include(${CMAKE_SOURCE_DIR}/tests/tests.cmake)
endfunction()
