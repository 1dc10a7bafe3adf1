# Asks the TensorFlow of Python3_EXECUTABLE how to compile against it, and makes the target sok_tensorflow of the answer.
find_package(Python3 COMPONENTS Interpreter REQUIRED)

execute_process(
  COMMAND "${CMAKE_COMMAND}" -E env TF_CPP_MIN_LOG_LEVEL=3 CUDA_VISIBLE_DEVICES=
    "${Python3_EXECUTABLE}" "${CMAKE_CURRENT_LIST_DIR}/tensorflow_info.py"
  OUTPUT_VARIABLE sok_tf_info ERROR_VARIABLE sok_tf_error RESULT_VARIABLE sok_tf_result
  OUTPUT_STRIP_TRAILING_WHITESPACE)
if(NOT sok_tf_result EQUAL 0)
  message(FATAL_ERROR "${Python3_EXECUTABLE} cannot import TensorFlow, against which the ops are built. Install it "
    "there (pip install 'tensorflow==2.21.*'), or name another Python with -DPython3_EXECUTABLE=...\n${sok_tf_error}")
endif()

# One KEY=VALUE a line.
string(REPLACE "\n" ";" sok_tf_lines "${sok_tf_info}")
foreach(line IN LISTS sok_tf_lines)
  if(line MATCHES "^(SOK_TF_[A-Z0-9_]+)=(.*)$")
    set(${CMAKE_MATCH_1} "${CMAKE_MATCH_2}")
  endif()
endforeach()
message(STATUS "TensorFlow ${SOK_TF_VERSION} (${SOK_TF_GIT_VERSION}), C++11 ABI ${SOK_TF_CXX11_ABI}, ${SOK_TF_INCLUDE_DIR}")

add_library(sok_tensorflow INTERFACE)
target_include_directories(sok_tensorflow SYSTEM INTERFACE "${SOK_TF_INCLUDE_DIR}")
string(REPLACE " " ";" sok_tf_options "${SOK_TF_COMPILE_OPTIONS}")
target_compile_options(sok_tensorflow INTERFACE ${sok_tf_options})
target_link_libraries(sok_tensorflow INTERFACE "${SOK_TF_FRAMEWORK_LIBRARY}")

# With TensorFlow's C interface too, for a test's device.
add_library(sok_tensorflow_c INTERFACE)
target_link_libraries(sok_tensorflow_c INTERFACE sok_tensorflow "${SOK_TF_C_LIBRARY}")

# Strings cross from sok_cpu to the ops, so both use TensorFlow's string layout.
add_compile_definitions(_GLIBCXX_USE_CXX11_ABI=${SOK_TF_CXX11_ABI})
