# fox_embed(ROOM SYMBOL FILE): puts FILE into the room's objects as
#   extern const char fox_embedded_SYMBOL[];  extern const size_t fox_embedded_SYMBOL_size;
# so that a program needs none of its data files at run time. FILE may appear only at build time.
enable_language(ASM)
function(fox_embed room symbol file)
  set(stub ${CMAKE_BINARY_DIR}/embed/${symbol}.S)
  file(CONFIGURE OUTPUT ${stub} CONTENT [[
    .section .rodata
    .global fox_embedded_@symbol@
    .balign 16
fox_embedded_@symbol@:
    .incbin "@file@"
1:
    .byte 0
    .global fox_embedded_@symbol@_size
    .balign 8
fox_embedded_@symbol@_size:
    .quad 1b - fox_embedded_@symbol@
]] @ONLY)
  set_source_files_properties(${stub} PROPERTIES OBJECT_DEPENDS ${file} SKIP_PRECOMPILE_HEADERS ON
                              COMPILE_OPTIONS -Wa,--noexecstack)
  target_sources(room_${room} PRIVATE ${stub})
endfunction()
