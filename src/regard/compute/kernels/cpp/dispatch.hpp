// Which CPU targets were built, which this machine can run, and which is active.
#pragma once
#include "request.hpp"

namespace regard {

// Best first; terminated by nullptr.
extern const Target* const kTargets[];
bool usable(const Target& target);

}  // namespace regard
