// One row of attention again, in a type with more range; see redo.cpp.
#pragma once
#include "request.hpp"

namespace regard {

void redo_row(const Request& q, int64_t b, int64_t h, int64_t i, bool whole_row);

}  // namespace regard
