// How many CPUs this process may use.
#pragma once
#include <string>

namespace regard {

// Its affinity now, cut by the quota of its control group at the first call.
int usable_cpus();

// CPUs that the quotas of a process' control group and of the groups around it allow, rounded up;
// 0 without a quota. `groups` is where groups are mounted, `membership` the file that names ours.
int cpu_quota(const std::string& groups, const std::string& membership);

}  // namespace regard
