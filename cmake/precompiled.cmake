# What tests include of the standard library, read once for all that are compiled alike: a second of three to eight for each.
# Not with a launcher: ccache does better without.
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
      target_precompile_headers(${name} PRIVATE <algorithm> <atomic> <cmath> <cstdint> <cstdio> <cstdlib> <cstring> <functional>
        <map> <memory> <random> <sstream> <string> <thread> <vector>)
    endif()
  endforeach()
endfunction()
