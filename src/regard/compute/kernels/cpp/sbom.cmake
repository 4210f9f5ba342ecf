# What is compiled into the native module, as CycloneDX, and its licences: into the wheel's metadata.
set(REGARD_STATIC_RUNTIME "" CACHE STRING
    "The C++ library of which the linker copies parts into the module: libc++, libstdc++ or none")

set(robin_map_version "unknown")
file(GLOB robin_map "${NB_DIR}/ext/robin_map/include/tsl/robin_growth_policy.h")
if(robin_map)
  file(STRINGS "${robin_map}" lines REGEX "define TSL_RH_VERSION_[A-Z]+ [0-9]+")
  string(REGEX MATCHALL "[0-9]+" robin_map_version "${lines}")
  list(JOIN robin_map_version "." robin_map_version)
endif()

configure_file("${CMAKE_CURRENT_LIST_DIR}/sbom.cdx.json.in" sbom.cdx.json)
if(REGARD_STATIC_RUNTIME)
  set(license "Apache-2.0 WITH LLVM-exception")
  if(REGARD_STATIC_RUNTIME STREQUAL "libstdc++")
    set(license "GPL-3.0-or-later WITH GCC-exception-3.1")
  endif()
  set(sbom "${CMAKE_CURRENT_BINARY_DIR}/sbom.cdx.json")
  file(READ "${sbom}" text)
  string(JSON count LENGTH "${text}" components)
  string(JSON text SET "${text}" components ${count} "{
    \"type\": \"library\", \"bom-ref\": \"runtime\", \"name\": \"${REGARD_STATIC_RUNTIME}\",
    \"version\": \"${CMAKE_CXX_COMPILER_VERSION}\",
    \"description\": \"the compiler's C++ library, with what it is made of; linked into the native module\",
    \"licenses\": [{\"expression\": \"${license}\"}]}")
  string(JSON text SET "${text}" dependencies 0 dependsOn 2 "\"runtime\"")
  file(WRITE "${sbom}" "${text}")
endif()

if(SKBUILD)
  install(FILES "${CMAKE_CURRENT_BINARY_DIR}/sbom.cdx.json"
          DESTINATION "${SKBUILD_METADATA_DIR}/sboms" RENAME regard.cdx.json)
  # Both licences ask for their text beside what was compiled; robin-map's begins its headers.
  file(GLOB nanobind_license "${NB_DIR}/../nanobind-${nanobind_VERSION}.dist-info/licenses/LICENSE")
  if(nanobind_license)
    install(FILES "${nanobind_license}" DESTINATION "${SKBUILD_METADATA_DIR}/licenses/nanobind")
  endif()
  if(robin_map)
    file(READ "${robin_map}" text LIMIT 4096)
    string(FIND "${text}" "*/" end)
    string(SUBSTRING "${text}" 0 ${end} text)
    file(WRITE "${CMAKE_CURRENT_BINARY_DIR}/LICENSE" "${text}*/\n")
    install(FILES "${CMAKE_CURRENT_BINARY_DIR}/LICENSE"
            DESTINATION "${SKBUILD_METADATA_DIR}/licenses/robin-map")
  endif()
endif()
