# What sources include of the standard library, read once for all that are compiled alike: half a second to a second of the two to
# eight that each takes. Not with a launcher: ccache does better without.
set(sok_precompiled <algorithm> <atomic> <cmath> <cstdint> <cstdio> <cstdlib> <cstring> <functional> <map> <memory> <mutex>
  <random> <sstream> <string> <thread> <unordered_map> <utility> <vector>)

# A library. Sources with options of their own are compiled in another way, and are to be left out: SKIP_PRECOMPILE_HEADERS.
function(sok_precompile_for_library name)
  if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
    target_precompile_headers(${name} PRIVATE ${sok_precompiled})
  endif()
endfunction()

# Programs of one source each.
function(sok_precompile_for_tests names)
  if(CMAKE_CXX_COMPILER_LAUNCHER)
    return()
  endif()
  foreach(name IN LISTS ${names})
    get_target_property(options ${name} COMPILE_OPTIONS)
    string(MAKE_C_IDENTIFIER "first_with_${options}" first)
    if(DEFINED ${first})
      target_precompile_headers(${name} REUSE_FROM ${${first}})
    else()
      set(${first} ${name})
      target_precompile_headers(${name} PRIVATE ${sok_precompiled})
    endif()
  endforeach()
endfunction()
