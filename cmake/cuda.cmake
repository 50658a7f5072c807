# The CUDA backend is a library of its own, libfox_cuda.so, that `fox` loads when a CUDA device is asked for: the
# command starts fast on a laptop, and a machine without nvcc builds everything else.
find_program(FOX_NVCC nvcc HINTS /usr/local/cuda/bin)
if(FOX_NVCC)
  option(FOX_CUDA "Build the CUDA backend" ON)
else()
  option(FOX_CUDA "Build the CUDA backend" OFF)
endif()
