# statetap::settings (language, include root, sanitizers) and statetap::warnings (errors for our own code).
if(NOT CMAKE_BUILD_TYPE)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "" FORCE)
endif()
# -O2: the loops that want -O3 (extractor/backend/cpu) ask for it, and the rest compiles in a third less time.
set(CMAKE_CXX_FLAGS_RELEASE "-O2 -DNDEBUG")
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_CXX_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
  set(CMAKE_C_COMPILER_LAUNCHER "${CCACHE_PROGRAM}")
endif()

add_library(statetap_settings INTERFACE)
add_library(statetap::settings ALIAS statetap_settings)
target_include_directories(statetap_settings INTERFACE "${CMAKE_SOURCE_DIR}")
# No contraction: a product and a sum give the same bits on machines with and without FMA.
target_compile_options(statetap_settings INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-ffp-contract=off>)
# Philox is constexpr code that device code calls too.
target_compile_options(statetap_settings INTERFACE $<$<COMPILE_LANGUAGE:CUDA>:--expt-relaxed-constexpr>)
if(STATETAP_SANITIZE)
  target_compile_options(statetap_settings INTERFACE -fsanitize=${STATETAP_SANITIZE} -fno-omit-frame-pointer)
  target_link_options(statetap_settings INTERFACE -fsanitize=${STATETAP_SANITIZE})
endif()
if(STATETAP_FUZZ)
  target_compile_options(statetap_settings INTERFACE -fsanitize=fuzzer-no-link -fno-sanitize-recover=undefined)
endif()

add_library(statetap_warnings INTERFACE)
add_library(statetap::warnings ALIAS statetap_warnings)
target_compile_options(statetap_warnings INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra -Werror -Wno-missing-field-initializers>)

# statetap_library(shard SOURCES a.cc b.cc PUBLIC dep… PRIVATE dep…) makes statetap_shard, alias statetap::shard.
function(statetap_library name)
  cmake_parse_arguments(ARG "" "" "SOURCES;PUBLIC;PRIVATE" ${ARGN})
  add_library(statetap_${name} STATIC ${ARG_SOURCES})
  add_library(statetap::${name} ALIAS statetap_${name})
  target_link_libraries(statetap_${name} PUBLIC statetap::settings ${ARG_PUBLIC}
                        PRIVATE statetap::warnings ${ARG_PRIVATE})
endfunction()
