# The CUDA backend is a library of its own, libfox_cuda.so, that `fox` loads when a CUDA device is asked for: the
# command starts fast on a laptop, and a machine without nvcc builds everything else.
find_program(FOX_NVCC nvcc HINTS /usr/local/cuda/bin)
if(FOX_NVCC)
  option(FOX_CUDA "Build the CUDA backend" ON)
else()
  option(FOX_CUDA "Build the CUDA backend" OFF)
endif()

# fox_cuda_backend(): kernels (no torch) and the operators' CUDA sides (*_cuda.cpp) as libfox_cuda.so.
# Defined as a macro so that the CUDA language is enabled in the caller's scope.
macro(fox_cuda_backend)
  set(CMAKE_CUDA_COMPILER ${FOX_NVCC})
  set(CMAKE_CUDA_ARCHITECTURES OFF)  # set where the files are
  enable_language(CUDA)
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3")
  find_package(CUDAToolkit REQUIRED)

  # WGMMA and the copy engine exist from Hopper on and are built for it (90a); everything else runs on SM80 and later,
  # the newest from the PTX of SM90.
  file(GLOB _kernels CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/kernels/cuda/*.cu)
  set(_hopper ${_kernels})
  list(FILTER _hopper INCLUDE REGEX "_sm90[^/]*$")
  list(FILTER _kernels EXCLUDE REGEX "_sm90[^/]*$")
  add_library(room_kernels_cuda OBJECT ${_kernels})
  set_target_properties(room_kernels_cuda PROPERTIES CUDA_ARCHITECTURES "80-real;90")
  add_library(room_kernels_cuda_sm90 OBJECT ${_hopper})
  set_target_properties(room_kernels_cuda_sm90 PROPERTIES CUDA_ARCHITECTURES 90a)
  foreach(_room room_kernels_cuda room_kernels_cuda_sm90)
    target_include_directories(${_room} PRIVATE ${CMAKE_SOURCE_DIR}/src)
  endforeach()

  file(GLOB _ops CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/*/*_cuda.cpp)
  add_library(fox_cuda SHARED ${_ops} $<TARGET_OBJECTS:room_kernels_cuda> $<TARGET_OBJECTS:room_kernels_cuda_sm90>)
  fox_compile_settings(fox_cuda fox_ops_pch)
  # What it needs of fox itself it finds in the program that loads it, libfox.so or a test: linked to libfox.so it would
  # bring a second copy of every operator into a test, which is linked with the objects.
  #
  # libtorch_cuda registers ATen's CUDA side when it is loaded; nothing here names a symbol of it, so ask for it by name.
  target_link_libraries(fox_cuda PRIVATE ${FMT_LIBRARY} "${FOX_TORCH_DIR}/lib/libc10_cuda.so"
    -Wl,--no-as-needed "${FOX_TORCH_DIR}/lib/libtorch_cuda.so" -Wl,--as-needed)
  # The collectives between GPUs (dist/nccl_cuda.cpp) are compiled in libtorch_cuda; NCCL's header comes with torch.
  find_path(NCCL_INCLUDE_DIR nccl.h REQUIRED HINTS ${FOX_TORCH_DIR}/../nvidia/nccl/include NO_DEFAULT_PATH
            PATHS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/include /usr/include)
  target_include_directories(fox_cuda SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS} ${NCCL_INCLUDE_DIR})
  # The runtime that torch loads, not a second one inside this library.
  set_target_properties(fox_cuda PROPERTIES CUDA_RUNTIME_LIBRARY Shared LINKER_LANGUAGE CXX)
  target_link_libraries(fox_cuda PRIVATE CUDA::cudart)
endmacro()
