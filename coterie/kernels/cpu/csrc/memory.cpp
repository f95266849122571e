// Refused memory, from `refuse` or from a container of the standard library, ends a call and not the
// process. This file alone is compiled with exceptions: with them everywhere products of 64 rows took
// 1.7 times as long.
#include <new>

#include "team.h"

bool has_run(void (*call)(void*), void* data) {
    try {
        call(data);
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

void refuse() { throw std::bad_alloc(); }
