# SPDX-License-Identifier: Apache-2.0
include(CMakePackageConfigHelpers)

# Headers only, so the package files go where a distribution keeps those of any architecture.
set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/vha")
set(pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")

install(
  DIRECTORY "${PROJECT_SOURCE_DIR}/include/vha"
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING
  PATTERN "*.hpp")
install(TARGETS vha EXPORT vhaTargets)
install(EXPORT vhaTargets NAMESPACE vha:: DESTINATION "${package_dir}")

configure_package_config_file(
  "${PROJECT_SOURCE_DIR}/cmake/vhaConfig.cmake.in" "${PROJECT_BINARY_DIR}/vhaConfig.cmake"
  INSTALL_DESTINATION "${package_dir}"
  NO_SET_AND_CHECK_MACRO)
write_basic_package_version_file("${PROJECT_BINARY_DIR}/vhaConfigVersion.cmake"
                                 COMPATIBILITY SameMajorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/vhaConfig.cmake"
              "${PROJECT_BINARY_DIR}/vhaConfigVersion.cmake"
        DESTINATION "${package_dir}")

# Relative to the file itself, so that an installed tree can be moved.
file(RELATIVE_PATH pc_includedir "${CMAKE_INSTALL_FULL_DATADIR}/pkgconfig"
     "${CMAKE_INSTALL_FULL_INCLUDEDIR}")
configure_file("${PROJECT_SOURCE_DIR}/cmake/vha.pc.in" "${PROJECT_BINARY_DIR}/vha.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/vha.pc" DESTINATION "${pkgconfig_dir}")
