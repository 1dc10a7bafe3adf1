# Several sources of a library at a time. Each makes its own copy of what it uses of templates and inline functions, those of the
# standard library above all, and most of what a compiler does is to make them. So names in a library's anonymous namespaces
# differ from source to source. (Those of the CUDA kernels do not: each has its kThreads.) Not with a
# launcher: ccache does better with sources that change one by one.
function(sok_compile_together name)
  if(NOT SOK_TOGETHER OR CMAKE_CXX_COMPILER_LAUNCHER)
    return()
  endif()
  set_target_properties(${name} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 8)
  # A type of one source alone, which g++ takes for one that several could see.
  target_compile_options(${name} PRIVATE $<$<COMPILE_LANG_AND_ID:CXX,GNU>:-Wno-subobject-linkage>)
endfunction()
