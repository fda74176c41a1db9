// Symbol visibility: everything is hidden but what is marked.
#pragma once

#if defined(_WIN32)
#define SEGKI_EXPORT __declspec(dllexport)
#else
#define SEGKI_EXPORT __attribute__((visibility("default")))
#endif
