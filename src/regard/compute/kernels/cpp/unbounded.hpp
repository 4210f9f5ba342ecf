// One row of attention again, by numbers of any size; see unbounded.cpp.
#pragma once
#include "request.hpp"

namespace regard {

void unbounded_row(const Request& q, int64_t b, int64_t h, int64_t i, bool whole);

}  // namespace regard
