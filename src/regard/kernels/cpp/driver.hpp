// From one request to pieces of work on threads.
#pragma once
#include <functional>

#include "request.hpp"

namespace regard {

// False if `interrupted` said so; the results are incomplete then. Throws std::bad_alloc.
bool answer(Request request, const Target& target, int threads,
            const std::function<bool()>& interrupted);

}  // namespace regard
