# libtorch: headers and libraries of an installed torch wheel (or an unpacked libtorch folder).
# torch's own CMake package insists on a CUDA toolkit because the wheel is a CUDA build, so the two libraries that
# the CPU side needs are linked directly. Another libtorch: -DFOX_TORCH_DIR=/path/to/torch (holds include/ and lib/).
set(FOX_TORCH_DIR "" CACHE PATH "Folder of libtorch, with include/ and lib/ (default: torch of .venv)")
if(NOT FOX_TORCH_DIR)
  file(GLOB _torch "${CMAKE_SOURCE_DIR}/.venv/lib/python3*/site-packages/torch")
  list(LENGTH _torch _n)
  if(_n EQUAL 0)
    message(FATAL_ERROR "no libtorch: run tools/setup.sh, or name one with -DFOX_TORCH_DIR=DIR")
  endif()
  list(GET _torch 0 _torch)
  set(FOX_TORCH_DIR "${_torch}" CACHE PATH "" FORCE)
endif()
foreach(_need include/ATen/ATen.h lib/libtorch_cpu.so lib/libc10.so)
  if(NOT EXISTS "${FOX_TORCH_DIR}/${_need}")
    message(FATAL_ERROR "FOX_TORCH_DIR=${FOX_TORCH_DIR} has no ${_need}")
  endif()
endforeach()

add_library(torch_cpu INTERFACE)
target_include_directories(torch_cpu SYSTEM INTERFACE
  "${FOX_TORCH_DIR}/include" "${FOX_TORCH_DIR}/include/torch/csrc/api/include")
target_link_libraries(torch_cpu INTERFACE "${FOX_TORCH_DIR}/lib/libtorch_cpu.so" "${FOX_TORCH_DIR}/lib/libc10.so")
# The small CUDA runtime libraries that libtorch_cpu names are found through its own RPATH when it runs, not when we link.
target_link_options(torch_cpu INTERFACE -Wl,--allow-shlib-undefined "-Wl,-rpath,${FOX_TORCH_DIR}/lib")
# One libgomp: the wheel ships its own copy under the usual soname and the rpath makes ours resolve to it, so ATen's
# threads and the kernels' are one pool. (The compiler's -fopenmp at link time would name a second one.)
target_compile_options(torch_cpu INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fopenmp>)
if(EXISTS "${FOX_TORCH_DIR}/lib/libgomp.so.1")
  set(FOX_GOMP "${FOX_TORCH_DIR}/lib/libgomp.so.1")
else()
  set(FOX_GOMP gomp)
endif()
target_link_libraries(torch_cpu INTERFACE ${FOX_GOMP})
