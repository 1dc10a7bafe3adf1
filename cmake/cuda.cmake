# The CUDA kernels: sok_cuda for devices (libsok_cuda.so), sok_cuda_emulated for tests without one. Both from the same files.

if(NOT SOK_CUDA MATCHES "^(AUTO|auto|NVCC|nvcc|ON|on|OFF|off|1|0|TRUE|FALSE)$")
  message(FATAL_ERROR "SOK_CUDA must be AUTO, NVCC, ON or OFF. Received: '${SOK_CUDA}'.")
endif()
string(TOUPPER "${SOK_CUDA}" sok_cuda_wanted)
# Kernels that nothing here can run take minutes to compile. The driver makes these when it finds a GPU (dxg: under WSL).
if(sok_cuda_wanted STREQUAL "AUTO" AND NOT EXISTS /dev/nvidiactl AND NOT EXISTS /dev/dxg)
  set(sok_cuda_wanted OFF)
endif()

set(SOK_CUDA_SOURCES
  cuda/sparse_update.cu # first: it takes longest
  cuda/check_ids.cu
  cuda/combine.cu
  cuda/combine_grad.cu
  cuda/device_decay.cu
  cuda/device_words.cu
  cuda/embedding_table.cu
  cuda/exchange.cu
  cuda/exchange_wire.cu
  cuda/hash_table.cu
  cuda/initializer.cu
  cuda/partition.cu
  cuda/route.cu
  cuda/row_changes.cu
  cuda/row_store.cu
  cuda/segment_sum.cu
  cuda/sum_rows.cu
  cuda/table_bad.cu
  cuda/table_group.cu
  cuda/table_state.cu
  cuda/table_update.cu
  cuda/unique.cu
)
set(SOK_CUDA_HOST_SOURCES
  cuda/c_api.cc
  cuda/c_api_order.cc
  cuda/c_api_table.cc
  cuda/device_memory.cc
  cuda/device_store.cc
  cuda/device_tier.cc
  cuda/device_tier_held.cc
  cuda/device_tier_store.cc
  cuda/held_rows.cc
  cuda/home_device.cc
  cuda/records_to_host.cc
  cuda/staging.cc
  cuda/table_locks.cc
)

# A sanitized build is for tests on the host.
set(SOK_HAS_CUDA OFF)
set(SOK_CUDA_VERSION none)
if(sok_cuda_wanted AND NOT SOK_SANITIZE)
  # Machine code for these, and intermediate code of the last, which newer devices compile when first used.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90 CACHE STRING "CUDA architectures")
  endif()
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX} AND EXISTS /usr/local/cuda/bin/nvcc)
    set(CMAKE_CUDA_COMPILER /usr/local/cuda/bin/nvcc)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    enable_language(CUDA)
    set(SOK_HAS_CUDA ON)
  elseif(NOT sok_cuda_wanted MATCHES "^(AUTO|NVCC)$")
    message(FATAL_ERROR "SOK_CUDA=${SOK_CUDA}, but nvcc was not found or does not work. Install the CUDA toolkit, name its "
      "nvcc by the environment variable CUDACXX, or build with SOK_CUDA=OFF.")
  endif()
endif()
message(STATUS "CUDA kernels: ${SOK_HAS_CUDA}")

if(SOK_HAS_CUDA)
  set(SOK_CUDA_VERSION ${CMAKE_CUDA_COMPILER_VERSION})
  set(CMAKE_CUDA_FLAGS_RELEASE "-O3 -DNDEBUG")
  # An object library: libsok_cuda.so and TensorFlow's ops are both made of it.
  sok_join(sok_joined cu cuda ${SOK_CUDA_SOURCES})
  add_library(sok_cuda_kernels OBJECT ${sok_joined} ${SOK_CUDA_HOST_SOURCES})
  target_include_directories(sok_cuda_kernels PUBLIC include cuda)
  target_compile_features(sok_cuda_kernels PUBLIC cxx_std_17 cuda_std_17)
  # No fused multiply-add, exact division and roots: results are those of the CPU, bit for bit where it says so.
  target_compile_options(sok_cuda_kernels PRIVATE
    "$<$<COMPILE_LANGUAGE:CUDA>:-fmad=false;-prec-div=true;-prec-sqrt=true;-ftz=false;--expt-relaxed-constexpr>"
    "$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-ffp-contract=off>"
    # A kernel that spills is slow. Not asked of older toolkits, whose CUB has one for sorts.
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<VERSION_GREATER_EQUAL:${CMAKE_CUDA_COMPILER_VERSION},13.0>>:-Xptxas=--warn-on-spills>"
    "$<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${SOK_WERROR}>>:-Werror=all-warnings;-Xcompiler=-Werror>"
    "$<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra;-ffp-contract=off>"
    "$<$<AND:$<COMPILE_LANGUAGE:CXX>,$<BOOL:${SOK_WERROR}>>:-Werror>")
  set_target_properties(sok_cuda_kernels PROPERTIES
    POSITION_INDEPENDENT_CODE ON CXX_EXTENSIONS OFF CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Static)
  # Of the sources that the host's compiler takes.
  find_package(CUDAToolkit REQUIRED)
  target_include_directories(sok_cuda_kernels SYSTEM PRIVATE ${CUDAToolkit_INCLUDE_DIRS})

  # CUDA's runtime is inside: a machine needs a driver and nothing else.
  add_library(sok_cuda SHARED $<TARGET_OBJECTS:sok_cuda_kernels>)
  target_link_libraries(sok_cuda PRIVATE sok_cpu)
  target_link_options(sok_cuda PRIVATE -Wl,--no-undefined -Wl,--exclude-libs,ALL)
  set_target_properties(sok_cuda PROPERTIES
    LINKER_LANGUAGE CUDA CUDA_RUNTIME_LIBRARY Static SKIP_BUILD_RPATH ON)
  if(SOK_OPS)
    add_custom_command(TARGET sok_cuda POST_BUILD
      COMMAND "${CMAKE_COMMAND}" -E make_directory "${SOK_OUTPUT_DIR}"
      COMMAND "${CMAKE_COMMAND}" -E copy "$<TARGET_FILE:sok_cuda>" "${SOK_OUTPUT_DIR}/libsok_cuda.so.new"
      COMMAND "${CMAKE_COMMAND}" -E rename "${SOK_OUTPUT_DIR}/libsok_cuda.so.new" "${SOK_OUTPUT_DIR}/libsok_cuda.so"
      VERBATIM)
  endif()
endif()

if(SOK_CUDA_EMULATED OR SOK_OPS)
  # The host's compiler takes a .cu file for what it is when another file includes it.
  sok_join(sok_emulated_sources cc emulated ${SOK_CUDA_SOURCES})
  # Shared for Python. Not where a sanitizer would see the CPU's code twice, in the library and in the program.
  if(SOK_SANITIZE)
    set(sok_emulated_type STATIC)
  else()
    set(sok_emulated_type SHARED)
  endif()
  add_library(sok_cuda_emulated ${sok_emulated_type}
    ${sok_emulated_sources} ${SOK_CUDA_HOST_SOURCES}
    tests/cuda/emulator/blocks.cc tests/cuda/emulator/devices.cc tests/cuda/emulator/faults.cc
    tests/cuda/emulator/memory.cc tests/cuda/emulator/runtime.cc)
  if(SOK_EMULATOR_YIELDS)
    if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
      message(FATAL_ERROR "SOK_EMULATOR_YIELDS needs clang++, which tells of loads and stores.")
    endif()
    target_sources(sok_cuda_emulated PRIVATE tests/cuda/emulator/loads.cc)
    set(sok_yields -fsanitize-coverage=func,trace-loads,trace-stores)
    set_property(SOURCE ${sok_emulated_sources} APPEND PROPERTY COMPILE_OPTIONS ${sok_yields})
    set_property(SOURCE ${sok_emulated_sources} PROPERTY SKIP_PRECOMPILE_HEADERS ON)
  endif()
  target_include_directories(sok_cuda_emulated PUBLIC tests/cuda/emulator include cuda)
  target_link_libraries(sok_cuda_emulated PUBLIC sok_cpu PRIVATE sok_flags Threads::Threads)
  if(SOK_SANITIZE)
    target_compile_options(sok_cuda_emulated PRIVATE -O1)
    set_property(SOURCE "${CMAKE_CURRENT_BINARY_DIR}/emulated/sparse_update.cc" APPEND PROPERTY COMPILE_OPTIONS -O0)
  endif()
  set_property(SOURCE "${CMAKE_CURRENT_BINARY_DIR}/emulated/sparse_update.cc" PROPERTY SKIP_PRECOMPILE_HEADERS ON)
  sok_precompile_for_library(sok_cuda_emulated)
  target_link_options(sok_cuda_emulated PRIVATE -Wl,--no-undefined)
  set_target_properties(sok_cuda_emulated PROPERTIES CXX_EXTENSIONS OFF POSITION_INDEPENDENT_CODE ON)
  if(NOT SOK_CUDA_EMULATED)
    set_target_properties(sok_cuda_emulated PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
endif()
